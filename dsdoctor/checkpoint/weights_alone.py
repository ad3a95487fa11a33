"""A load that leaves the optimizer out (``load_optimizer_states=False``, ``load_module_only=True``) -> what becomes of it.

As real ranks of DeepSpeed 0.19.8 did; the table is compared with them in tests/launch/test_checkpoint.py.
"""

from collections.abc import Iterator

from dsdoctor.checkpoint.contents import Facts
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.plan import MODULE, NO_OPTIMIZER, SIZES, Outcome, Plan, Run, Verdict, planned
from dsdoctor.core.finding import Finding

ARGUMENTS = {NO_OPTIMIZER: "load_optimizer_states=False", MODULE: "load_module_only=True"}


def outcome_of_weights(facts: Facts, plan: Plan) -> Outcome:
    """What load_checkpoint does in the planned run with that argument."""
    run = planned(facts, plan)
    if run is None or facts.stage is None:
        return Outcome(verdict=Verdict.UNKNOWN, why="no file says at which ZeRO stage it was saved")
    reason = _not_tried(facts, run)
    if reason:
        return Outcome(verdict=Verdict.UNKNOWN, why=f"{ARGUMENTS[plan.load]} was not tried with {reason}")
    if (run.stage >= PARTITIONED) != (facts.stage >= PARTITIONED):
        why = f"stage {facts.stage} and stage {run.stage} name the files of the model in different ways"
        return Outcome(verdict=Verdict.CANNOT, why=why, words="AssertionError without a word")
    if run.stage >= PARTITIONED:
        return _partitioned(facts, run, plan)
    return Outcome(
        verdict=Verdict.LOADS,
        why="its weights alone, which any number of ranks and any stage below 3 find in the same file",
    )


def _not_tried(facts: Facts, run: Run) -> str:
    if facts.universal:
        return "a universal checkpoint"
    if facts.experts or facts.layers or (run.tensor or 1) > 1 or (run.pipeline or 1) > 1 or (facts.model or 1) > 1:
        return "experts, pipelines and cut tensors"
    return "fp16" if "fp16" in {run.dtype, facts.dtype} else ""


def _partitioned(facts: Facts, run: Run, plan: Plan) -> Outcome:
    if plan.load == MODULE:
        why = "at stage 3 the model's file holds no weights, and load_module_only=True takes them from nowhere else"
        return Outcome(verdict=Verdict.CANNOT, why=why, words="nothing: it returns as if it had loaded")
    if run.data is None or facts.data is None:
        return Outcome(verdict=Verdict.UNKNOWN, why="no file says how many data-parallel ranks saved it")
    if run.data > facts.data:
        why = f"each rank opens a file of its own, and there are those of {facts.data}"
        return Outcome(verdict=Verdict.CANNOT, why=why, words="AssertionError on the ranks whose file is not there")
    if facts.frozen and run.data != facts.data:
        why = f"the frozen parameters are cut for {facts.data} data-parallel ranks, and the run has {run.data}"
        return Outcome(verdict=Verdict.CANNOT, why=why, words=SIZES)
    return Outcome(verdict=Verdict.LOADS, why="its weights alone, put together from the files of all ranks")


def judge_weights_alone(examined: Examined, plan: Plan) -> Iterator[Finding]:
    """What a load that succeeds leaves behind without a word."""
    yield from _of_latest(examined, plan)
    yield from _undone(examined, plan)
    name = examined.tag.folder.name
    more = (
        ("the step, the schedule of the learning rate and the counted samples begin anew too",)
        if plan.load == MODULE
        else ("the step and the schedule of the learning rate go on",)
    )
    yield Finding.warning(
        "checkpoint-optimizer-skipped",
        f"{ARGUMENTS[plan.load]} takes the weights of {name} and lets the optimizer begin anew",
        evidence=("Adam's moments are zero, as at the first step of a training", *_rounded(examined), *more),
        fix="leave the argument out where the training is to go on as if it had not stopped",
    )


def _undone(examined: Examined, plan: Plan) -> Iterator[Finding]:
    """Without ZeRO the bf16 optimizer has fp32 weights of its own, which this argument leaves as the model was made."""
    run = planned(examined.facts, plan)
    if plan.load == NO_OPTIMIZER and run is not None and run.stage == 0 and run.dtype == "bf16":
        yield Finding.error(
            "checkpoint-weights-undone",
            f"load_optimizer_states=False without ZeRO in bf16: the first step puts the weights of {examined.tag.folder.name} back",
            evidence=(
                "the optimizer keeps the fp32 weights that the model was made with, and each step writes them into the model",
                "an engine without an optimizer, which makes no step, is not meant",
            ),
            fix="load with load_module_only=True, which makes the fp32 weights anew, or train at stage 1",
        )


def _rounded(examined: Examined) -> Iterator[str]:
    facts = examined.facts
    if facts.dtype == "bf16" and (facts.stage or 0) < PARTITIONED:
        yield "its fp32 weights are not taken: the optimizer's are made of the model's, which are rounded to bf16"


def _of_latest(examined: Examined, plan: Plan) -> Iterator[Finding]:
    """At stage 3 the weights are put together by zero_to_fp32's function, which is given the folder and no tag."""
    latest, tag = examined.folder.latest, examined.tag.folder.name
    if plan.load != NO_OPTIMIZER or (examined.facts.stage or 0) < PARTITIONED or latest == tag:
        return
    yield Finding.error(
        "checkpoint-weights-of-latest",
        f"load_optimizer_states=False at stage 3 takes the weights of the tag that latest names ({latest!r}), and not of {tag}"
        if latest
        else "load_optimizer_states=False at stage 3 needs the file latest, whichever tag is named, and it is not there",
        evidence=("engine.py calls get_fp32_state_dict_from_zero_checkpoint(load_dir) without the tag",),
        fix=f"let latest name {tag} for this load",
    )
