"""Thousands of mistakes made mechanically, judged with the answers of the installed DeepSpeed: each is named with its right key."""

import pytest

from dsdoctor.config.answer import Asked
from tests.config.many import ask_many, judge_many
from tests.config.mistakes import Mistake, keys_moved_in, keys_moved_out, mistakes_of_kind, typing_mistakes
from tests.config.recorded import recorded

pytestmark = pytest.mark.launch  # needs DeepSpeed
EVERY = 2
"""Each second one in CI; ``benchmarks/config.py`` tries them all."""


@pytest.fixture(scope="module")
def asked() -> Asked:
    return ask_many([{"train_batch_size": 8}])[0]


def unnamed(mistakes: list[Mistake]) -> list[str]:
    """Those that were not named, or not with the key that was meant."""
    missed = []
    for mistake, found in zip(mistakes, judge_many([each.config for each in mistakes], engine=False), strict=True):
        mine = [verdict.finding for verdict in found if verdict.path == mistake.wrong]
        rules = {mistake.rule, "config-value-refused"} if mistake.kind == "text" else {mistake.rule}
        if not any(finding.rule in rules and ".".join(mistake.right) in finding.title for finding in mine):
            missed.append(f"{mistake.kind}: {mistake.config} {[verdict.finding.title for verdict in found]}")
    return missed


def test_every_mistake_is_named(asked: Asked) -> None:
    every = [*typing_mistakes(asked), *mistakes_of_kind(asked), *keys_moved_out(asked), *keys_moved_in(asked)]

    assert len(every) > 2500
    assert unnamed(every[::EVERY]) == []


def test_the_recorded_answer_is_that_of_the_installed_deepspeed(asked: Asked) -> None:
    if asked.version != recorded().version:
        pytest.skip(
            f"DeepSpeed {asked.version} is installed; python tests/config/record_answer.py writes its answer down"
        )

    assert asked.sections == recorded().sections
    assert (asked.stages, asked.names.optimizers) == (recorded().stages, recorded().names.optimizers)
