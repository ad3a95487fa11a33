"""A planned run, in the user's terms and in DeepSpeed's -> whether load_checkpoint loads a tag, as DeepSpeed 0.19.8 did.

A load may leave the optimizer out (``load_optimizer_states=False``, ``load_module_only=True``), and an engine may have none, to
evaluate a model: its engine.py makes such an engine an optimizer for training all the same, in bf16
(``_configure_bf16_optimizer``) and with ZeRO (``_configure_zero_optimizer``). What was not tried with real ranks is said to be
unknown; the tables are compared with real ranks in tests/launch/test_checkpoint.py.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsdoctor.checkpoint.facts import PARTITIONED, Examined, Facts
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

PROVEN_WITH = "0.19.8"
ALL, NO_OPTIMIZER, MODULE = "all", "no-optimizer", "module"
"""How load_checkpoint is called: as it is, with load_optimizer_states=False, with load_module_only=True."""
LOAD_UNIVERSAL = '"checkpoint": {"load_universal": true}'
SIZES = "RuntimeError: The size of tensor a (...) must match the size of tensor b (...)"
"""At stage 3 each rank copies its piece of each frozen parameter (engine.py, load_module_state_dict)."""
ARGUMENTS = {NO_OPTIMIZER: "load_optimizer_states=False", MODULE: "load_module_only=True"}
NO_SCHEDULE = "TypeError: 'NoneType' object is not subscriptable, if it has one"


class Verdict(enum.Enum):
    """What load_checkpoint does with it in the planned run."""

    LOADS = "loads"
    UNIVERSAL = "needs a universal checkpoint"
    CANNOT = "cannot be loaded"
    UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The run that is planned; None for as it was saved. ``world``: all ranks. ``load``: ALL, NO_OPTIMIZER or MODULE.

    ``evaluation``: whether the engine that loads has no optimizer."""

    world: int | None = None
    stage: int | None = None
    dtype: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    load: str = ALL
    evaluation: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A verdict, why, what DeepSpeed itself says in that case, and what helps where that is no other checkpoint ("" else).

    ``on_condition``: it loads if the run meets a condition that a finding of its own names.
    """

    verdict: Verdict
    why: str
    words: str = ""
    fix: str = ""
    on_condition: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in DeepSpeed's own terms. ``data``: data-parallel ranks, None where the world is not known."""

    stage: int
    dtype: str
    data: int | None
    tensor: int | None
    pipeline: int | None


def planned(facts: Facts, plan: Plan) -> Run | None:
    """The planned run, with what was saved where nothing else is said; None without a stage.

    Raises UsageError for ranks that do not divide.
    """
    stage = facts.stage if plan.stage is None else plan.stage
    if stage is None:
        return None
    tensor, pipeline = plan.tensor or facts.tensor, plan.pipeline or facts.pipeline
    data = facts.data
    if plan.world is not None:
        model = (tensor or 1) * (pipeline or 1)
        if plan.world % model:
            raise UsageError(
                f"--world {plan.world} is not a multiple of {model}, the ranks that share a model",
                hint="set them with --tensor-parallel and --pipeline",
            )
        data = plan.world // model
    elif (tensor, pipeline) != (facts.tensor, facts.pipeline):
        data = None
    return Run(stage=stage, dtype=plan.dtype or facts.dtype, data=data, tensor=tensor, pipeline=pipeline)


def outcome(facts: Facts, plan: Plan) -> Outcome:
    """What load_checkpoint does in the planned run."""
    found = _outcome(facts, plan)
    own_cut = found.verdict is Verdict.UNKNOWN and (facts.tensor or 1) > 1 and not facts.cut_by_deepspeed
    return replace(found, fix=_what_decides(facts)) if own_cut else found


def _what_decides(facts: Facts) -> str:
    """Of a model that cuts its tensors itself, as Megatron's does: no file says where. torch compares the shapes of the pieces."""
    layout = _layout(facts.tensor, facts.pipeline)
    return book.phrase("checkpoint", "try-once", layout=layout, data=facts.data)


