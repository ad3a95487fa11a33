"""checkpoint: a folder that save_checkpoint wrote -> what is in it, whether a planned run loads it; certain repairs."""

import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.checkpoint.checks import judge_tag
from dsdoctor.checkpoint.examine import Examined, examine
from dsdoctor.checkpoint.judge import Judged, Values, judge, no_values
from dsdoctor.checkpoint.look import Folder, is_tag, look, read_tag, step_of
from dsdoctor.checkpoint.model_shapes import ModelShapes, judge_model, not_comparable
from dsdoctor.checkpoint.plan import Plan
from dsdoctor.checkpoint.repair import Repair, free_name, repair_of
from dsdoctor.checkpoint.tags import choose
from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.files import write_text
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.machine import Gap

PATIENCE = 300.0
"""Seconds for a model to be made, without its weights."""


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
    memory = Memory(available=available_memory(LocalHost()))
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
    answer = parse_answer(LocalHost().ask(python, "ask_shapes.py", str(path), timeout=PATIENCE), dict, "the model")
    if isinstance(answer, Gap):
        raise UsageError(f"the model could not be read: {answer.reason}", hint="--python names another environment")
    if missing := answer.get("missing"):
        message = f"the model is made with torch and transformers, and that Python has no {missing}"
        raise UsageError(message, hint="name an environment that has it: --python PATH")
    if error := answer.get("error"):
        raise UsageError(f"the model could not be read: {error}", hint=answer.get("hint") or "--model CONFIG.json")
    return ModelShapes(name=answer["class"], shapes={name: tuple(shape) for name, shape in answer["shapes"].items()})


def repair_checkpoint(order: CheckpointOrder) -> Repair:
    """Write ``latest`` from the newest complete tag, and rename a newer one that is not complete.

    Raises UsageError where that is not certain.
    """
    if order.tag is not None:
        raise UsageError("--repair judges all tags of a folder, and --tag names one", hint="leave --tag out")
    folder = look(order.folder)
    choose(folder, None)  # what latest names may be a tag that this user may not read
    if denied := [name for name in folder.denied if step_of(name) is not None]:
        raise UsageError(
            f"nothing is repaired: you may not read {folder.path / denied[0]}, which may be a newer tag that is whole",
            hint="ls -ld shows whose it is",
        )
    plain = [tag for tag in folder.tags if not tag.universal]
    repair = repair_of(folder, {tag.name: _is_whole(folder, tag.name) for tag in plain}, now=time.time())
    if repair.left:
        raise UsageError(
            f"nothing is repaired: {repair.left}", hint="dsdoctor checkpoint DIR --tag TAG says what a tag lacks"
        )
    if repair.latest is not None:
        if (folder.path / "latest").is_dir():
            raise UsageError(
                f"{folder.path / 'latest'} is a folder, and DeepSpeed looks for a file of that name",
                hint="give the folder another name, and repair again",
            )
        # first the tag that is whole, then the names: an interruption between them leaves what can be loaded
        write_text(folder.path / "latest", repair.latest)
    taken = frozenset(path.name for path in folder.path.iterdir())
    names = tuple(free_name(name, taken) for name in repair.aside)
    for name, free in zip(repair.aside, names, strict=True):
        _rename(folder.path / name, folder.path / free)
    return replace(repair, aside=tuple(f"{name} -> {free}" for name, free in zip(repair.aside, names, strict=True)))


def _is_whole(folder: Folder, name: str) -> bool:
    """Whether every file of a tag is there, whole, and was understood."""
    found = folder.tag(name)
    if found is None:
        return False
    tag = read_tag(found)
    return not has_error(judge_tag(examine(folder, tag))) and not any(file.unknown for file in tag.files)


def _rename(old: Path, new: Path) -> None:
    try:
        old.rename(new)
    except OSError as error:
        raise DoctorError(
            f"{old} could not be renamed: {error.strerror}", hint="ls -ld shows whose the folder is"
        ) from error


def _around_tag(order: CheckpointOrder) -> CheckpointOrder:
    """A tag's own folder is meant as that tag of the folder around it."""
    if order.tag is None and is_tag(order.folder):
        path = order.folder.absolute()
        return replace(order, folder=path.parent, tag=path.name)
    return order


def available_memory(host: Host) -> int | None:
    """Bytes that the system says are to spare."""
    for line in (host.read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None
