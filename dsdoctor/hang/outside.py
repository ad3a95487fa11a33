"""Stacks of processes that are read from outside: py-spy's, those that Python's fault handler writes at SIGUSR2, and a loader's
workers'; and NCCL's own view of a running job (RAS, since NCCL 2.24). Looks.

The fault handler writes also while C code holds the interpreter's lock. A worker that was forked has that of its rank: it is asked
only where nothing else can have put a handler of its own there. Of others the kernel's words are told.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.core.files import is_this_user
from dsdoctor.core.host import Host
from dsdoctor.core.processes import LETTERS, wait_until
from dsdoctor.core.text import decode
from dsdoctor.hang.activity import AT_LOCK, LOCKED, Activity, StackActivity, activity_in, activity_of
from dsdoctor.hang.models import Frame, LoaderWorker, RankView, ThreadStack
from dsdoctor.hang.processes import all_parents, catches, caught, facts_of, owner_of, waits_in
from dsdoctor.hang.stacks import Sources, frame_text, main_of, own_frame

PY_SPY = "py-spy"
DUMP_TIMEOUT_SECONDS = 20.0
NOT_INSTALLED = "py-spy is not installed"
REFUSED = "the kernel does not allow py-spy to read it"
PY_SPY_ERRORS = (
    ("permission denied", REFUSED),
    ("operation not permitted", REFUSED),
    ("no such process", "the process no longer exists"),
    ("no such file", "the process no longer exists"),
    ("failed to find python version", "py-spy does not support this Python"),
    ("python version", "py-spy does not support this Python"),
)
DUMP_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
DUMP_HEAD = re.compile(r"(?:Current thread|Thread) (?P<id>0x[0-9a-f]+)|Stack \(most recent call first\)")

MAX_WORKERS = 4
FORKED, SPAWNED = "forked", "spawned"
ENDED = "ZXTt"
"""The kernel's letters of a process that does nothing any more."""
TORCH_SIGNALS = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGTERM})
"""Signals for which torch gives a worker handlers of its own."""
LOCKING = re.compile("lock|futex")
"""In a function of the kernel or a line of source: a wait that nothing from outside ends."""
MAX_SILENT_SECONDS = 3.0
"""Of a rank that has written nothing for longer it is not known which workers it has."""
RAS_VARIABLE, RAS_ADDRESS = "NCCL_RAS_ADDR", "localhost:28028"
RAS_QUERY = b"verbose status\n"
RAS_TIMEOUT_SECONDS, MAX_RAS_BYTES = 8.0, 1 << 20
"""Seconds: RAS gathers from all processes, and waits for those that do not answer; bytes."""
RAS_SECTIONS, MAX_RAS_LINES = ("Errors", "Warnings"), 12


def py_spy_program(host: Host) -> str | None:
    """py-spy on PATH, or next to this Python."""
    next_to_python = str(Path(sys.executable).with_name(PY_SPY))
    return host.which(PY_SPY) or (next_to_python if host.exists(next_to_python) else None)