def _outcome(facts: Facts, plan: Plan) -> Outcome:
    run = planned(facts, plan)
    if run is None or facts.stage is None:
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "stage-unknown"))
    other_layout = (run.tensor, run.pipeline) != (facts.tensor, facts.pipeline)
    if other_layout and not _is_cut_anew(facts, run):
        saved, now = _layout(facts.tensor, facts.pipeline), _layout(run.tensor, run.pipeline)
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "layout-not-tried", saved=saved, now=now))
    if _family(run.stage) != _family(facts.stage):
        found = _other_family(facts, run)
    elif facts.universal:
        found = _universal(facts)
    elif other_layout:
        found = _other_cut(facts, run)
    else:
        found = _without_zero(facts, run) if facts.stage == 0 else _sharded(facts, run)
    untried = _untried_cut(facts)
    if untried and found.verdict in {Verdict.LOADS, Verdict.UNIVERSAL}:
        why = book.phrase("checkpoint", "cut-not-tried", why=found.why, untried=untried)
        return Outcome(verdict=Verdict.UNKNOWN, why=why, words=found.words)
    return found


def _untried_cut(facts: Facts) -> str:
    """How the tensors are cut, where no real ranks have loaded such a checkpoint here."""
    if (facts.tensor or 1) == 1:
        return ""
    if not facts.cut_by_deepspeed:
        return "a model that shards its tensors itself is"
    return "tensors that DeepSpeed shards at stage 3 are" if facts.stage == PARTITIONED else ""


def _is_cut_anew(facts: Facts, run: Run) -> bool:
    """Whether the tensors, which DeepSpeed cut up, are to be cut into fewer pieces: the converter puts them together."""
    saved, now = facts.tensor or 1, run.tensor or 1
    return (
        facts.cut_by_deepspeed and facts.injected and run.pipeline == facts.pipeline and now < saved and not saved % now
    )


def _other_cut(facts: Facts, run: Run) -> Outcome:
    words = "AssertionError: key: ... is not found in the checkpoint"
    if facts.stage == 0:
        why = book.phrase("checkpoint", "other-cut-without-zero", saved=facts.tensor, ranks=run.tensor)
        return Outcome(verdict=Verdict.CANNOT, why=why, words=words)
    why = book.phrase("checkpoint", "other-cut", saved=facts.tensor, ranks=run.tensor)
    return Outcome(verdict=Verdict.UNIVERSAL, why=why, words=words)


def _other_family(facts: Facts, run: Run) -> Outcome:
    """Between no ZeRO, stages 1 and 2, and stage 3 nothing is loaded, by a universal checkpoint neither."""
    if facts.stage == 0 and facts.layers and facts.sharded_optimizer and run.stage == 1 and _same(facts, run):
        # a pipeline in bf16 cuts its optimizer up at stage 0 already
        return Outcome(verdict=Verdict.LOADS, why=book.phrase("checkpoint", "pipeline-cut-as-at-stage-1"))
    if facts.layers and facts.stage == 0 and run.stage < 3:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            why=book.phrase("checkpoint", "pipeline-from-stage-0"),
        )
    words = _words_of_family(facts, run)
    if facts.stage == 0:
        why = book.phrase("checkpoint", "saved-without-zero")
    else:
        why = book.phrase("checkpoint", "other-family", saved=facts.stage, stage=run.stage)
    return Outcome(verdict=Verdict.CANNOT, why=why, words=words)


def _words_of_family(facts: Facts, run: Run) -> str:
    if 3 in {facts.stage, run.stage}:
        return "AssertionError without a message: no file has the name that this stage expects"
    if run.stage:
        same = run.data is not None and run.data == facts.data
        return (
            "FileNotFoundError ... optim_states.pt" if same else "ZeRORuntimeException: ... used a DP world size of ..."
        )
    return (
        "FileNotFoundError ... expp_rank_0" if facts.experts else "'NoneType' object ..., while it loads the optimizer"
    )


def _universal(facts: Facts) -> Outcome:
    if facts.experts or _is_cut_by_the_model(facts):
        why = book.phrase("checkpoint", "universal-not-tried")
        return Outcome(verdict=Verdict.UNKNOWN, why=why)
    name = "universal-pipeline" if (facts.pipeline or 1) > 1 else "universal"
    return Outcome(verdict=Verdict.LOADS, why=book.phrase("checkpoint", name, setting=LOAD_UNIVERSAL))


