"""Stacks and views of processes from outside: py-spy, Python's fault handler, NCCL's RAS."""

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
from dsdoctor.core.processes import LETTERS
from dsdoctor.core.text import decode
from dsdoctor.hang.activity import AT_LOCK, LOCKED, Activity, StackActivity, activity_in, activity_of
from dsdoctor.hang.models import Frame, LoaderWorker, RankView, ThreadStack
from dsdoctor.hang.processes import all_parents, catches, caught, facts_of, owner_of, waits_in
from dsdoctor.hang.source import Sources
from dsdoctor.hang.stacks import frame_text, main_of, own_frame

# py-spy, where it is there and allowed -> the stacks of a process that knows nothing of us, or why there are none.


NAME = "py-spy"
DUMP_TIMEOUT_SECONDS = 20.0
NOT_INSTALLED = "py-spy is not installed"
REFUSED = "the kernel does not allow py-spy to read it"
SIGNS = (
    ("permission denied", REFUSED),
    ("operation not permitted", REFUSED),
    ("no such process", "the process no longer exists"),
    ("no such file", "the process no longer exists"),
    ("failed to find python version", "py-spy does not support this Python"),
    ("python version", "py-spy does not support this Python"),
)


def program(host: Host) -> str | None:
    """py-spy on PATH, or beside this Python."""
    beside = str(Path(sys.executable).with_name(NAME))
    return host.which(NAME) or (beside if host.exists(beside) else None)


def stacks_of(pid: int, host: Host) -> tuple[ThreadStack, ...] | str:
    """The stacks of a process, outermost frame first, or in words why they cannot be read. It stands still meanwhile, for some
    milliseconds."""
    path = program(host)
    if path is None:
        return NOT_INSTALLED
    answer = host.run([path, "dump", "--json", "--pid", str(pid)], timeout=DUMP_TIMEOUT_SECONDS)
    if answer.returncode is None:
        return f"py-spy did not answer within {DUMP_TIMEOUT_SECONDS:.0f} s"
    try:
        return tuple(parse_threads(decode(answer.stdout.encode(), list), pid)) if answer.ok else why_not(answer.stderr)
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


def why_not(said: str) -> str:
    """What py-spy's error means, in words.

    >>> why_not("Error: Permission Denied: Try running again with elevated permissions by going 'sudo env ...'")
    'the kernel does not allow py-spy to read it'
    """
    known = next((words for sign, words in SIGNS if sign in said.lower()), None)
    first = next((line for line in said.splitlines() if line.strip()), "")
    return known or f"py-spy said: {first[:160]}"


# What Python's fault handler writes at SIGUSR2 -> stacks. It writes also while C code holds the interpreter's lock.


LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
HEAD = re.compile(r"(?:Current thread|Thread) (?P<id>0x[0-9a-f]+)|Stack \(most recent call first\)")
OWN_THREAD = "dsdoctor/hang/sampler.py"


def parse_dump(text: str) -> Iterator[ThreadStack]:
    """The threads of one dump; the last of them is the main thread.

    >>> dump = 'Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n  File "a.py", line 9 in <module>\\n'
    >>> [[(frame.line, frame.function) for frame in thread.frames] for thread in parse_dump(dump)]
    [[(9, '<module>'), (3, 'f')]]
    """
    names: list[str] = []
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if head := HEAD.match(line):
            names.append(head["id"] or "main")
            stacks.append([])
        elif stacks and (found := LINE.fullmatch(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            stacks[-1].append(Frame(file=found["file"], line=number, function=found["function"]))
    for number, (name, frames) in enumerate(zip(names, stacks, strict=True), 1):
        yield ThreadStack(name=name, frames=tuple(reversed(frames)), main=number == len(stacks))


def asked_for(pid: int, path: Path, *, seconds: float = 1.0) -> tuple[ThreadStack, ...]:
    """The stacks of a process that has promised to write them to a file at SIGUSR2; none where it does not in this time."""
    try:
        before = path.stat().st_size
        if not catches(pid, signal.SIGUSR2):
            return ()
        os.kill(pid, signal.SIGUSR2)
        last = time.monotonic() + seconds
        while (size := path.stat().st_size) == before and time.monotonic() < last:
            time.sleep(0.02)
        if size == before:
            return ()
        # the handler writes in several pieces
        time.sleep(0.05)
        with path.open("rb") as file:
            file.seek(before)
            return tuple(parse_dump(file.read(1 << 20).decode(errors="replace")))
    except OSError:
        return ()


# The processes below a rank that waits for its data loader: where each of them stands. Looks.
#
# A worker that was forked has the fault handler of its rank, and writes its stack at SIGUSR2: it is asked only where nothing else
# can have put a handler of its own there. Of others the kernel's words are told.


MAX_WORKERS = 4
FORKED, SPAWNED = "forked", "spawned"
ENDED = "ZXTt"
"""The kernel's letters of a process that does nothing any more."""
OF_TORCH = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGTERM})
"""Signals for which torch gives a worker handlers of its own."""
LOCKING = re.compile("lock|futex")
"""In a function of the kernel or a line of source: a wait that nothing from outside ends."""
SILENT = 3.0
"""Seconds: of a rank that has written nothing for so long it is not known which workers it has."""