def stacks_of(pid: int, host: Host) -> tuple[ThreadStack, ...] | str:
    """The stacks of a process, outermost frame first, or in words why they cannot be read. It stands still meanwhile, for some
    milliseconds."""
    path = py_spy_program(host)
    if path is None:
        return NOT_INSTALLED
    answer = host.run([path, "dump", "--json", "--pid", str(pid)], timeout=DUMP_TIMEOUT_SECONDS)
    if answer.returncode is None:
        return f"py-spy did not answer within {DUMP_TIMEOUT_SECONDS:.0f} s"
    try:
        return (
            tuple(parse_threads(decode(answer.stdout.encode(), list), pid)) if answer.ok else reason_of(answer.stderr)
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return "py-spy's answer was not understood"


def parse_threads(threads: list[Any], pid: int) -> Iterator[ThreadStack]:
    """The threads of ``py-spy dump --json``.

    >>> frame = {"name": "f", "filename": "/a/t.py", "line": 3}
    >>> told = {"thread_name": None, "os_thread_id": 7, "frames": [frame, {**frame, "name": "<module>", "line": 9}]}
    >>> [(each.main, [inner.line for inner in each.frames]) for each in parse_threads([told], 7)]
    [(True, [9, 3])]
    """
    for thread in threads:
        frames = tuple(
            # newer Pythons tell the qualified name
            Frame(file=str(frame["filename"]), line=int(frame["line"]), function=str(frame["name"]).rpartition(".")[2])
            for frame in reversed(thread["frames"])
        )
        main = thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread"
        yield ThreadStack(name=str(thread.get("thread_name") or "thread"), frames=frames, main=main)


def reason_of(error: str) -> str:
    """What py-spy's error means, in words.

    >>> reason_of("Error: Permission Denied: Try running again with elevated permissions by going 'sudo env ...'")
    'the kernel does not allow py-spy to read it'
    """
    known = next((words for sign, words in PY_SPY_ERRORS if sign in error.lower()), None)
    first = next((line for line in error.splitlines() if line.strip()), "")
    return known or f"py-spy said: {first[:160]}"


def parse_dump(text: str) -> Iterator[ThreadStack]:
    """The threads of one dump; the last of them is the main thread.

    >>> dump = 'Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n  File "a.py", line 9 in <module>\\n'
    >>> [[(frame.line, frame.function) for frame in thread.frames] for thread in parse_dump(dump)]
    [[(9, '<module>'), (3, 'f')]]
    """
    names: list[str] = []
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if head := DUMP_HEAD.match(line):
            names.append(head["id"] or "main")
            stacks.append([])
        elif stacks and (found := DUMP_LINE.fullmatch(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            stacks[-1].append(Frame(file=found["file"], line=number, function=found["function"]))
    for number, (name, frames) in enumerate(zip(names, stacks, strict=True), 1):
        yield ThreadStack(name=name, frames=tuple(reversed(frames)), main=number == len(stacks))


def requested_stacks(pid: int, path: Path, *, seconds: float = 1.0) -> tuple[ThreadStack, ...]:
    """The stacks of a process that has promised to write them to a file at SIGUSR2; none where it does not in this time."""
    try:
        before = path.stat().st_size
        if not catches(pid, signal.SIGUSR2):
            return ()
        os.kill(pid, signal.SIGUSR2)
        if not wait_until(lambda: path.stat().st_size != before, seconds, pause=0.02):
            return ()
        # the handler writes in several pieces
        time.sleep(0.05)
        with path.open("rb") as file:
            file.seek(before)
            return tuple(parse_dump(file.read(1 << 20).decode(errors="replace")))
    except OSError:
        return ()


def waits_for_loader(view: RankView) -> bool:
    """Whether a rank waits for its data loader."""
    return activity_of(view) == StackActivity(Activity.DATA_LOADER)


def workers_of(view: RankView, stacks: Path, sources: Sources) -> tuple[LoaderWorker, ...]:
    """Where the first workers of a rank's loader stand. ``stacks``: the file into which the rank's fault handler writes."""
    named = view.sample.loader_workers if view.sample is not None and view.silent < MAX_SILENT_SECONDS else ()
    parents = all_parents()
    children = [pid for pid in named if parents.get(pid) == view.pid]
    workers = (_worker(child, view, stacks, sources) for child in children[:MAX_WORKERS])
    return tuple(worker for worker in workers if worker is not None)


def may_read(view: RankView) -> bool:
    """Whether a rank waits for workers of its data loader that wait themselves, and for no lock: they may read from far away."""
    return waits_for_loader(view) and bool(view.workers) and not any(worker.blocked for worker in view.workers)


def _worker(pid: int, view: RankView, stacks: Path, sources: Sources) -> LoaderWorker | None:
    facts, kind = facts_of(pid), worker_kind(pid, view.pid)
    if facts is None or not kind:
        return None
    if facts.state in ENDED:
        stopped = pid if facts.state == "T" else 0
        return LoaderWorker(line=f"its worker {pid} is {LETTERS[facts.state]}", blocked=True, stopped=stopped)
    asked = kind == FORKED and facts.state != "D" and answers_signal(pid, view)
    frames = main_of(requested_stacks(pid, stacks)) if asked else ()
    kernel = waits_in(pid)
    own = own_frame(frames, only=True)
    if own is None:
        # in the loader's own loop it waits for the next order
        if not kernel or frames:
            return None
        return LoaderWorker(line=f"its worker {pid}, in the kernel: {kernel}", blocked=bool(LOCKING.search(kernel)))
    known = with_text(own, pid, sources)
    seen = activity_in(tuple(known if frame == own else frame for frame in frames), kernel)
    words = seen.kind.value if seen.kind else "is"
    return LoaderWorker(
        line=f"its worker {pid} {words} at {frame_text(known)}",
        at_lock=seen.kind in AT_LOCK,
        blocked=seen.kind in LOCKED or bool(LOCKING.search(known.text)),
    )


def answers_signal(pid: int, view: RankView) -> bool:
    """Whether a worker answers SIGUSR2 as its rank does, for sure: nothing in it has set handlers (a Java machine would) but
    torch, nothing of the script's may have, and the rank's own is Python's fault handler."""
    sample = view.sample
    if sample is None or not (sample.signal_is_ours and sample.workers_answer):
        return False
    of_rank = caught(view.pid)
    return signal.SIGUSR2 in of_rank & caught(pid) and caught(pid) <= of_rank | TORCH_SIGNALS


def worker_kind(pid: int, parent: int) -> str:
    """Whether a process is one of multiprocessing's: forked from its parent, or spawned; "" for any other."""
    try:
        own, of_parent = (Path(f"/proc/{each}/cmdline").read_bytes() for each in (pid, parent))
    except OSError:
        return ""
    spawned = b"multiprocessing.spawn" in own or b"multiprocessing.forkserver" in own
    return FORKED if own == of_parent != b"" else SPAWNED if spawned else ""


def with_text(frame: Frame, pid: int, sources: Sources) -> Frame:
    """The frame with its source line, where the process is this user's."""
    return replace(frame, text=sources.line(frame.file, frame.line)) if is_this_user(owner_of(pid)) else frame


def ras_errors(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The lines of RAS's errors and warnings, or that it has none; empty where nobody answers."""
    text = query_ras(environment.get(RAS_VARIABLE) or RAS_ADDRESS)
    if not text.strip():
        return ()
    found = tuple(ras_lines(text))[:MAX_RAS_LINES]
    return found or ("NCCL's RAS answers and sees no error",)


def query_ras(address: str) -> str:
    """What RAS says; "" where it does not answer."""
    host, _, port = address.rpartition(":")
    answer, last = bytearray(), time.monotonic() + RAS_TIMEOUT_SECONDS
    with (
        contextlib.suppress(OSError, ValueError),  # what has come by then counts
        socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=1.0) as connection,
    ):
        connection.sendall(RAS_QUERY)
        while len(answer) < MAX_RAS_BYTES and (left := last - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(1 << 16)
            if not part:
                break
            answer += part
    return answer.decode(errors="replace")


def ras_lines(text: str) -> Iterator[str]:
    """The lines of the sections that name errors and warnings.

    >>> told = ["Errors", "======", "", "DEAD", "  1 job process is considered dead", "", "Warnings", "========", "", "TIMEOUT"]
    >>> list(ras_lines("\\n".join(["Job summary", "===", "4 8", *told])))
    ['NCCL: DEAD', 'NCCL: 1 job process is considered dead', 'NCCL: TIMEOUT']
    """
    lines = text.splitlines()
    inside = False
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if below.startswith("===") and line.strip():
            inside = line.strip().partition("...")[0] in RAS_SECTIONS
        elif inside and line.strip() and not line.startswith("==="):
            yield f"NCCL: {line.strip()[:160]}"
