"""Tensors that are cut up over ranks: loaded as they were saved, and nothing is promised for another cut.

Real ranks of AutoTP load them in ``benchmarks/checkpoint.py``.
"""

import itertools

import pytest

from dsdoctor.checkpoint.contents import Facts
from dsdoctor.checkpoint.plan import Plan, Verdict, outcome


def cut(stage: int, *, by_deepspeed: bool = True) -> Facts:
    """What two ranks save that share each tensor."""
    return Facts(
        version="0.19.8", step=2, stage=stage, dtype="bf16", data=1, model=2, pipeline=1, tensor=2,
        partitions=1 if stage else None, bf16=stage > 0, sharded_optimizer=stage > 0, cut_by_deepspeed=by_deepspeed,
    )  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cut_tensors_load_with_the_ranks_that_saved_them(stage: int) -> None:
    assert outcome(cut(stage), Plan(world=2)).verdict is Verdict.LOADS
    assert outcome(cut(stage, by_deepspeed=False), Plan(world=2)).verdict is Verdict.LOADS


def test_another_cut_or_other_ranks_are_never_said_to_load() -> None:
    plans = [
        Plan(world=2, tensor=1),
        Plan(world=4, tensor=4),
        Plan(world=4),
        Plan(tensor=1),
        Plan(world=2, pipeline=2, tensor=1),
    ]
    for stage, plan, by_deepspeed in itertools.product((0, 1, 2, 3), plans, (True, False)):
        assert outcome(cut(stage, by_deepspeed=by_deepspeed), plan).verdict is not Verdict.LOADS


def test_what_is_known_of_another_cut_by_deepspeed_is_said() -> None:
    ours, models_own = (outcome(cut(2, by_deepspeed=each), Plan(world=2, tensor=1)) for each in (True, False))

    assert "not as it is" in ours.why
    assert "is not found" in ours.words
    assert models_own.why.endswith("was not tried")


def test_between_stages_that_name_other_files_cut_tensors_cannot_be_loaded_either() -> None:
    assert outcome(cut(2), Plan(world=2, stage=3)).verdict is Verdict.CANNOT
    assert outcome(cut(0), Plan(world=2, stage=1)).verdict is Verdict.CANNOT