def _without_zero(facts: Facts, run: Run) -> Outcome:
    """Stage 0: the whole optimizer stands in the model states."""
    if facts.layers and facts.sharded_optimizer:
        return Outcome(verdict=Verdict.CANNOT, why=book.phrase("checkpoint", "pipeline-in-bf16"), words="KeyError: 0")
    if facts.layers:
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "pipeline-at-stage-0"))
    if run.dtype != facts.dtype:
        if "fp16" in {run.dtype, facts.dtype} or "" in {run.dtype, facts.dtype}:
            return Outcome(
                verdict=Verdict.UNKNOWN,
                why=book.phrase("checkpoint", "types-at-stage-0", saved=facts.dtype, dtype=run.dtype),
            )
        why = book.phrase("checkpoint", "other-states", dtype=run.dtype, saved=facts.dtype)
        return Outcome(verdict=Verdict.CANNOT, why=why, words="KeyError, while it loads the optimizer")
    if (facts.experts or _is_cut_by_the_model(facts)) and run.data != facts.data:
        why = book.phrase("checkpoint", "ranks-not-tried")
        return Outcome(verdict=Verdict.UNKNOWN, why=why)
    name = "part-without-zero" if (facts.tensor or 1) > 1 else "whole-without-zero"
    return Outcome(verdict=Verdict.LOADS, why=book.phrase("checkpoint", name))


def _sharded(facts: Facts, run: Run) -> Outcome:
    """Stages 1 to 3: each rank loads its own piece of the optimizer's states."""
    if run.data is None or facts.data is None:
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "ranks-unknown"))
    if facts.without_step:
        return _elastic(facts, run)
    marks = (run.dtype == "bf16", facts.bf16)
    if run.data == facts.data and marks[0] == marks[1]:
        if run.dtype != facts.dtype:
            why = book.phrase("checkpoint", "types-not-tried", saved=facts.dtype, dtype=run.dtype)
            return Outcome(verdict=Verdict.UNKNOWN, why=why)
        name = "same-ranks" if run.stage == facts.stage else "same-ranks-at-another-stage"
        return Outcome(verdict=Verdict.LOADS, why=book.phrase("checkpoint", name, ranks=facts.data, saved=facts.stage))
    why, words = _difference(facts, run)
    if facts.experts or _is_cut_by_the_model(facts) or (facts.layers and facts.stage != 1):
        return Outcome(
            verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "converting-not-tried", why=why), words=words
        )
    return Outcome(verdict=Verdict.UNIVERSAL, why=why, words=words)


def _elastic(facts: Facts, run: Run) -> Outcome:
    """Saved with elastic_checkpoint and an optimizer that counts the steps of each parameter, as torch's Adam: without the step."""
    if not _same(facts, run):
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "elastic-not-tried"))
    words = "AssertionError without a message, or KeyError: 'base_optimizer_state_step'"
    fix = book.phrase("checkpoint", "load-without-states")
    return Outcome(verdict=Verdict.CANNOT, why=book.phrase("checkpoint", "elastic"), words=words, fix=fix)


def _difference(facts: Facts, run: Run) -> tuple[str, str]:
    if run.data != facts.data:
        saved = f"{facts.data} data-parallel rank{'s' * (facts.data != 1)}"
        why = book.phrase("checkpoint", "other-ranks", saved=saved, ranks=run.data)
        if run.stage == 3 and (run.data or 0) > (facts.data or 0):
            return why, "ZeRORuntimeException on some ranks, AssertionError on those whose file is missing"
        if run.stage == PARTITIONED and facts.frozen:
            return why, SIZES
        return (
            why,
            f"ZeRORuntimeException: ... used a DP world size of {facts.data} but the current world size is {run.data}",
        )
    name = "bf16_zero_pp_rank_0..." if run.dtype == "bf16" else "zero_pp_rank_0..."
    return (
        book.phrase("checkpoint", "other-names", saved=facts.dtype, dtype=run.dtype),
        f"FileNotFoundError: {name}",
    )


def _same(facts: Facts, run: Run) -> bool:
    return run.data == facts.data and (run.dtype == "bf16") == facts.bf16


