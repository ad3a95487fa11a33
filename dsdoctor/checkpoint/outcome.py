"""A checkpoint's facts and a planned run -> whether load_checkpoint loads it, as real runs of DeepSpeed 0.19.8 did.

What was not tried with real ranks is said to be unknown. The table is compared with real ranks in tests/launch/test_checkpoint.py.
"""

from dataclasses import replace

from dsdoctor.checkpoint.contents import Facts
from dsdoctor.checkpoint.examine import PARTITIONED
from dsdoctor.checkpoint.plan import LOAD_UNIVERSAL, SIZES, Outcome, Plan, Run, Verdict, planned


def outcome(facts: Facts, plan: Plan) -> Outcome:
    """What load_checkpoint does in the planned run."""
    found = _outcome(facts, plan)
    own_cut = found.verdict is Verdict.UNKNOWN and (facts.tensor or 1) > 1 and not facts.cut_by_deepspeed
    return replace(found, fix=_what_decides(facts)) if own_cut else found


def _what_decides(facts: Facts) -> str:
    """Of a model that cuts its tensors itself, as Megatron's does: no file says where. torch compares the shapes of the pieces."""
    layout = _layout(facts.tensor, facts.pipeline)
    return (
        f"keep its {layout} (data-parallel: {facts.data or 'unknown'}) and its code of the model, and start that run once: "
        "load_checkpoint raises 'size mismatch' where other tensors are cut than were saved, and loads where the same ones are"
    )


def _outcome(facts: Facts, plan: Plan) -> Outcome:
    run = planned(facts, plan)
    if run is None or facts.stage is None:
        return Outcome(verdict=Verdict.UNKNOWN, why="no file says at which ZeRO stage it was saved")
    other_layout = (run.tensor, run.pipeline) != (facts.tensor, facts.pipeline)
    if other_layout and not _is_cut_anew(facts, run):
        saved, now = _layout(facts.tensor, facts.pipeline), _layout(run.tensor, run.pipeline)
        return Outcome(verdict=Verdict.UNKNOWN, why=f"it was saved with {saved}, and {now} was not tried")
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
        why = f"as far as the files tell {found.why}; {untried} not tried"
        return Outcome(verdict=Verdict.UNKNOWN, why=why, words=found.words)
    return found


def _untried_cut(facts: Facts) -> str:
    """How the tensors are cut, where no real ranks have loaded such a checkpoint here."""
    if (facts.tensor or 1) == 1:
        return ""
    if not facts.cut_by_deepspeed:
        return "a model that cuts its tensors itself was"
    return "tensors cut by DeepSpeed at stage 3 were" if facts.stage == PARTITIONED else ""


def _is_cut_anew(facts: Facts, run: Run) -> bool:
    """Whether the tensors, which DeepSpeed cut up, are to be cut into fewer pieces: the converter puts them together."""
    saved, now = facts.tensor or 1, run.tensor or 1
    return (
        facts.cut_by_deepspeed and facts.injected and run.pipeline == facts.pipeline and now < saved and not saved % now
    )


def _other_cut(facts: Facts, run: Run) -> Outcome:
    words = "AssertionError: key: ... is not found in the checkpoint"
    why = f"its tensors are cut for {facts.tensor} ranks, and the run has {run.tensor}"
    if facts.stage == 0:
        return Outcome(verdict=Verdict.CANNOT, why=f"{why}; without ZeRO it is not converted either", words=words)
    return Outcome(verdict=Verdict.UNIVERSAL, why=why, words=words)


def _other_family(facts: Facts, run: Run) -> Outcome:
    """Between no ZeRO, stages 1 and 2, and stage 3 nothing is loaded, by a universal checkpoint neither."""
    if facts.stage == 0 and facts.layers and facts.sharded_optimizer and run.stage == 1 and _same(facts, run):
        # a pipeline in bf16 cuts its optimizer up at stage 0 already
        return Outcome(verdict=Verdict.LOADS, why="the optimizer's states of this pipeline are cut up as at stage 1")
    if facts.layers and facts.stage == 0 and run.stage < 3:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            why="a pipeline from stage 0 to another one was tried with the same ranks in bf16 only",
        )
    words = _words_of_family(facts, run)
    if facts.stage == 0:
        why = "it was saved without ZeRO and has no optimizer states for each rank"
    else:
        why = f"stage {facts.stage} and stage {run.stage} name and cut their files in different ways, a universal checkpoint's too"
    return Outcome(verdict=Verdict.CANNOT, why=why, words=words)


