"""What is said of a checkpoint in a running training: before it is loaded, when nothing was loaded, after it was saved. Lines."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.checkpoint.checks import judge_tag
from dsdoctor.checkpoint.facts import PARTITIONED, Examined, examine
from dsdoctor.checkpoint.folder import checkpoint_near, choose, look, read_tag
from dsdoctor.checkpoint.judge import GIB, judge
from dsdoctor.checkpoint.loading import ALL, MODULE, NO_OPTIMIZER, Plan
from dsdoctor.checkpoint.parameters import names_in_module
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.text import and_more
from dsdoctor.rules import book
from dsdoctor.ui.table import size
from dsdoctor.ui.terminal import finding_lines, printable

MAX_FILES = 128
"""While all other ranks wait: so many files of 720 parameters took 0.25 CPU-seconds, where ranks' pickles are the same."""

CONDITIONS = {
    "checkpoint-needs-classes",
    "checkpoint-frozen-excluded",
    "checkpoint-universal-leaves",
    "checkpoint-optimizer-skipped",
}
"""What a script may well have, which the load itself shows in the next moment; what its own argument says; and what is said
here of the very model."""
DUMMY_OPTIMIZER = "DummyOptim"
"""The class that stands for an optimizer where an engine was given none."""


def before_load(engine: Any, given: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with the checkpoint that an engine is about to load."""
    if given.get("custom_load_fn"):
        # what that function takes, nobody knows
        return ()
    try:
        folder = look(Path(given["load_dir"]))
    except UsageError:  # what becomes of it is told after the load
        return ()
    tag = given.get("tag")
    if tag is None and engine.load_universal_checkpoint():
        tag = folder.latest_universal
    try:
        found = choose(folder, tag)
        if found is None or len(found.files) > MAX_FILES:
            return ()
        judged = judge(folder, tag, _plan_of_load(engine, given))
    except UsageError:  # a tag that is not there: DeepSpeed fails by it in the next moment
        return ()
    told = [each for each in judged.findings if each.severity is not Severity.NOTE and each.rule not in CONDITIONS]
    return _lines([*told, *(_kept(engine, given, judged.examined) if judged.examined else ())])


def _kept(engine: Any, given: Mapping[str, Any], examined: Examined) -> Iterator[Finding]:
    """The model's frozen parameters that a load leaves as they are, without a word."""
    universal, strict = engine.load_universal_checkpoint(), given.get("load_module_strict", True)
    module = getattr(engine, "module", None)
    if module is None or examined.facts.layers or not (universal or not strict):
        return
    saved = set() if universal else names_in_module(examined)
    kept = {name: each for name, each in module.named_parameters() if not each.requires_grad and name not in saved}
    if not kept:
        return
    count = sum(int(getattr(each, "ds_numel", each.numel())) for each in kept.values())
    yield book.finding(
        "checkpoint-universal-leaves" if universal else "checkpoint-frozen-excluded",
        Severity.NOTE,
        case="watched",
        evidence=(
            and_more(tuple(kept), 3),
            "they keep this script's values: random unless it loaded a base model",
        ),
        parameters=f"{len(kept):,} frozen parameter{'s' * (len(kept) > 1)}",
        elements=f"{count:,}",
        tag=examined.tag.folder.name,
    )


def _plan_of_load(engine: Any, given: Mapping[str, Any]) -> Plan:
    plan = plan_of(engine)
    partitioned = (plan.stage or 0) >= PARTITIONED
    load = load_of(given, partitioned=partitioned)
    return replace(plan, load=load, evaluation=not has_optimizer(engine))


def load_of(given: Mapping[str, Any], *, partitioned: bool) -> str:
    """How load_checkpoint is called. ``partitioned``: stage 3.

    Where both arguments stand, DeepSpeed 0.19.8 makes the fp32 weights anew as for load_module_only=True alone, and at stage 3
    takes the weights as for load_optimizer_states=False alone.
    """
    module, without = bool(given.get("load_module_only")), not given.get("load_optimizer_states", True)
    if not partitioned:
        return MODULE if module else NO_OPTIMIZER if without else ALL
    return NO_OPTIMIZER if without else MODULE if module else ALL


def has_optimizer(engine: Any) -> bool:
    """Whether an engine trains: one for evaluation has no optimizer, or one of DeepSpeed's around a dummy."""
    optimizer = getattr(engine, "optimizer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner is not None and type(inner).__name__ != DUMMY_OPTIMIZER


def nothing_loaded(engine: Any, given: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG001
    """load_checkpoint returned (None, None)."""
    folder = given["load_dir"]
    where = checkpoint_near(Path(folder))
    finding = book.finding(
        "checkpoint-nothing-loaded",
        Severity.WARNING if where else Severity.NOTE,
        case="" if where else "first-start",
        evidence=(where,) if where else (),
        quoted=repr(str(folder)),
        folder=str(folder),
    )
    return _lines([finding])


def after_save(engine: Any, given: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with a checkpoint that was just saved, and whether the next one has room."""
    if _is_saved_later(engine):
        return ()
    folder = look(Path(given["save_dir"]))
    tag = given.get("tag")
    found = folder.tag(str(tag) if tag is not None else f"global_step{engine.global_steps}")
    if found is None:
        return ()
    findings = [] if len(found.files) > MAX_FILES else [*judge_tag(examine(folder, read_tag(found)))]
    free = LocalHost().free(str(folder.path))
    if free is not None and free < found.size:
        findings.append(no_room(str(folder.path), free, found.size))
    return _lines(each for each in findings if has_error((each,)) or each.severity is Severity.WARNING)


def save_failed(engine: Any, given: Mapping[str, Any]) -> tuple[str, ...]:
    """save_checkpoint raised: what a training can go on from, and whether the disk was it."""
    place, error = Path(given["save_dir"]), given["error"]
    tag = given.get("tag")
    name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    free = LocalHost().free(str(place))
    latest = look(place).latest if place.is_dir() else None
    first = (str(error).strip() or "no reason given").splitlines()[0][:200]
    finding = book.finding(
        "checkpoint-save-failed",
        Severity.WARNING,
        evidence=(
            f"{type(error).__name__}: {first}",
            *([f"{size(free)} left in {place}"] if free is not None else []),
            f"latest names {latest!r}, from which training can resume" if latest else "no earlier tag was saved",
        ),
        tag=name,
        folder=str(place),
    )
    return _lines([finding])


def no_room(folder: str, free: int, size: int) -> Finding:
    """A disk that does not hold one more of these."""
    return book.finding(
        "checkpoint-disk-full",
        Severity.WARNING,
        folder=folder,
        free=f"{free / GIB:.2f} GiB",
        size=f"{size / GIB:.2f} GiB",
    )


def plan_of(engine: Any) -> Plan:
    """The run that is going on, as far as an engine says it."""
    # a training has imported it
    torch: Any = sys.modules.get("torch")
    world = torch.distributed.get_world_size() if torch and torch.distributed.is_initialized() else 1
    dtype = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    return Plan(world=world, stage=int(engine.zero_optimization_stage()), dtype=dtype)


def _is_saved_later(engine: Any) -> bool:
    """Whether a thread or process of its own writes the files."""
    decoupled = getattr(getattr(engine, "checkpoint_engine", None), "is_decoupled", None)
    return bool(decoupled()) if callable(decoupled) else False


def _lines(findings: Any) -> tuple[str, ...]:
    found = tuple(findings)
    if not found:
        return ()

    def lines() -> Iterator[str]:
        yield "about the checkpoint:"
        yield from map(printable, finding_lines(found))

    return tuple(lines())
