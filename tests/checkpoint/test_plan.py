"""Tensors that are cut up over ranks: those that DeepSpeed cut, and those that a model cuts itself.

Real ranks of AutoTP load them in ``benchmarks/checkpoint.py``.
"""

import itertools

import pytest

from dsdoctor.checkpoint.facts import Facts
from dsdoctor.checkpoint.loading import Plan, Verdict, outcome


def cut(stage: int, *, by_deepspeed: bool = True) -> Facts:
    """What two ranks save that share each tensor."""
    return Facts(
        version="0.19.8", step=2, stage=stage, dtype="bf16", data=1, model=2, pipeline=1, tensor=2,
        partitions=1 if stage else None, bf16=stage > 0, sharded_optimizer=stage > 0, cut_by_deepspeed=by_deepspeed,
        injected=by_deepspeed,
    )  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_cut_tensors_load_with_the_ranks_that_saved_them(stage: int) -> None:
    assert outcome(cut(stage), Plan(world=2)).verdict is Verdict.LOADS


@pytest.mark.parametrize(("stage", "by_deepspeed"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_of_a_cut_that_no_real_ranks_loaded_is_said_what_the_files_tell(stage: int, by_deepspeed: bool) -> None:
    for plan in (Plan(), Plan(world=2)):
        found = outcome(cut(stage, by_deepspeed=by_deepspeed), plan)
        assert found.verdict is Verdict.UNKNOWN
        assert found.why.startswith("as far as the files show, ")
        assert found.why.endswith((" is untested", " are untested"))
        assert ("2 tensor-parallel" in found.fix) == (not by_deepspeed)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_deepspeed_cut_goes_to_other_ranks_and_fewer_pieces_by_a_universal_checkpoint(stage: int) -> None:
    whole, ranks, more, pipeline = (
        outcome(cut(stage), plan).verdict
        for plan in (
            Plan(world=2, tensor=1),
            Plan(world=4),
            Plan(world=4, tensor=4),
            Plan(world=2, pipeline=2, tensor=1),
        )
    )

    assert whole is (Verdict.UNIVERSAL if stage else Verdict.CANNOT)
    assert ranks is (Verdict.UNIVERSAL if stage else Verdict.LOADS)
    assert more is pipeline is Verdict.UNKNOWN


def test_another_cut_or_other_ranks_of_a_models_own_cut_are_never_promised() -> None:
    plans = [Plan(world=2, tensor=1), Plan(world=4, tensor=4), Plan(world=4), Plan(tensor=1)]
    for stage, plan in itertools.product((0, 1, 2, 3), plans):
        found = outcome(cut(stage, by_deepspeed=False), plan)
        assert found.verdict is Verdict.UNKNOWN
        assert found.fix


def test_between_stages_that_name_other_files_cut_tensors_cannot_be_loaded_either() -> None:
    assert outcome(cut(2), Plan(world=2, stage=3)).verdict is Verdict.CANNOT
    assert outcome(cut(0), Plan(world=2, stage=1)).verdict is Verdict.CANNOT
