"""A folder that save_checkpoint wrote -> everything that the quick look says of it.

The tag, its findings, whether a planned run loads it, and certain repairs.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.checkpoint.checks import judge_tag
from dsdoctor.checkpoint.facts import PARTITIONED, Examined, Facts, another_training, examine, without_optimizer
from dsdoctor.checkpoint.folder import (
    Folder,
    Part,
    Repair,
    choose,
    folder_of_tags_below,
    free_name,
    is_tag,
    judge_denied,
    judge_latest,
    judge_newer,
    look,
    newer_tags,
    read_tag,
    repair_of,
    step_of,
)
from dsdoctor.checkpoint.inert_pickle import ODDLY
from dsdoctor.checkpoint.loading import (
    ALL,
    LOAD_UNIVERSAL,
    NO_OPTIMIZER,
    PROVEN_WITH,
    Outcome,
    Plan,
    Verdict,
    evaluates,
    judge_weights_alone,
    outcome_of_load,
)
from dsdoctor.checkpoint.parameters import (
    ModelShapes,
    doubts,
    judge_conditions,
    judge_model,
    judge_universal_load,
    left_by_universal,
    not_comparable,
)
from dsdoctor.core.cgroups import free_memory
from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.files import refuse_large, write_text
from dsdoctor.core.finding import Finding, Severity, has_error, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Gap
from dsdoctor.rules import book

STAGES = {None: "an unknown stage", 0: "no ZeRO"}
GIB = 1 << 30
Values = Callable[[Examined], Iterable[Finding]]
PATIENCE = 300.0
"""Seconds for a model to be made, without its weights."""


def no_values(examined: Examined) -> Iterable[Finding]:  # noqa: ARG001
    """The quick look: the tensors are not read."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Judged:
    """``examined``: the tag that was judged, None for a folder without one. ``outcome``: of the planned run, None where the
    tag is not whole. ``rank_bytes``: what each rank at least reads into the host's memory at once. ``values_read``: whether the
    tensors were read too."""

    folder: Folder
    examined: Examined | None
    findings: tuple[Finding, ...]
    outcome: Outcome | None = None
    rank_bytes: int = 0
    values_read: bool = False


def judge(
    folder: Folder,
    tag: str | None,
    plan: Plan,
    *,
    available: int | None = None,
    ranks_here: int | None = None,
    values: Values = no_values,
) -> Judged:
    """Judge a folder. ``available``: bytes of memory that this machine has to spare for ``ranks_here`` ranks.

    ``values``: what else is to be judged of the tag, where the quick look is not all.
    """
    chosen = choose(folder, tag)
    about_latest = tuple(judge_latest(folder, chosen=tag is not None))
    if chosen is None:
        return Judged(folder=folder, examined=None, findings=(no_tags(folder),))
    examined = examine(folder, read_tag(chosen), chosen=tag is not None)
    alone = plan.load != ALL or evaluates(examined.facts, plan)
    if alone and (examined.facts.stage or 0) < PARTITIONED:
        examined = without_optimizer(examined)
    about_tag = (*judge_tag(examined), *values(examined))
    findings = [*about_latest, *about_tag]
    for newer in newer_tags(folder, chosen) if tag is None else ():
        later = examine(folder, read_tag(newer))
        errors = tuple(each for each in judge_tag(later) if has_error((each,)))
        findings.append(judge_newer(newer, errors, chosen, another_training(examined, later)))
    findings += judge_denied(folder, chosen) if tag is None else ()
    if has_error(about_tag):
        return Judged(folder=folder, examined=examined, findings=tuple(findings))
    conditions = judge_conditions(examined)
    decided = _decided(examined, plan, conditions)
    findings += conditions
    needed = bytes_of_rank(examined)
    if plan.load != ALL and not evaluates(examined.facts, plan) and decided.verdict is Verdict.LOADS:
        findings += judge_weights_alone(examined, plan)
    if decided.verdict is Verdict.LOADS:
        findings += judge_universal_load(examined)
    if not decided.on_condition:  # the condition's finding says it, and what decides it
        findings += _about(decided, examined, plan)
    findings += _memory(needed, ranks_here, available)
    return Judged(folder=folder, examined=examined, findings=tuple(findings), outcome=decided, rank_bytes=needed)


def _decided(examined: Examined, plan: Plan, conditions: Sequence[Finding]) -> Outcome:
    """Whether it loads as planned; not known where a file or a condition of it is not."""
    decided = outcome_of_load(examined.facts, plan)
    if decided.verdict is not Verdict.LOADS:
        return decided
    if any(file.unknown for file in examined.tag.files):
        return Outcome(verdict=Verdict.UNKNOWN, why="not all of its files could be inspected")
    if reason := doubts(examined):
        return Outcome(verdict=Verdict.UNKNOWN, why=reason)
    return (
        replace(decided, verdict=Verdict.UNKNOWN, why=conditions[0].title, on_condition=True) if conditions else decided
    )