def of_loader(view: RankView) -> bool:
    """Whether a rank waits for its data loader."""
    return activity_of(view) == StackActivity(Activity.DATA_LOADER)


def workers_of(view: RankView, stacks: Path, sources: Sources) -> tuple[LoaderWorker, ...]:
    """Where the first workers of a rank's loader stand. ``stacks``: the file into which the rank's fault handler writes."""
    named = view.sample.loader_workers if view.sample is not None and view.silent < SILENT else ()
    parents = all_parents()
    children = [pid for pid in named if parents.get(pid) == view.pid]
    workers = (_worker(child, view, stacks, sources) for child in children[:MAX_WORKERS])
    return tuple(worker for worker in workers if worker is not None)


def may_read(view: RankView) -> bool:
    """Whether a rank waits for workers of its data loader that wait themselves, and for no lock: they may read from far away."""
    return of_loader(view) and bool(view.workers) and not any(worker.blocked for worker in view.workers)


def _worker(pid: int, view: RankView, stacks: Path, sources: Sources) -> LoaderWorker | None:
    facts, kind = facts_of(pid), kind_of(pid, view.pid)
    if facts is None or not kind:
        return None
    if facts.state in ENDED:
        return LoaderWorker(line=f"its worker {pid} is {LETTERS[facts.state]}", blocked=True)
    asked = kind == FORKED and facts.state != "D" and answers(pid, view)
    frames = main_of(asked_for(pid, stacks)) if asked else ()
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


def with_text(frame: Frame, pid: int, sources: Sources) -> Frame:
    """The frame with its source line, where the process is this user's."""
    return replace(frame, text=sources.line(frame.file, frame.line)) if is_this_user(owner_of(pid)) else frame


# NCCL's own view of a running job (RAS, since NCCL 2.24), where it answers on this host -> what it complains of. Looks.


VARIABLE, USUAL = "NCCL_RAS_ADDR", "localhost:28028"
QUESTION = b"verbose status\n"
RAS_LONGEST, LARGEST = 8.0, 1 << 20
"""Seconds: RAS gathers from all processes, and waits for those that do not answer; bytes."""
SECTIONS, RAS_MOST = ("Errors", "Warnings"), 12


def ras_errors(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The lines of RAS's errors and warnings, or that it has none; empty where nobody answers."""
    text = asked(environment.get(VARIABLE) or USUAL)
    if not text.strip():
        return ()
    found = tuple(lines_of(text))[:RAS_MOST]
    return found or ("NCCL's RAS answers and sees no error",)


def asked(address: str) -> str:
    """What RAS says; "" where it does not answer."""
    host, _, port = address.rpartition(":")
    answer, last = bytearray(), time.monotonic() + RAS_LONGEST
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=1.0) as connection:
            connection.sendall(QUESTION)
            while len(answer) < LARGEST and (left := last - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(1 << 16)
                if not part:
                    break
                answer += part
    except (OSError, ValueError):
        return answer.decode(errors="replace")
    return answer.decode(errors="replace")


def lines_of(text: str) -> Iterator[str]:
    """The lines of the sections that name errors and warnings.

    >>> told = ["Errors", "======", "", "DEAD", "  1 job process is considered dead", "", "Warnings", "========", "", "TIMEOUT"]
    >>> list(lines_of("\\n".join(["Job summary", "===", "4 8", *told])))
    ['NCCL: DEAD', 'NCCL: 1 job process is considered dead', 'NCCL: TIMEOUT']
    """
    lines = text.splitlines()
    inside = False
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if below.startswith("===") and line.strip():
            inside = line.strip().partition("...")[0] in SECTIONS
        elif inside and line.strip() and not line.startswith("==="):
            yield f"NCCL: {line.strip()[:160]}"