def _is_cut_by_the_model(facts: Facts) -> bool:
    """Whether tensors are cut up in a way that DeepSpeed did not choose, and notes nowhere."""
    return (facts.tensor or 1) > 1 and not (facts.cut_by_deepspeed and facts.injected)


def _family(stage: int) -> str:
    return "none" if stage == 0 else "sharded" if stage < 3 else "partitioned"


def _layout(tensor: int | None, pipeline: int | None) -> str:
    return f"{tensor or 'unknown'} tensor-parallel and {pipeline or 'unknown'} pipeline ranks"


def outcome_of_weights(facts: Facts, plan: Plan) -> Outcome:
    """What load_checkpoint does in the planned run with that argument."""
    run = planned(facts, plan)
    if run is None or facts.stage is None:
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "stage-unknown"))
    reason = _not_tried(facts, run)
    if reason:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            why=book.phrase("checkpoint", "argument-not-tried", argument=ARGUMENTS[plan.load], reason=reason),
        )
    if (run.stage >= PARTITIONED) != (facts.stage >= PARTITIONED):
        why = book.phrase("checkpoint", "other-model-files", saved=facts.stage, stage=run.stage)
        return Outcome(verdict=Verdict.CANNOT, why=why, words="AssertionError without a message")
    if run.stage >= PARTITIONED:
        return _partitioned(facts, run, plan)
    return Outcome(
        verdict=Verdict.LOADS,
        why=book.phrase("checkpoint", "weights-alone"),
    )


def _not_tried(facts: Facts, run: Run) -> str:
    if facts.universal:
        return "a universal checkpoint"
    if facts.experts or facts.layers or (run.tensor or 1) > 1 or (run.pipeline or 1) > 1 or (facts.model or 1) > 1:
        return "experts, pipelines and sharded tensors"
    return "fp16" if "fp16" in {run.dtype, facts.dtype} else ""


def _partitioned(facts: Facts, run: Run, plan: Plan) -> Outcome:
    if plan.load == MODULE:
        why = book.phrase("checkpoint", "no-weights-at-stage-3")
        return Outcome(verdict=Verdict.CANNOT, why=why, words="nothing: it returns as if it had loaded the checkpoint")
    if run.data is None or facts.data is None:
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "ranks-unknown"))
    if run.data > facts.data:
        why = book.phrase("checkpoint", "fewer-files", ranks=facts.data)
        return Outcome(verdict=Verdict.CANNOT, why=why, words="AssertionError on the ranks whose file is missing")
    if facts.frozen and run.data != facts.data:
        why = book.phrase("checkpoint", "frozen-cut", saved=facts.data, ranks=run.data)
        return Outcome(verdict=Verdict.CANNOT, why=why, words=SIZES)
    return Outcome(verdict=Verdict.LOADS, why=book.phrase("checkpoint", "weights-put-together"))


def judge_weights_alone(examined: Examined, plan: Plan) -> Iterator[Finding]:
    """What a load that succeeds leaves behind without a word."""
    yield from _of_latest(examined, plan)
    yield from _undone(examined, plan)
    name = examined.tag.folder.name
    more = (
        ("the step, the learning rate schedule and the sample count start over too",)
        if plan.load == MODULE
        else ("the step and the learning rate schedule continue",)
    )
    yield book.finding(
        "checkpoint-optimizer-skipped",
        Severity.WARNING,
        evidence=("Adam's moments are zero, as at the first step of a run", *_rounded(examined), *more),
        argument=ARGUMENTS[plan.load],
        tag=name,
    )


def _undone(examined: Examined, plan: Plan) -> Iterator[Finding]:
    """Without ZeRO the bf16 optimizer has fp32 weights of its own, which this argument leaves as the model was made."""
    run = planned(examined.facts, plan)
    if plan.load == NO_OPTIMIZER and run is not None and run.stage == 0 and run.dtype == "bf16":
        yield book.finding(
            "checkpoint-weights-undone",
            Severity.ERROR,
            evidence=(
                "the optimizer keeps the fp32 weights of the freshly built model, and each step writes them into the model",
                "an engine without an optimizer never steps and is not affected",
            ),
            tag=examined.tag.folder.name,
        )