def _words_of_family(facts: Facts, run: Run) -> str:
    if 3 in {facts.stage, run.stage}:
        return "AssertionError without a word: no file has the name that this stage looks for"
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
        why = "universal checkpoints of experts and of tensors that a model cuts itself were not tried"
        return Outcome(verdict=Verdict.UNKNOWN, why=why)
    ranks = "as many pipeline stages and any number of ranks" if (facts.pipeline or 1) > 1 else "any number of ranks"
    return Outcome(
        verdict=Verdict.LOADS, why=f"it is universal, for {ranks}, where the configuration says {LOAD_UNIVERSAL}"
    )


def _without_zero(facts: Facts, run: Run) -> Outcome:
    """Stage 0: the whole optimizer stands in the model states."""
    if facts.layers and facts.sharded_optimizer:
        return Outcome(
            verdict=Verdict.CANNOT, why="a pipeline in bf16 at stage 0 does not load what it saved", words="KeyError: 0"
        )
    if facts.layers:
        return Outcome(verdict=Verdict.UNKNOWN, why="a pipeline at stage 0 was tried in bf16 only")
    if run.dtype != facts.dtype:
        if "fp16" in {run.dtype, facts.dtype} or "" in {run.dtype, facts.dtype}:
            return Outcome(
                verdict=Verdict.UNKNOWN, why=f"at stage 0 {_named(facts.dtype)} was not tried with {_named(run.dtype)}"
            )
        why = f"the optimizer of a {run.dtype} run has other states than that of a {facts.dtype} run"
        return Outcome(verdict=Verdict.CANNOT, why=why, words="KeyError, while it loads the optimizer")
    if (facts.experts or _is_cut_by_the_model(facts)) and run.data != facts.data:
        why = "other ranks were not tried with experts, and with tensors that a model cuts itself"
        return Outcome(verdict=Verdict.UNKNOWN, why=why)
    whole = "the whole of it, whatever the number of ranks"
    part = "the file of its part of the tensors" if (facts.tensor or 1) > 1 else whole
    return Outcome(verdict=Verdict.LOADS, why=f"without ZeRO each rank loads {part}")


def _sharded(facts: Facts, run: Run) -> Outcome:
    """Stages 1 to 3: each rank loads its own piece of the optimizer's states."""
    if run.data is None or facts.data is None:
        return Outcome(verdict=Verdict.UNKNOWN, why="no file says how many data-parallel ranks saved it")
    if facts.without_step:
        return _elastic(facts, run)
    marks = (run.dtype == "bf16", facts.bf16)
    if run.data == facts.data and marks[0] == marks[1]:
        if run.dtype != facts.dtype:
            why = f"{_named(facts.dtype)} was not tried with {_named(run.dtype)}; the names of the files fit"
            return Outcome(verdict=Verdict.UNKNOWN, why=why)
        other = f", saved at stage {facts.stage}," if run.stage != facts.stage else ""
        return Outcome(
            verdict=Verdict.LOADS, why=f"each data-parallel rank of {facts.data} finds its file{other} and loads it"
        )
    why, words = _difference(facts, run)
    if facts.experts or _is_cut_by_the_model(facts) or (facts.layers and facts.stage != 1):
        return Outcome(
            verdict=Verdict.UNKNOWN, why=f"not as it is ({why}), and converting this layout was not tried", words=words
        )
    return Outcome(verdict=Verdict.UNIVERSAL, why=why, words=words)


def _elastic(facts: Facts, run: Run) -> Outcome:
    """Saved with elastic_checkpoint and an optimizer that counts the steps of each parameter, as torch's Adam: without the step."""
    why = "elastic_checkpoint left the optimizer's step out of its files"
    if not _same(facts, run):
        return Outcome(verdict=Verdict.UNKNOWN, why=f"{why}, and converting such a checkpoint was not tried")
    words = "AssertionError without a word, or KeyError: 'base_optimizer_state_step'"
    fix = "load the weights alone, load_checkpoint(..., load_optimizer_states=False), and train on without elastic_checkpoint"
    return Outcome(verdict=Verdict.CANNOT, why=f"{why}, and a load asks for it", words=words, fix=fix)


def _difference(facts: Facts, run: Run) -> tuple[str, str]:
    if run.data != facts.data:
        many = "s" * (facts.data != 1)
        why = f"its optimizer states are cut for {facts.data} data-parallel rank{many}, and the run has {run.data}"
        if run.stage == 3 and (run.data or 0) > (facts.data or 0):
            return why, "ZeRORuntimeException on some ranks, AssertionError on those whose file is not there"
        if run.stage == PARTITIONED and facts.frozen:
            return why, SIZES
        return (
            why,
            f"ZeRORuntimeException: ... used a DP world size of {facts.data} but the current world size is {run.data}",
        )
    name = "bf16_zero_pp_rank_0..." if run.dtype == "bf16" else "zero_pp_rank_0..."
    return (
        f"its optimizer files are named for {_named(facts.dtype)}, and a {run.dtype} run looks for other names",
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


def _named(dtype: str) -> str:
    return dtype or "an unknown type"
