"""A run whose engine has no optimizer, and a checkpoint of such a run: what load_checkpoint does there, and what helps.

Real ranks load them in ``benchmarks/checkpoint.py``.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import Judged, judge
from dsdoctor.checkpoint.loading import ALL, MODULE, NO_OPTIMIZER, Plan, Verdict
from tests.checkpoint.written import Kind, model_states, save, write


def judged(folder: Path, **plan: Any) -> Judged:
    return judge(look(folder), None, Plan(**plan))


def verdict(found: Judged) -> Verdict | None:
    return found.outcome.verdict if found.outcome else None


def without_optimizer(folder: Path, dtype: str = "fp32") -> None:
    """What an engine without an optimizer saves: the states of none."""
    kind = Kind(stage=0, dtype=dtype)
    tag = write(folder, kind)
    for file in tag.glob("*model_states.pt"):
        save(file, {**model_states(kind, kind.world, 1), "optimizer": None, "param_shapes": None})


def test_an_evaluation_loads_without_zero_what_was_saved_below_stage_3_and_in_bf16_by_an_argument_only(
    tmp_path: Path,
) -> None:
    wrong = []
    for stage, dtype in itertools.product((0, 1, 2), ("fp32", "bf16")):
        folder = tmp_path / f"{stage}{dtype}"
        for file in write(folder, Kind(stage=stage, dtype=dtype)).glob("*optim_states.pt"):
            file.unlink()
        for load, planned in itertools.product((ALL, NO_OPTIMIZER, MODULE), ("fp32", "bf16")):
            found = judged(folder, stage=0, dtype=planned, load=load, evaluation=True)
            wanted = Verdict.CANNOT if planned == "bf16" and load == ALL else Verdict.LOADS
            if verdict(found) is not wanted or bool(found.findings) != (wanted is Verdict.CANNOT):
                wrong.append((stage, dtype, planned, load, verdict(found), found.findings))

    assert wrong == []


def test_with_zero_no_engine_without_an_optimizer_loads_anything(tmp_path: Path) -> None:
    for stage, load in itertools.product((1, 2, 3), (ALL, NO_OPTIMIZER, MODULE)):
        write(tmp_path / str(stage), Kind(stage=stage, dtype="bf16"))
        found = judged(tmp_path / str(stage), load=load, evaluation=True)
        (finding,) = found.findings
        assert (verdict(found), finding.rule) == (Verdict.CANNOT, "checkpoint-cannot-load")
        assert finding.fix is not None
        assert ('"stage": 0' in finding.fix.text) == (stage < 3)


@pytest.mark.slow
def test_what_is_advised_for_an_evaluation_with_zero_is_enough(tmp_path: Path) -> None:
    wrong = []
    for saved, dtype in itertools.product((0, 1, 2), ("fp32", "bf16")):
        folder = tmp_path / f"{saved}{dtype}"
        write(folder, Kind(stage=saved, dtype=dtype))
        for stage, planned, load in itertools.product((1, 2, 3), ("fp32", "bf16"), (ALL, NO_OPTIMIZER, MODULE)):
            (finding,) = judged(folder, stage=stage, dtype=planned, load=load, evaluation=True).findings
            text = finding.fix.text if finding.fix else ""
            advised = MODULE if "load_module_only=True" in text else load
            followed = judged(folder, stage=0, dtype=planned, load=advised, evaluation=True)
            if '"stage": 0' not in text or verdict(followed) is not Verdict.LOADS:
                wrong.append((saved, dtype, stage, planned, load, text))

    assert wrong == []


def test_what_an_engine_without_an_optimizer_saved_loads_in_one_like_it_and_elsewhere_by_an_argument(
    tmp_path: Path,
) -> None:
    without_optimizer(tmp_path)

    as_saved = judged(tmp_path)
    trained = judged(tmp_path, evaluation=False)
    module = judged(tmp_path, evaluation=False, load=MODULE)

    assert [verdict(each) for each in (as_saved, trained, module)] == [Verdict.LOADS, Verdict.CANNOT, Verdict.LOADS]
    assert as_saved.findings == ()
    assert trained.findings[0].fix is not None
    assert "load_module_only=True" in trained.findings[0].fix.text