def no_tags(folder: Folder) -> Finding:
    """A folder in which no tag is."""
    latest = f"latest names {folder.latest!r}" if folder.latest is not None else "there is no file latest"
    inner = tuple(str(path) for path in folder_of_tags_below(folder.path))
    return book.finding(
        "checkpoint-no-tags",
        Severity.ERROR,
        case="weights-only" if folder.beside and not inner else "",
        evidence=(
            latest,
            *(f"weights only: {name}" for name in folder.beside[:4]),
            *(f"not inspected, you may not read it: {name}" for name in folder.denied[:4]),
        ),
        steps=tuple(step("python -m dsdoctor checkpoint {folder}", folder=path) for path in inner[-1:]),
        folder=str(folder.path),
    )


def bytes_of_rank(examined: Examined) -> int:
    """What a rank reads at once: its model states, and then its optimizer states; the larger of both."""
    sizes = [0]
    for part in (Part.MODEL, Part.OPTIMIZER):
        sizes.append(max((shard.file.size for shard in examined.tag.of(part)), default=0))
    return max(sizes)


def _about(decided: Outcome, examined: Examined, plan: Plan) -> Iterator[Finding]:
    tag, facts = examined.tag.folder, examined.facts
    evidence = [
        *([f"DeepSpeed says: {decided.words}"] if decided.words else []),
        *_weights_alone(decided, facts, plan),
        *([_proof(facts)] if decided.verdict is not Verdict.UNKNOWN else []),
    ]
    if decided.verdict is Verdict.CANNOT:
        yield book.finding(
            "checkpoint-cannot-load",
            Severity.ERROR,
            case="advised" if decided.fix else "",
            evidence=evidence,
            tag=tag.name,
            why=decided.why,
            advice=decided.fix,
            tag_folder=str(tag.path),
        )
    elif decided.verdict is Verdict.UNKNOWN:
        yield book.finding(
            "checkpoint-load-not-known",
            Severity.NOTE,
            case="advised" if decided.fix else "",
            evidence=evidence,
            tag=tag.name,
            why=decided.why,
            advice=decided.fix,
        )
    elif decided.verdict is Verdict.UNIVERSAL:
        yield _needs_universal(decided, examined, evidence)


def _weights_alone(decided: Outcome, facts: Facts, plan: Plan) -> Iterator[str]:
    """What can be had where the whole of it is not loaded."""
    alone = outcome_of_load(facts, replace(plan, load=NO_OPTIMIZER))
    if (
        plan.load == ALL
        and not decided.fix
        and decided.verdict in {Verdict.CANNOT, Verdict.UNIVERSAL}
        and alone.verdict is Verdict.LOADS
    ):
        yield "load_checkpoint(..., load_optimizer_states=False) loads its weights and resets the optimizer"


def _needs_universal(decided: Outcome, examined: Examined, evidence: list[str]) -> Finding:
    tag = examined.tag.folder
    there = examined.folder.tag(f"{tag.name}_universal")
    if left := left_by_universal(examined):
        evidence = [*evidence, f"a universal load does not restore {left}"]
    return book.finding(
        "checkpoint-needs-universal",
        Severity.ERROR,
        case="converted" if there and there.universal else "",
        evidence=evidence,
        tag=tag.name,
        why=decided.why,
        setting=LOAD_UNIVERSAL,
        folder=str(examined.folder.path),
        out=f"{tag.path}_universal",
        universal_tag=f"{tag.name}_universal",
    )


def _proof(facts: Facts) -> str:
    saved = f", and DeepSpeed {facts.version} saved it" if facts.version and facts.version != PROVEN_WITH else ""
    return f"as real ranks of DeepSpeed {PROVEN_WITH} did{saved}"