def _rounded(examined: Examined) -> Iterator[str]:
    facts = examined.facts
    if facts.dtype == "bf16" and (facts.stage or 0) < PARTITIONED:
        yield "its fp32 weights are not loaded: the optimizer's are recreated from the model's, which are rounded to bf16"


def _of_latest(examined: Examined, plan: Plan) -> Iterator[Finding]:
    """At stage 3 the weights are put together by zero_to_fp32's function, which is given the folder and no tag."""
    latest, tag = examined.folder.latest, examined.tag.folder.name
    if plan.load != NO_OPTIMIZER or (examined.facts.stage or 0) < PARTITIONED or latest == tag:
        return
    yield book.finding(
        "checkpoint-weights-of-latest",
        Severity.ERROR,
        case="" if latest else "no-latest",
        evidence=("engine.py calls get_fp32_state_dict_from_zero_checkpoint(load_dir) without the tag",),
        latest=repr(latest),
        tag=tag,
        folder=str(examined.folder.path),
    )


def outcome_of_load(facts: Facts, plan: Plan) -> Outcome:
    """What load_checkpoint does in the planned run, as it is called and with the engine that calls it."""
    if evaluates(facts, plan):
        return _outcome_of_evaluation(facts, plan)
    if not facts.trained:
        return _without_states(facts, plan)
    return outcome(facts, plan) if plan.load == ALL else outcome_of_weights(facts, plan)


def evaluates(facts: Facts, plan: Plan) -> bool:
    """Whether the run's engine has no optimizer: as it was saved, where the plan does not say it."""
    return not facts.trained if plan.evaluation is None else plan.evaluation


def _outcome_of_evaluation(facts: Facts, plan: Plan) -> Outcome:
    run = planned(facts, plan)
    if run is None or facts.stage is None:
        return Outcome(verdict=Verdict.UNKNOWN, why=book.phrase("checkpoint", "stage-unknown"))
    if run.stage:
        return _with_zero(facts, plan, run)
    found = outcome_of_weights(facts, replace(plan, load=MODULE if plan.load == ALL else plan.load))
    if found.verdict is not Verdict.LOADS or run.dtype != "bf16" or plan.load != ALL:
        return found
    return Outcome(
        verdict=Verdict.CANNOT,
        why=book.phrase("checkpoint", "evaluation-in-bf16"),
        words="KeyError: 0" if facts.stage == 0 else "TypeError: 'NoneType' object is not subscriptable",
        fix=book.phrase("checkpoint", "load-module-only"),
    )


def _with_zero(facts: Facts, plan: Plan, run: Run) -> Outcome:
    words = f"AssertionError: zero stage {run.stage} requires an optimizer"
    why = book.phrase("checkpoint", "evaluation-with-zero", stage=run.stage)
    if run.stage >= PARTITIONED:
        words = "AttributeError: 'NoneType' object has no attribute 'load'"
        why = book.phrase("checkpoint", "evaluation-at-stage-3")
    alone = facts.stage is not None and facts.stage < PARTITIONED
    return Outcome(verdict=Verdict.CANNOT, why=why, words=words, fix=_fix_at_stage_0(facts, plan) if alone else "")


def _fix_at_stage_0(facts: Facts, plan: Plan) -> str:
    """What helps below stage 3: no ZeRO, and whatever the same load needs there."""
    there = _outcome_of_evaluation(facts, replace(plan, stage=0))
    return book.phrase("checkpoint", "evaluate-at-stage-0-and" if there.fix else "evaluate-at-stage-0", also=there.fix)


def _without_states(facts: Facts, plan: Plan) -> Outcome:
    """Saved by an engine without an optimizer, and to be loaded by one that has one."""
    alone = outcome_of_weights(facts, replace(plan, load=MODULE))
    if alone.verdict is not Verdict.LOADS or plan.load == MODULE:
        return alone
    if plan.load == NO_OPTIMIZER:
        why = book.phrase("checkpoint", "no-schedule")
        return Outcome(verdict=Verdict.UNKNOWN, why=why, words=NO_SCHEDULE)
    return Outcome(
        verdict=Verdict.CANNOT,
        why=book.phrase("checkpoint", "no-states"),
        words="AttributeError or TypeError: 'NoneType' object ..., while it loads the optimizer",
        fix=book.phrase("checkpoint", "load-module-only"),
    )
