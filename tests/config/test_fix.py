"""`--fix` loses nothing that is wanted: every key of DeepSpeed under a name that is nearly its own, at every depth."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.config.answer import KeyPath, Refusal, lookup
from dsdoctor.config.document import correct, parse
from dsdoctor.config.judge import corrections_of
from dsdoctor.config.keys import stages_written
from tests.cli.runner import run
from tests.config.many import judge_many
from tests.config.mistakes import BASE, closed, nested, some_value
from tests.config.recorded import recorded, verdicts
from tests.each import each


def shortened(name: str, _: KeyPath) -> str:
    *rest, last = name.split("_")
    return "_".join([*rest, last[:5]]) if len(last) > 6 else name


def without_end(name: str, _: KeyPath) -> str:
    words = name.split("_")
    return "_".join(words[:-1]) if len(words) > 2 else name


def without_beginning(name: str, _: KeyPath) -> str:
    words = name.split("_")
    return "_".join(words[1:]) if len(words) > 2 else name


def turned(name: str, _: KeyPath) -> str:
    *rest, last = name.split("_")
    return "_".join([last, *rest])


def prefixed(name: str, section: KeyPath) -> str:
    return f"{section[-1].split('_')[0]}_{name}" if section else name


NEAR = (shortened, without_end, without_beginning, turned, prefixed)
UNKNOWN = ({"deep": 1}, [1], 0, 2.5, False, True, "cpu")


def near_misses() -> Iterator[tuple[str, dict[str, Any], KeyPath, KeyPath]]:
    """Kind, configuration, the path as it is written and as it should be: each name that no key has."""
    for section, key in closed(recorded()):
        value = some_value(recorded(), (*section.path, key.name), key)
        for near in NEAR:
            wrong = near(key.name, section.path)
            if wrong not in section.names and (section.path or wrong not in recorded().removed) and not key.deprecated:
                path = (*section.path, wrong)
                yield near.__name__, nested(path, value or {"wanted": 1}), path, (*section.path, key.name)


def answers_to(config: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """What DeepSpeed answers: a section that is a model refuses a key that it does not have."""
    section = recorded().section(path[:-1])
    if not section or not section.model or path[-1] in section.names:
        return {}
    return {"refusals": (Refusal(paths=(path,), kind="extra_forbidden", message="Extra inputs", model=section.model),)}


def fixed(config: dict[str, Any], found: Any) -> dict[str, Any]:
    return parse(correct(json.dumps(config), config, corrections_of(found)).text, "").config


def leaves(value: Any) -> list[str]:
    """What a configuration says, wherever it stands."""
    if isinstance(value, dict):
        return sorted(leaf for inner in value.values() for leaf in leaves(inner))
    return [json.dumps(value)]


@pytest.mark.slow
def test_a_key_under_nearly_its_own_name_keeps_its_value_and_most_get_their_name() -> None:
    right, lost, wrong = 0, [], []
    cases = list(near_misses())
    for kind, config, path, meant in cases:
        after = fixed(config, verdicts(config, answer=answers_to(config, path)))
        if leaves(after) != leaves(config):
            lost.append((kind, path, after))
        right += lookup(after, meant) is not None
        if lookup(after, path) is None and lookup(after, meant) is None:
            wrong.append((kind, path, after))

    assert len(cases) > 600
    assert lost == []
    # what is cut in the middle of a name may be nearer to another one
    assert len(wrong) <= len(cases) // 50, wrong
    assert right > len(cases) * 3 // 4


@each("value", UNKNOWN)
@pytest.mark.slow
def test_a_key_that_nobody_knows_is_never_removed_with_its_value(value: Any) -> None:
    for section in [one for one in recorded().sections if one.model]:
        path = (*section.path, "quite_another_thing")
        config = nested(path, value)

        assert fixed(config, verdicts(config, answer=answers_to(config, path))) == config


@each("value", [None, "", {}, []])
def test_a_key_that_nobody_knows_and_that_says_nothing_goes(value: Any) -> None:
    path = ("zero_optimization", "quite_another_thing")
    config = nested(path, value)

    assert fixed(config, verdicts(config, answer=answers_to(config, path))) == {**BASE, "zero_optimization": {}}


@each(("value", "goes"), [({"enabled": True}, False), ({"enabled": False, "x": 1}, True), (False, True), (True, False)])
def test_a_feature_that_was_removed_goes_only_where_it_was_off(value: Any, goes: bool) -> None:
    config = {**BASE, "compression_training": value}
    refusal = Refusal(paths=(("compression_training",),), kind="DeepSpeedConfigError", message="has been removed")

    assert ("compression_training" not in fixed(config, verdicts(config, answer={"refusals": (refusal,)}))) is goes


@each(
    ("config", "stages"),
    [
        ({"zero_optimization": {"zero_stage": 3}}, {3}),
        ({"zero_optimization": {"satge": "2"}}, {2}),
        ({"deepspeed": {"zero": {"stage": 1}}}, {1}),
        ({"zero_optimization": 3}, {3}),
        ({"zero_stage": 3, "zero_optimization": {"stage": 0}}, {0, 3}),
        ({"zero_optimization": {"stage": "auto"}}, set()),
        ({"zero_optimization": {"stage": True}, "pipeline": {"stages": 2}, "steps_per_print": 1}, set()),
    ],
)
def test_the_stages_that_a_file_names(config: dict[str, Any], stages: set[int]) -> None:
    assert stages_written(config) == stages


@pytest.mark.launch
def test_the_installed_deepspeed_accepts_what_was_renamed_and_nothing_is_lost() -> None:
    cases = list(near_misses())[::3]
    configs = [config for _, config, _, _ in cases]
    after = [fixed(config, found) for config, found in zip(configs, judge_many(configs, engine=False), strict=True)]

    assert [(config, made) for config, made in zip(configs, after, strict=True) if leaves(config) != leaves(made)] == []


@pytest.mark.launch
def test_a_stage_that_is_not_written_is_not_trained_with(tmp_path: Path) -> None:
    file, out = tmp_path / "ds_config.json", tmp_path / "out.json"
    file.write_text('{"train_batch_size": 8, "zero": {"stage": 3}, "zero_optimization": {"overlap_com": true}}')
    refused = run("config", str(file), "--fix", str(out), "--json")
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"zero_stage": 3, "stage3_max_live_params": 5}}')
    made = run("config", str(file), "--fix", str(out))

    assert refused.returncode == 1
    assert json.loads(refused.stdout)["findings"][0]["rule"] == "config-fix-changes-stage"
    assert made.returncode == 0
    assert "ZeRO stage 3" in made.stdout
    assert json.loads(out.read_text())["zero_optimization"] == {"stage": 3, "stage3_max_live_parameters": 5}
