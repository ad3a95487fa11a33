"""checkpoint --universal: DeepSpeed's own converter, with what it needs told before and what it made checked after.

It works in a hidden folder beside the one that is named, and what it made gets that name when everything in it was checked: a
kill, a full disk or an error leave nothing that a training could take for a checkpoint.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.checkpoint.checks import judge_tag
from dsdoctor.checkpoint.compare import differences
from dsdoctor.checkpoint.examine import Examined, examine
from dsdoctor.checkpoint.flat_weights import NotMerged
from dsdoctor.checkpoint.inert import count_of
from dsdoctor.checkpoint.judge import Judged
from dsdoctor.checkpoint.look import look, read_tag
from dsdoctor.checkpoint.universal import STATES, WIDTH, Needs, amount, needs, refusals
from dsdoctor.checkpoint.values import Damaged
from dsdoctor.commands.checkpoint import CheckpointOrder, available_memory, judge_checkpoint
from dsdoctor.commands.checkpoint_merge import Watching, whole_tag
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan, UsageError, disk_full
from dsdoctor.core.files import check_folder, hidden_folder, make_folder, write_text
from dsdoctor.core.finding import step
from dsdoctor.core.host import LocalHost

WORK = "universal"
LAST_LINES = 40
LATEST = "latest_universal"


@dataclass(frozen=True, kw_only=True)
class UniversalOrder:
    """``out``: the new tag's folder. ``python``: an interpreter that has DeepSpeed."""

    out: Path
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was made: its folder, parameters and bytes, what was reckoned before, and the most that one process took."""

    out: str
    parameters: int
    size: int
    needs: Needs
    peak_memory: int


def convert_checkpoint(
    order: CheckpointOrder, wish: UniversalOrder, watching: Watching, tell: Callable[[str], None]
) -> tuple[Judged, Converted | None]:
    """Make a universal checkpoint of a tag. None where the tag is not whole, which its findings tell.

    Raises UsageError for a folder that is there, ImpossiblePlan where it cannot be converted or has no room, BuildFailed where
    the converter fails or made something else. ``tell`` gets a line before it begins, and one for each of its steps.
    """
    judged = whole_tag(judge_checkpoint(order)[0])
    if judged.examined is None or judged.outcome is None:
        return judged, None
    out = wish.out.absolute()
    _check(judged.examined, out)
    needed = _told(judged.examined, out, tell)
    make_folder(out.parent)
    with hidden_folder(out.parent, WORK) as folder:
        made = folder / out.name
        peak = _run(judged.examined, made, wish.python, needed, tell)
        parameters = _checked(judged.examined, made, watching)
        total = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        _put(made, out)
    write_text(out.parent / LATEST, out.name)
    return judged, Converted(out=str(wish.out), parameters=parameters, size=total, needs=needed, peak_memory=peak)


def _check(examined: Examined, out: Path) -> None:
    name = examined.tag.folder.name
    reason = next(refusals(examined), None)
    if reason:
        raise ImpossiblePlan(f"{name} is not converted: {reason}", hint=_hint(examined))
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} is there already", hint=f"name a new folder: --universal {name}_universal")
    check_folder(out.parent, "--universal")


def _hint(examined: Examined) -> str:
    folder = str(examined.tag.folder.path)
    return f"its weights alone can be had: {step('python -m dsdoctor checkpoint {folder} --merge OUT', folder=folder).line}"


def _told(examined: Examined, out: Path, tell: Callable[[str], None]) -> Needs:
    """What it takes, told before anything is done. Raises ImpossiblePlan where that is not there."""
    host = LocalHost()
    available, free = available_memory(host), host.free(str(out.parent))
    needed = needs(examined, cpus=host.cpus(), available=available)
    tell(
        f"the converter takes up to {amount(needed.disk)} of disk ({_free(free)} free; {amount(needed.result)} stay) "
        f"and {amount(needed.memory)} of memory ({_free(available)} free) with {needed.workers} "
        f"worker{'s' * (needed.workers > 1)}"
    )
    if free is not None and free < needed.disk:
        message = f"the conversion takes {amount(needed.disk)}, and {out.parent} has {amount(free)} left"
        raise ImpossiblePlan(message, hint="name a folder on another disk: --universal OUT")
    if available is not None and available < needed.memory:
        message = f"the conversion takes {amount(needed.memory)} of memory, and {amount(available)} are free here"
        raise ImpossiblePlan(message, hint="convert it on a machine with more memory")
    return needed


def _free(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{amount(count)}"


def _run(examined: Examined, made: Path, python: str, needed: Needs, tell: Callable[[str], None]) -> int:
    """Run the converter; the most memory that one of its processes took."""
    inject = not examined.facts.injected and (examined.facts.stage or 0) < 3
    argv = [
        python, "-m", "deepspeed.checkpoint.ds_to_universal",
        "--input_folder", str(examined.tag.folder.path.absolute()), "--output_folder", str(made),
        "--num_extract_workers", str(needed.workers), "--num_merge_workers", str(min(2, needed.workers)),
        *(["--inject_missing_state"] if inject else []),
    ]  # fmt: skip
    last: deque[str] = deque(maxlen=LAST_LINES)

    def hear(line: str) -> None:
        last.append(line)
        if line.startswith("*** ") and not line.startswith("*** Done"):
            tell(line.removeprefix("*** ").strip(" ."))

    host = LocalHost()
    try:
        ended = host.work(argv, cwd=made.parent, env=host.environment(), on_line=hear)
    except FileNotFoundError as error:
        raise UsageError(f"there is no interpreter {python}", hint="--python PATH, one that has DeepSpeed") from error
    if ended.status:
        raise _failure(ended.status, last, made)
    return ended.peak_memory


def _failure(status: int, last: deque[str], made: Path) -> Exception:
    text = "\n".join(last)
    if "No module named" in text:
        return UsageError(
            "the converter is a part of DeepSpeed, which is not here", hint="--python PATH, one that has it"
        )
    # "unexpected pos": torch's writer found fewer bytes on the disk than it wrote
    if disk_full(text) or "PytorchStreamWriter failed" in text or "unexpected pos" in text:
        return ImpossiblePlan(
            f"the disk of {made.parents[1]} ran full", hint="name a folder on another disk: --universal OUT"
        )
    said = next((line.strip() for line in reversed(last) if line.strip()), "nothing")
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    return BuildFailed(
        f"DeepSpeed's converter {how}: {said[:300]}", hint="nothing was left behind; the checkpoint is unchanged"
    )


def _checked(source: Examined, made: Path, watching: Watching) -> int:
    """How many parameters it has. Raises BuildFailed where what was made is not whole, or holds something else."""
    folder = look(made.parent)
    tag = folder.tag(made.name)
    if tag is None:
        raise BuildFailed("DeepSpeed's converter made no checkpoint", hint="nothing was left behind")
    examined = examine(folder, read_tag(tag), chosen=True)
    elements = sum(WIDTH * count_of(shape) for shape in source.parameters.values())
    watching.total(len(STATES) * elements)
    wrong = next(_wrong(source, examined, watching), None)
    if wrong:
        raise BuildFailed(f"DeepSpeed's converter made something else: {wrong}", hint="nothing was left behind")
    return len(examined.tag.parameters or ())


def _wrong(source: Examined, made: Examined, watching: Watching) -> Iterator[str]:
    yield from (finding.title for finding in judge_tag(made))
    folders = {parameter.name for parameter in made.tag.parameters or ()}
    yield from (f"{name} is not in it" for name in source.parameters if name not in folders)
    try:
        yield from differences(source, made, watching.read)
    except (NotMerged, Damaged, OSError) as error:
        yield str(error)


def _put(made: Path, out: Path) -> None:
    """Give it its name, all at once."""
    _synced(made)
    try:
        made.rename(out)
    except OSError as error:
        raise UsageError(
            f"{out} could not be made: {error.strerror}", hint="name a new folder: --universal OUT"
        ) from error


def _synced(made: Path) -> None:
    """A network file system says only now that it is full."""
    for path in (path for path in made.rglob("*") if path.is_file()):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(number)
        finally:
            os.close(number)
