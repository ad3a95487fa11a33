"""What a node's supervisor does with what it sees: judge it, print it where a rank prints, write it into the run's folder."""

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.core.files import PRIVATE, write_bytes
from dsdoctor.core.finding import Finding
from dsdoctor.core.processes import wait_until
from dsdoctor.core.script import write_stderr
from dsdoctor.hang.channel import identity, node_name
from dsdoctor.hang.local_rank import LocalRank, Node
from dsdoctor.hang.models import HangOptions, Incident
from dsdoctor.hang.supervisor import HANGS, LATE, WORKS, Judgement, Task, supervise
from dsdoctor.rules import book

NCCL_IS_ASKED = {"hang-transport", "hang-unclear"}
PRINT_TIMEOUT_SECONDS = 3.0
"""Seconds: a rank that has looked around this lately will print what it is given, within this time."""


def watch_node(order: dict[str, Any]) -> None:
    """Watch the ranks of this node, as a rank has ordered."""
    options = HangOptions(**order["options"])
    run = identity(os.environ, user=os.geteuid(), place=order["place"])
    if run is None:
        return
    task = Task(
        folder=Path(order["folder"]),
        options=options,
        run=run,
        host=node_name().partition("/")[0],
        tell=lambda incident, node: tell(incident, node, options),
        write=lambda incident: _written(incident, options),
        mention=mention,
        judge=lambda incident: state_of(incident, patient=options.after is None),
    )
    try:
        book.prepare("hang")  # the disk may not answer when nothing moves
        supervise(task)
    except Exception as error:  # a rank starts another one, and after a few says so
        write_stderr(f"dsdoctor: a supervisor failed, {type(error).__name__}: {error}\n")


def state_of(incident: Incident, *, patient: bool) -> Judgement:
    """Whether an incident is a hang, or what the others wait for is late, or works. ``patient``: nobody said after how many
    seconds, so what may work where it is not seen is given its time, too."""
    from dsdoctor.hang.verdict import is_blind, is_late, is_working, judge, late_ranks, may_wait_outside

    verdict = judge(incident)
    if not verdict.findings or is_blind(incident, verdict):
        return Judgement(state="")
    if patient and may_wait_outside(incident, verdict):
        return Judgement(state=WORKS)
    if is_late(incident):
        return Judgement(state=LATE, late=late_ranks(incident))
    return Judgement(state=WORKS if is_working(verdict) else HANGS)


def tell(incident: Incident, node: Node, options: HangOptions) -> None:
    """Print the verdict on an incident, then write the files: a folder that cannot be written, or is on a disk that does not
    answer, must not hold up the verdict."""
    from dsdoctor.core.redaction import Hidden
    from dsdoctor.hang.verdict import judge

    hidden = Hidden(dict(os.environ))
    incident = with_nccl(incident, judge(incident).findings)
    verdict = judge(incident)
    say([hidden.out_of(line) for line in lines_of(incident, verdict)], node)
    place, failure = _written(incident, options)
    say(
        [
            f"files of all ranks: {place}; to show this again: dsdoctor hang {place}"
            if place
            else f"no files: {failure}"
        ],
        node,
    )


def with_nccl(incident: Incident, findings: tuple[Finding, ...]) -> Incident:
    """The incident with what NCCL says of it, where all ranks have come and it has a word in that."""
    from dsdoctor.hang.outside import ras_errors

    asked = any(finding.rule in NCCL_IS_ASKED for finding in findings)
    on_gpus = any(view.sample and view.sample.cuda for view in incident.ranks)
    return replace(incident, nccl=ras_errors(os.environ)) if asked and on_gpus else incident


def mention(what: Finding | str, node: Node) -> None:
    """Print a finding, or a line."""
    from dsdoctor.core.redaction import Hidden
    from dsdoctor.ui.terminal import finding_lines

    hidden = Hidden(dict(os.environ))
    say([hidden.out_of(line) for line in ([what] if isinstance(what, str) else finding_lines([what]))], node)


def lines_of(incident: Incident, verdict: Any) -> Iterable[str]:
    """The verdict as it is printed."""
    from dsdoctor.hang.verdict import hang_lines

    return hang_lines(incident, verdict)


def _written(incident: Incident, options: HangOptions) -> tuple[str, str]:
    """Where the files are, or why there are none: the folder that was asked for, else a temporary one."""
    from dsdoctor.hang.incidents import write_ranks

    failure = ""
    for folder in _folders(incident, options):
        try:
            write_ranks(folder, incident)
            return str(folder), ""
        except OSError as error:
            failure = failure or f"{folder}: {error.strerror or error}"
    return "", failure


def _folders(incident: Incident, options: HangOptions) -> Iterator[Path]:
    """Where the files may go, the best place first."""
    yield Path(options.folder)
    # looked for only where it is needed: on a read-only root there may be none at all
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"dsdoctor-hang-{os.geteuid()}-{incident.run}"


def say(lines: Iterable[str], node: Node) -> None:
    """Have the first rank of this node print that is able to, each line with our name; else print into its stderr from here."""
    from dsdoctor.ui.terminal import printable

    text = "".join(f"dsdoctor: {printable(line)}\n" for line in lines).encode(errors="replace")
    ranks = sorted(node.living(), key=lambda each: each.rank)
    for rank in ranks:
        if _says(rank, text):
            return
    for rank in ranks:
        if _printed(rank.pid, text):
            return
    # the stderr of the rank that started this process, which may be gone
    with contextlib.suppress(OSError):
        os.write(2, text)


def _says(rank: LocalRank, text: bytes) -> bool:
    """Whether a rank has taken the text that it is to print."""
    if rank.beat is None or rank.leaving or time.monotonic() - rank.beat.clock > PRINT_TIMEOUT_SECONDS:
        return False
    try:
        write_bytes(rank.words, text, mode=PRIVATE)
        taken = wait_until(lambda: not rank.words.exists(), PRINT_TIMEOUT_SECONDS)
        rank.words.unlink(missing_ok=True)
    except OSError:
        return False
    return taken


def _printed(pid: int, text: bytes) -> bool:
    """Whether the text went into a process's stderr. Not where that is a file: its owner would write over it."""
    path = f"/proc/{pid}/fd/2"
    try:
        if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return False
        # what is full must not hold the supervisor up
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.write(number, text) == len(text)
        finally:
            os.close(number)
    except OSError:
        return False
