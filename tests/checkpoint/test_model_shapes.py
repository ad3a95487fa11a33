"""--model: parameters that the model has and the checkpoint has not, the other way round, other shapes; none for the same model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.facts import Examined, examine
from dsdoctor.checkpoint.folder import look, read_tag
from dsdoctor.checkpoint.parameters import ModelShapes, judge_model
from dsdoctor.cli.app import run
from dsdoctor.core.finding import Finding, Severity
from tests.checkpoint.written import KINDS, SHAPES, Kind, model_states, save, write

PLAIN = [kind for kind in KINDS if not kind.experts and not kind.pipeline]
Shapes = dict[str, tuple[int, ...]]


def examined(folder: Path) -> Examined:
    seen = look(folder)
    return examine(seen, read_tag(seen.tags[0]))


def judged(folder: Path, shapes: Shapes) -> tuple[Finding, ...]:
    return tuple(judge_model(examined(folder), ModelShapes(name="Tiny", shapes=shapes)))


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_nothing_is_said_of_the_model_that_was_saved(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, kind)

    assert judged(tmp_path, dict(SHAPES)) == ()


CHANGES: dict[str, tuple[Callable[[Shapes], Any], str]] = {
    "another shape": (lambda shapes: shapes.update({"0.first": (4, 2)}), "0.first is 3x2 there and 4x2 in the model"),
    "one more": (lambda shapes: shapes.update({"2.third": (2,)}), "only the model has: 2.third"),
    "one less": (lambda shapes: shapes.pop("1.second"), "only the checkpoint has: 1.second"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_difference_is_told(tmp_path: Path, stage: int, change: str) -> None:
    write(tmp_path, Kind(stage=stage))
    shapes = dict(SHAPES)
    CHANGES[change][0](shapes)

    (found,) = judged(tmp_path, shapes)

    assert (found.rule, found.severity) == ("checkpoint-model-differs", Severity.ERROR)
    assert found.evidence == (CHANGES[change][1],)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"first": (3, 2)}, "only the model has: first"),
        ({f"model.{name}": shape for name, shape in SHAPES.items()}, "without the prefix 'model.'"),
    ],
)
def test_a_wrapper_is_told_and_is_no_error_where_all_names_fit(tmp_path: Path, names: Shapes, told: str) -> None:
    write(tmp_path, Kind())

    (found,) = judged(tmp_path, names)

    assert any(told in line for line in (found.title, *found.evidence))
    assert (found.severity is Severity.NOTE) == ("wrapper" in found.title)


def test_second_names_are_no_difference_and_left_out_parameters_neither(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind(stage=2))
    kept = model_states(Kind(stage=2), 2, 1)
    save(
        tag / "mp_rank_00_model_states.pt", {**kept, "shared_params": {"head": "1.second"}, "frozen_param_shapes": None}
    )

    assert judged(tmp_path, {**SHAPES, "head": (5,), "base.frozen": (7, 7)}) == ()


def test_a_model_that_is_too_large_is_handed_to_nobody(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "saved", KINDS[9])
    (tmp_path / "large").mkdir()
    with (tmp_path / "large/config.json").open("wb") as made:
        made.truncate((64 << 20) + 1)

    assert run(["checkpoint", str(tmp_path / "saved"), "--model", str(tmp_path / "large")]) == 2
    assert "large is larger than 64 MiB" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "saved", KINDS[9])

    status = run(["checkpoint", str(tmp_path / "saved"), "--model", str(tmp_path / "nowhere.json")])

    assert status == 2
    assert "there is no model" in capsys.readouterr().err
