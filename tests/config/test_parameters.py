"""What optimizers and schedulers take, beside what a real training makes of it. Generated: each parameter of each class of torch's
and DeepSpeed's that can be made on a CPU, with a text that nobody knows."""

import pytest

from dsdoctor.core.finding import Severity
from tests.config.many import ask_many, judge_many
from tests.config.parameter_texts import TextFor, texts
from tests.config.table import initialized

pytestmark = pytest.mark.launch  # needs DeepSpeed
EVERY = 16
"""Each sixteenth one in CI; ``benchmarks/config.py`` tries them all."""


def disagreeing(cases: list[TextFor]) -> list[str]:
    """Those of which something else is said than what happens: a text that is not called an error, an alarm of a healthy one."""
    found = []
    outcomes = initialized([case.config for case in cases])
    for case, verdicts, outcome in zip(
        cases, judge_many([case.config for case in cases], engine=False), outcomes, strict=True
    ):
        errors = [each.path for each in verdicts if each.finding.severity is Severity.ERROR]
        well = case.path in errors if case.path else bool(errors) == bool(outcome["failed"])
        # a class that cannot train here at all says so, and nothing of its parameters
        if not well and (*case.path[:1], "type") not in errors:
            found.append(f"{case.config} {case.path} {outcome['failed']} {outcome['error']} said: {errors}")
    return found


def test_a_text_for_a_parameter_is_told() -> None:
    every = list(texts(ask_many([{"train_batch_size": 8}])[0]))

    assert len(every) > 200
    assert disagreeing(every[::EVERY]) == []


def test_words_that_are_none_and_what_is_not_to_blame() -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
    cyclic = {"base_lr": 0.1, "max_lr": 1, "scale_mode": "iteration"}
    parts = (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        {"optimizer": sgd, "scheduler": {"type": "CyclicLR", "params": cyclic}},
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "torch_adam": True}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
        {"scheduler": {"type": "ReduceLROnPlateau", "params": {}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 5}}},
    )
    told = judge_many([{"train_batch_size": 4, **part} for part in parts], engine=False)

    assert [[(each.path[-1], each.finding.severity.value) for each in found] for found in told] == [
        [("warmup_type", "error")],
        [("scale_mode", "error")],
        [("lr", "error")],
        [("params", "error")],
        [("type", "warning")],
        [("warmup_num_steps", "warning")],
    ]
    assert [found[0].finding.fix.text for found in told[:4] if found[0].finding.fix] == [
        "write linear or log",
        "write iterations",
        "write 1e-5 without quotes",
        "add total_num_steps to scheduler.params",
    ]
