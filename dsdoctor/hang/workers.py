"""The processes below a rank that waits for its data loader: where each of them stands. Looks.

A worker that was forked has the fault handler of its rank, and writes its stack at SIGUSR2: it is asked only where nothing else
can have put a handler of its own there. Of others the kernel's words are told.
"""

import linecache
import signal
from dataclasses import replace
from pathlib import Path

from dsdoctor.core.processes import LETTERS
from dsdoctor.hang.fault_dump import asked_for
from dsdoctor.hang.models import Frame, RankView
from dsdoctor.hang.processes import all_parents, caught, facts_of, waits_in
from dsdoctor.hang.stacks import doing, doing_of, main_of, own_frame, place

MOST = 4
FORKED, SPAWNED = "forked", "spawned"
ENDED = "ZXTt"
"""The kernel's letters of a process that does nothing any more."""
OF_TORCH = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGTERM})
"""Signals for which torch gives a worker handlers of its own."""
SILENT = 3.0
"""Seconds: of a rank that has written nothing for so long it is not known which workers it has."""


def of_loader(view: RankView) -> bool:
    """Whether a rank waits for its data loader."""
    return doing_of(view) == "waits for its data loader"


def workers_of(view: RankView, stacks: Path) -> tuple[str, ...]:
    """A line for each of the first workers of a rank's loader. ``stacks``: the file into which the rank's fault handler writes."""
    named = view.sample.loader_workers if view.sample is not None and view.silent < SILENT else ()
    parents = all_parents()
    children = [pid for pid in named if parents.get(pid) == view.pid]
    return tuple(line for child in children[:MOST] if (line := _line(child, view, stacks)))


def may_read(view: RankView) -> bool:
    """Whether a rank waits for workers of its data loader that wait themselves, and for no lock: they may read from far away."""
    ill = ("lock", "futex", *(LETTERS[letter] for letter in ENDED))
    return of_loader(view) and bool(view.workers) and not any(word in line for line in view.workers for word in ill)


def _line(pid: int, view: RankView, stacks: Path) -> str:
    facts, kind = facts_of(pid), kind_of(pid, view.pid)
    if facts is None or not kind:
        return ""
    if facts.state in ENDED:
        return f"its worker {pid} is {LETTERS[facts.state]}"
    asked = kind == FORKED and facts.state != "D" and answers(pid, view)
    frames = main_of(asked_for(pid, stacks)) if asked else ()
    kernel = waits_in(pid)
    own = own_frame(frames, only=True)
    if own is None:
        # in the loader's own loop it waits for the next order
        return f"its worker {pid}, in the kernel: {kernel}" if kernel and not frames else ""
    known = with_text(own)
    words = doing(tuple(known if frame == own else frame for frame in frames), kernel)
    return f"its worker {pid} {words.removesuffix(' in its data loader') or 'stands'} at {place(known)}"


def answers(pid: int, view: RankView) -> bool:
    """Whether a worker answers SIGUSR2 as its rank does, for sure: nothing in it has set handlers (a Java machine would) but
    torch, nothing of the script's may have, and the rank's own is Python's fault handler."""
    sample = view.sample
    if sample is None or not (sample.signal_is_ours and sample.workers_answer):
        return False
    of_rank = caught(view.pid)
    return signal.SIGUSR2 in of_rank & caught(pid) and caught(pid) <= of_rank | OF_TORCH


def kind_of(pid: int, parent: int) -> str:
    """Whether a process is one of multiprocessing's: forked from its parent, or spawned; "" for any other."""
    try:
        own, of_parent = (Path(f"/proc/{each}/cmdline").read_bytes() for each in (pid, parent))
    except OSError:
        return ""
    spawned = b"multiprocessing.spawn" in own or b"multiprocessing.forkserver" in own
    return FORKED if own == of_parent != b"" else SPAWNED if spawned else ""


def with_text(frame: Frame) -> Frame:
    """The frame with its source line."""
    return replace(frame, text=linecache.getline(frame.file, frame.line).strip()[:160])