def _memory(needed: int, ranks: int | None, available: int | None) -> Iterator[Finding]:
    if ranks is None or available is None or needed * ranks <= available:
        return
    yield book.finding(
        "checkpoint-host-memory",
        Severity.WARNING,
        evidence=(f"each rank reads at least {needed / GIB:.2f} GiB into host memory before copying it on",),
        ranks=ranks,
        needed=f"{ranks * needed / GIB:.1f} GiB",
        available=f"{available / GIB:.1f} GiB",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOrder:
    """What the user asks. ``tag``: None for the one that ``latest`` names. ``ranks_here``: ranks that load on this machine.

    ``model``: a Hugging Face configuration whose model is to load it, which ``python`` with torch and transformers makes.
    """

    folder: Path
    tag: str | None = None
    plan: Plan = field(default_factory=Plan)
    ranks_here: int | None = None
    model: Path | None = None
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of this machine's memory that are free, None where the system does not say it."""

    available: int | None


def judge_checkpoint(order: CheckpointOrder, values: Values = no_values) -> tuple[Judged, Memory]:
    """Look at a folder and judge it. Raises UsageError for what is no folder, or a tag that is not there.

    ``values``: what judges the tensors too, ``no_values`` for the quick look.
    """
    order = _around_tag(order)
    model = read_model(order.model, order.python) if order.model is not None else None
    memory = Memory(available=free_memory(LocalHost()))
    judged = judge(
        look(order.folder),
        order.tag,
        order.plan,
        available=memory.available,
        ranks_here=order.ranks_here,
        values=values if model is None else functools.partial(_with_model, model, values),
    )
    return replace(judged, values_read=values is not no_values), memory


def _with_model(model: ModelShapes, values: Values, examined: Examined) -> Iterator[Finding]:
    yield from values(examined)
    if reason := not_comparable(examined):
        raise ImpossiblePlan(
            f"{examined.tag.folder.name} is not compared with a model: {reason}", hint="leave --model out"
        )
    yield from judge_model(examined, model)


def read_model(path: Path, python: str) -> ModelShapes:
    """The names and shapes of a configuration's model. Raises UsageError."""
    if not path.exists():
        raise UsageError(
            f"there is no model {path}", hint="a Hugging Face config.json, or its folder: --model CONFIG.json"
        )
    refuse_large(path, f"model {path}")
    answer = parse_answer(LocalHost().ask(python, "ask_shapes.py", str(path), timeout=PATIENCE), dict, "the model")
    if isinstance(answer, Gap):
        raise UsageError(f"the model could not be read: {answer.reason}", hint="--python names another environment")
    if missing := answer.get("missing"):
        message = f"building the model needs torch and transformers, but that Python has no {missing}"
        raise UsageError(message, hint="name an environment that has it: --python PATH")
    if error := answer.get("error"):
        raise UsageError(f"the model could not be read: {error}", hint=answer.get("hint") or "--model CONFIG.json")
    return ModelShapes(name=answer["class"], shapes={name: tuple(shape) for name, shape in answer["shapes"].items()})


def repair_checkpoint(order: CheckpointOrder) -> Repair:
    """Write ``latest`` from the newest complete tag, and rename a newer one that is not complete.

    Raises UsageError where that is not certain.
    """
    if order.tag is not None:
        raise UsageError("--repair inspects all tags of a folder; --tag selects one", hint="leave --tag out")
    folder = look(order.folder)
    choose(folder, None)  # what latest names may be a tag that this user may not read
    if denied := [name for name in folder.denied if step_of(name) is not None]:
        raise UsageError(
            f"nothing was repaired: you may not read {folder.path / denied[0]}, which may be a newer complete tag",
            hint="ls -ld shows who owns it",
        )
    plain = [tag for tag in folder.tags if not tag.universal]
    repair = repair_of(folder, {tag.name: _is_whole(folder, tag.name) for tag in plain}, now=time.time())
    if repair.left:
        raise UsageError(
            f"nothing is repaired: {repair.left}", hint="dsdoctor checkpoint DIR --tag TAG shows what a tag lacks"
        )
    if repair.latest is not None:
        if (folder.path / "latest").is_dir():
            raise UsageError(
                f"{folder.path / 'latest'} is a folder, but DeepSpeed expects a file of that name",
                hint="rename the folder, then rerun --repair",
            )
        # first the tag that is whole, then the names: an interruption between them leaves what can be loaded
        write_text(folder.path / "latest", repair.latest)
    taken = frozenset(path.name for path in folder.path.iterdir())
    names = tuple(free_name(name, taken) for name in repair.aside)
    for name, free in zip(repair.aside, names, strict=True):
        _rename(folder.path / name, folder.path / free)
    return replace(repair, aside=tuple(f"{name} -> {free}" for name, free in zip(repair.aside, names, strict=True)))


def _is_whole(folder: Folder, name: str) -> bool:
    """Whether every file of a tag is there, whole, and was understood, with nothing in it that torch may refuse."""
    found = folder.tag(name)
    if found is None:
        return False
    tag = read_tag(found)
    unsure = any(file.unknown or any(name.endswith(ODDLY) for name in file.names) for file in tag.files)
    return not unsure and not has_error(judge_tag(examine(folder, tag)))


def _rename(old: Path, new: Path) -> None:
    try:
        old.rename(new)
    except OSError as error:
        raise DoctorError(
            f"{old} could not be renamed: {error.strerror}", hint="ls -ld shows who owns the folder"
        ) from error


def _around_tag(order: CheckpointOrder) -> CheckpointOrder:
    """A tag's own folder is meant as that tag of the folder around it."""
    if order.tag is None and is_tag(order.folder):
        path = order.folder.absolute()
        return replace(order, folder=path.parent, tag=path.name)
    return order
