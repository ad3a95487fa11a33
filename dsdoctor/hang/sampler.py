"""In a rank: a thread that looks once a second and writes what it saw into the rank's ring. Wraps no call, and never raises.

It reads sequence numbers of process groups, Python stacks, and the engine's counters; torch's flight recorder only when nothing has
moved for a while, because that takes milliseconds, and now and then, for the supervisor to compare when the ranks of a node called
their last collectives. Standard library alone; torch is taken from sys.modules.

It imports nothing, runs no code of the script's and takes no lock that the script may hold: an import that two threads want at once
can end the training.
"""

import array
import base64
import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any

from dsdoctor.core.files import open_file
from dsdoctor.core.script import UnlistedThread, unlisted_idents, without_hooks
from dsdoctor.hang.inspection import (
    Counters,
    calling_threads,
    frames_of,
    group_states,
    handled_exception,
    is_python_thread,
    last_failure,
    loader_workers,
    made_progress,
    plain_number,
    plain_text,
    rendezvous_of,
    root_of,
    stored,
    training_thread,
    waited_lock,
)
from dsdoctor.hang.processes import began_at, file_call
from dsdoctor.hang.ring import ARRIVALS, JOINED, LEAVING, SLOT_BYTES, STALLED, UNWATCHED, RingWriter
from dsdoctor.ranks.failure import Failure, is_peer_disconnect
from dsdoctor.ranks.flight_recorder import recorded_operations, recorder_texts

PERIOD_SECONDS, MIN_PERIOD_SECONDS = 60.0, 5.0
"""Between two readings of arrivals: one takes some ten milliseconds, and all ranks do it at the same time."""
SHOWN_LOOKS = 5
"""For which a reading stays in the samples: the supervisor may miss one."""
MAX_ARRIVALS, MAX_STACKS, MAX_STACK_FRAMES, MAX_LOOKS = 1000, 4, 10, 60
ARRIVAL_UNIT_NANOSECONDS = 100_000
"""Nanoseconds in which arrivals are told."""
ENTRY = re.compile(
    r'"collective_seq_id":\s?(\d+),.*?"is_p2p":\s?false,.*?"process_group":\s?\["([^"]*)".*?"time_created_ns":\s?(\d+)'
)
Stack = tuple[tuple[str, int, str], ...]
LOOK_SECONDS, QUICK_LOOK_SECONDS = 1.0, 0.2
OUTER_FRAMES, INNER_FRAMES, INNER_FRAMES_OF_OTHERS = 10, 30, 12
MAX_THREADS, MAX_OPERATIONS = 10, 48
STOP_TIMEOUT_SECONDS = 2.0
"""Seconds that a script has to end by itself when it is told to stop."""
MAX_DEATHS = 4
PATIENCE_BEFORE_LINES = 2.0
"""After so many times the patience the calls are read with their lines: shortly before the verdict."""
CLOSE_TIMEOUT_SECONDS = 4.0
"""Seconds that the last look may take."""
MAX_FAILURES = 20
"""After so many looks that failed one after the other the thread ends: this torch is not one that it can read."""
_raw_signals: Any = vars(signal)["_signal"]
"""The C module: signal.getsignal compares and shows the script's handler, whatever that is."""
FailureFields = tuple[str, list[dict[str, Any]]]
"""An exception in a line, and the frames that it came through."""
NOWHERE: Counters = ({}, (None, None))
Caller = tuple[int, int | None]
"""A thread by Python's identifier, which goes over to a later thread when it ends, and by the kernel's number."""
OWN_REFERENCES = 2
"""References to an engine that nobody but the reading function holds: its variable, and getrefcount's argument."""


class HangDetected(RuntimeError):
    """no rank moved any more, and --on-hang stop ends them all"""


class Arrivals:
    """What one rank tells of itself. ``after``: what the user asked for, which shortens the period."""

    def __init__(self, after: float | None) -> None:
        self._period = PERIOD_SECONDS if after is None else min(max(after, MIN_PERIOD_SECONDS), PERIOD_SECONDS)
        self._number = -1
        self._shown = 0
        self._seen: deque[Stack] = deque(maxlen=MAX_LOOKS)
        self._message: dict[str, Any] | None = None

    def note(self, stack: Stack) -> None:
        """The rank was seen there."""
        self._seen.append(stack[-MAX_STACK_FRAMES:])

    def is_due(self, now: float) -> bool:
        """Whether a new period has begun, by the clock that all ranks of a node have in common."""
        number = int(now // self._period)
        new, self._number = number != self._number and self._number >= 0, number
        return new

    def read(self, recorded: str) -> None:
        """Take over what the flight recorder holds."""
        calls: dict[str, list[tuple[int, int]]] = {}
        for entry in ENTRY.finditer(recorded):
            calls.setdefault(entry[2], []).append((int(entry[1]), int(entry[3])))
        self._shown = SHOWN_LOOKS
        self._message = {
            "number": self._number,
            "groups": [packed(name, calls[name]) for name in sorted(calls, key=lambda each: -len(calls[each]))],
            "stacks": [
                {
                    "looks": looks,
                    "frames": [{"file": file, "line": line, "function": name} for file, line, name in stack],
                }
                # most_common imports heapq
                for stack, looks in sorted(Counter(self._seen).items(), key=lambda item: -item[1])[:MAX_STACKS]
            ],
        }
        left = MAX_ARRIVALS
        for group in self._message["groups"]:
            group["calls"], left = group["calls"][-left:] if left else [], max(0, left - len(group["calls"]))
        self._message["groups"] = [encoded(group) for group in self._message["groups"] if group["calls"]]
        self._seen.clear()

    def message(self) -> dict[str, Any] | None:
        """What is to stand in this look's sample."""
        self._shown -= 1
        return self._message if self._shown >= 0 else None


def packed(name: str, calls: list[tuple[int, int]]) -> dict[str, Any]:
    """The calls of one group, by their number: of several parts of one the first counts."""
    first: dict[int, int] = {}
    for sequence, created in calls:
        first.setdefault(sequence, created)
    return {"name": name, "calls": sorted(first.items())}


def encoded(group: dict[str, Any]) -> dict[str, Any]:
    """As text, four bytes for a call's number and four for its time.

    >>> encoded({"name": "0", "calls": [(7, 5_000_000_000), (8, 5_000_300_000)]})
    {'name': '0', 'sequence': 7, 'created': 5000000000, 'calls': 'AAAAAAAAAAABAAAAAwAAAA=='}
    """
    calls = group["calls"]
    sequence, created = calls[0][0], min(when for _, when in calls)
    numbers = array.array("I")
    for number, when in calls:
        numbers.extend((number - sequence, min((when - created) // ARRIVAL_UNIT_NANOSECONDS, 0xFFFFFFFF)))
    text = base64.b64encode(numbers.tobytes()).decode()
    return {"name": group["name"], "sequence": sequence, "created": created, "calls": text}


class Sampler:
    """The thread. ``engine`` may be set later. ``words``: a file whose text is printed when it is there. ``tend`` is called
    now and then: it sees to it that a supervisor is there. ``after``: what the user asked for. ``asked``: how many parts of the
    script ask for the watch just now; where none does on any rank, nothing is told. ``initialized``: init_process_group has
    returned. ``answers``: SIGUSR2 has this process write its stack."""

    def __init__(
        self,
        ring: RingWriter,
        words: str,
        *,
        rank: int,
        world: int,
        patience: float,
        tend: Callable[[], None],
        after: float | None = None,
        answers: bool = True,
    ) -> None:
        self._answers = answers
        self._ring, self._words, self._patience, self._tend = ring, words, patience, tend
        self._stop = f"{words}.stop"
        self.rank, self.world, self.pid = rank, world, 0
        self._engine: Callable[[], Any] = lambda: None
        self.asked = 1
        self._maker = self._trains = threading.get_ident()
        self._maker_number = thread_number(known_threads().get(self._maker))
        self._kernel_number = 0
        self._seen_calls: dict[Caller, int] = {}
        self._ended, self._wake = False, threading.Event()
        self._leaving = self._stalled = self._joined_once = False
        self.initialized = False
        self._failure: FailureFields = ("", [])
        self._outlived, self._failed_at = self._failure, (self._failure, NOWHERE)
        self.told = False
        self._kept: Any = None
        self._deaths: list[dict[str, Any]] = []
        self._moved, self._progress = time.monotonic(), -1
        self._recorded: dict[str, Any] | None = None
        self._recorded_calls: dict[Caller, int] = {}
        self._with_stacks = False
        self._arrivals = Arrivals(after)
        self._thread = UnlistedThread(self._run)

    @property
    def engine(self) -> Any:
        """Whose counters are read: the script's own, which a watch must not keep alive. None: there is none any more."""
        return self._engine()

    @engine.setter
    def engine(self, engine: Any) -> None:
        try:
            self._engine = weakref.ref(engine)
        except TypeError:  # None, or something small of the script's own
            self._engine = lambda: engine

    def start(self, pid: int) -> None:
        """Begin to look at this process, whose calling thread is the one that trains, as long as no other is seen to."""
        self.pid = pid
        self._maker = self._trains = threading.get_ident()
        self._maker_number = thread_number(known_threads().get(self._maker))
        self._kernel_number = threading.get_native_id()
        self._thread.start()

    def close(self) -> None:
        """The interpreter ends: say so, and let no thread of ours be alive when it is taken down."""
        self._leaving = self._ended = True
        self._wake.set()
        self._thread.join(timeout=CLOSE_TIMEOUT_SECONDS)

    def failed(self, failure: Failure) -> None:
        """An exception is about to end the script: write it at once, a launcher may end this process in a moment."""
        self._failure = (failure.line, [asdict(frame) for frame in failure.frames])
        self._wake.set()

    def thread_ended(self, name: str, failure: Failure) -> None:
        """A thread has ended by an exception: whoever waits for it may wait for ever."""
        died = {"name": name, "failure": failure.line, "frames": [asdict(frame) for frame in failure.frames]}
        self._deaths = [*self._deaths[-MAX_DEATHS:], died]

    def _run(self) -> None:
        failures = 0
        while failures < MAX_FAILURES:
            try:
                without_hooks()
                if not self._leaving:
                    self._tend()
                self.look()
                self._say()
                if os.path.exists(self._stop):  # noqa: PTH110 - once a second
                    self._end_process()
                failures = 0
            except Exception:  # whatever a torch of another release raises: the training goes on
                failures += 1
            if self._waited() and self._leaving:
                with contextlib.suppress(Exception):  # as above
                    self.look()
                return

    def _waited(self) -> bool:
        """Wait for the next look; whether the watch is to end. All ranks of a node look at the same time: what they tell is
        compared. While nothing moves there may be something to print at any moment."""
        left = 0 if self._leaving else LOOK_SECONDS - time.monotonic() % LOOK_SECONDS
        while self._stalled and left > QUICK_LOOK_SECONDS:
            if self._woken(QUICK_LOOK_SECONDS):
                return self._ended
            left -= QUICK_LOOK_SECONDS
            if os.path.exists(self._words):  # noqa: PTH110
                return False
        self._woken(left)
        return self._ended

    def _woken(self, seconds: float) -> bool:
        woken = self._wake.wait(seconds)
        self._wake.clear()
        return woken

    def _say(self) -> None:
        """Print what the supervisor has to say, into this rank's own stderr: nobody else can append to it where it is a file."""
        try:
            with open_file(self._words, "rb") as file:  # once a second
                text = file.read()
        except FileNotFoundError:
            return
        os.unlink(self._words)  # noqa: PTH108
        while text:
            text = text[os.write(2, text) :]

    def _end_process(self) -> None:
        """Somebody asked for all ranks to end when the run hangs. Python code is ended by an exception; what does not come
        back from C within a moment is ended here, with the stack that such an exception would have."""
        os.unlink(self._stop)  # noqa: PTH108
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._trains), ctypes.py_object(HangDetected))
        last = time.monotonic() + STOP_TIMEOUT_SECONDS
        while not self._ended and time.monotonic() < last:
            self._woken(QUICK_LOOK_SECONDS)
        if self._ended:
            return
        stack = stack_text(sys._current_frames().get(self._trains))
        text = f"Traceback (most recent call last):\n{stack}{HangDetected.__module__}.HangDetected: {HangDetected.__doc__}\n"
        os.write(2, text.encode(errors="replace"))
        os._exit(1)

    def _engine_steps(self) -> tuple[int | None, int | None]:
        """The engine's counters. Where the script has let go of it meanwhile, it is kept: its end must not run in this thread."""
        engine = self.engine
        steps = plain_number(stored(engine, "global_steps")), plain_number(stored(engine, "micro_steps"))
        if engine is not None and sys.getrefcount(engine) <= OWN_REFERENCES:
            self._kept = engine
        return steps

    def look(self) -> None:
        """Look once, and write it."""
        frames: dict[int, FrameType] = {}
        try:
            self._look(frames)
        finally:
            # it holds the frames of all threads, those of this function's callers too: a circle, which would keep what the script's
            # functions have left behind until a garbage collection
            frames.clear()

    def _look(self, frames: dict[int, FrameType]) -> None:
        clock = time.monotonic()
        groups = list(group_states())
        self._joined_once = self._joined_once or bool(groups)
        steps = self._engine_steps()
        progress = zlib.crc32(repr(([(group["name"], group["sequence"]) for group in groups], steps)).encode())
        if progress != self._progress:
            self._progress, self._moved, self._recorded, self._with_stacks = progress, clock, None, False
            self._recorded_calls = {}
        failure, failed_in = self._failure_now(({group["name"]: group["sequence"] for group in groups}, steps))
        self._stalled = stalled = clock - self._moved >= self._patience
        ours = unlisted_idents() - {threading.get_ident()}
        frames.update({ident: frame for ident, frame in sys._current_frames().items() if ident not in ours})
        threads = known_threads()
        trains = frames.get(self._find_trains(frames, threads))
        thread = threads.get(self._trains)
        flags = (LEAVING if self._leaving else 0) | (STALLED if stalled else 0) | (JOINED if groups else 0)
        flags |= 0 if self.asked else UNWATCHED
        sample: dict[str, Any] = {
            "rank": self.rank,
            "world": self.world,
            "pid": self.pid,
            "thread": (number := self._number_of(self._trains, thread)),
            "watcher": threading.get_native_id(),
            "time": clock,
            "joined": bool(groups),
            "parted": self._joined_once and not groups,
            "initialized": self.initialized,
            "leaving": self._leaving,
            "failure": failure,
            "failed_in": failed_in,
            "told": self.told,
            "deaths": self._deaths,
            "groups": groups,
            "threads": [_thread(thread_name(thread) or "MainThread", trains, OUTER_FRAMES, INNER_FRAMES, main=True)],
            "step": steps[0],
            "micro_step": steps[1],
            "cuda": _cuda(),
            "lock": "",
            "handling": "",
            "signal_is_ours": self._answers and handles_nothing(signal.SIGUSR2),
        }
        if groups and self.asked and not stalled and not self._leaving:
            sample["arrivals"] = self._called(sample["threads"][0]["frames"])
            flags |= ARRIVALS if sample["arrivals"] else 0
        write = functools.partial(
            self._ring.write, clock=clock, progress=progress, stack=_checksum(trains), flags=flags
        )
        if sample["failure"] or self._leaving:
            # in a moment a launcher may end this process
            write(_fitting(dict(sample)))
            self._add_calls(sample, stacks=self._leaving and is_peer_disconnect(sample["failure"]))
        if stalled:
            sample["lock"] = waited_lock(trains)
            sample["root"] = root_of(trains)
            sample["rendezvous"] = rendezvous_of(trains)
            sample["loader_workers"], sample["workers_answer"] = loader_workers(trains, sys.modules)
            sample["handling"] = handled_exception(self._trains)
            sample["call"] = file_call(self.pid, number)
            self._add_details(sample, frames, stacks=clock - self._moved >= PATIENCE_BEFORE_LINES * self._patience)
        write(_fitting(sample))

    def _find_trains(self, frames: dict[int, FrameType], threads: dict[int, threading.Thread]) -> int:
        """The thread that trains, by what torch has recorded of it, else by where it was seen. What a thread has done that has
        ended says nothing of one that has taken over its identifier."""
        looks = threading.get_ident()
        frames = {ident: frame for ident, frame in frames.items() if ident != looks or ident == self._maker}
        running = {(ident, thread_number(threads.get(ident))) for ident in frames}
        self._seen_calls = {caller: count for caller, count in self._seen_calls.items() if caller in running}
        if len(frames) > 1:
            for ident in calling_threads(frames):
                caller = ident, thread_number(threads.get(ident))
                self._seen_calls[caller] = self._seen_calls.get(caller, 0) + 1
        recorded = {caller: count for caller, count in self._recorded_calls.items() if caller in running}
        calls = {ident: count for (ident, _), count in (recorded or self._seen_calls).items()}
        maker = self._maker if self._maker_runs(frames, threads) else main_ident(self._maker)
        self._trains = training_thread(frames, threads, calls, maker)
        return self._trains

    def _maker_runs(self, frames: dict[int, FrameType], threads: dict[int, threading.Thread]) -> bool:
        """Whether the thread that made the groups has not ended."""
        known = threads.get(self._maker)
        same = not is_python_thread(known) or thread_number(known) == self._maker_number
        return self._maker in frames and same

    def _number_of(self, ident: int, thread: threading.Thread | None) -> int:
        """The kernel's number of a thread, which Python does not know anew after a fork."""
        if ident == self._maker and thread_number(thread) == self._maker_number:
            return self._kernel_number
        is_main = thread is not None and thread is threading.main_thread()
        return self.pid if is_main else thread_number(thread) or self._kernel_number

    def _failure_now(self, counters: Counters) -> FailureFields:
        """The exception that ends the script, and where it came from. A script may print one as Python would, by calling
        sys.excepthook, and go on: it has not failed."""
        failure = self._failure
        if failure is not self._failed_at[0]:
            self._failed_at = failure, counters
        elif failure is not self._outlived and not self._leaving and made_progress(self._failed_at[1], counters):
            self._outlived, self.told = failure, False
        if failure is not self._outlived:
            return failure
        return last_failure() if self._leaving else "", []

    def _called(self, frames: list[dict[str, Any]]) -> dict[str, Any] | None:
        """When this rank called its last collectives, where it is time to tell that."""
        self._arrivals.note(tuple((frame["file"], frame["line"], frame["function"]) for frame in frames))
        if self._arrivals.is_due(time.monotonic()):
            self._arrivals.read("\n".join(recorder_texts()))
        return self._arrivals.message()

    def _add_calls(self, sample: dict[str, Any], *, stacks: bool) -> None:
        """What torch has recorded of the calls; ``stacks``: with their lines, for which it holds the GIL for seconds."""
        if self._recorded is None or stacks > self._with_stacks:
            self._recorded, self._with_stacks = recorded_operations(stacks=stacks), stacks
            made = [each for group in self._recorded.values() for each in group["calls"].items()]
            self._recorded_calls = calls_of_running(made, known_threads(), self.pid)
        for group in sample["groups"]:
            entries = self._recorded.get(group["name"], {})
            group["operations"] = entries.get("operations", [])[-MAX_OPERATIONS:]
            group["history"] = entries.get("history")
            group["timeout"] = entries.get("timeout")

    def _add_details(self, sample: dict[str, Any], frames: dict[int, FrameType], *, stacks: bool) -> None:
        """What is worth its cost only when nothing moves: the flight recorder, once, and the other threads' stacks."""
        self._add_calls(sample, stacks=stacks or self._with_stacks)
        names = {ident: thread_name(thread) for ident, thread in known_threads().items()}
        own = {self._trains, threading.get_ident()}
        others = [(names.get(ident) or str(ident), frame) for ident, frame in frames.items() if ident not in own]
        sample["threads"] += [_thread(name, frame, 2, INNER_FRAMES_OF_OTHERS) for name, frame in others[:MAX_THREADS]]
        sample["all_threads"] = len(others) <= MAX_THREADS


def _thread(name: str, frame: FrameType | None, outer: int, inner: int, *, main: bool = False) -> dict[str, Any]:
    return {"name": name, "frames": frames_of(frame, outer, inner), "main": main}


def _checksum(frame: FrameType | None) -> int:
    """Where a thread stands, as a number."""
    number = 0
    while frame is not None:
        number = zlib.crc32(b"%d %d" % (id(frame.f_code), frame.f_lasti), number)
        frame = frame.f_back
    return number


def _fitting(sample: dict[str, Any]) -> bytes:
    """The sample as JSON that fits into a slot: what tells least goes first."""
    text = _as_json(sample)
    reductions = _reductions(sample)
    while len(text) > SLOT_BYTES and next(reductions, False):
        text = _as_json(sample)
    return text


def _reductions(sample: dict[str, Any]) -> Iterator[bool]:
    """Leave out of a sample one part after the other."""
    sample["arrivals"] = None
    yield True
    for group in sample["groups"]:
        group["history"] = None
    yield True
    sample["threads"] = sample["threads"][:3]
    sample["all_threads"] = False
    yield True
    for group in sample["groups"]:
        group["operations"] = group.get("operations", [])[-3:]
    yield True
    sample["groups"] = [{**group, "ranks": group["ranks"][:512]} for group in sample["groups"][:8]]
    yield True


def _as_json(sample: dict[str, Any]) -> bytes:
    """As UTF-8, also where a name or a message is none: one such word would make the whole sample unreadable."""
    return json.dumps(sample, ensure_ascii=False).encode("utf-8", "replace")


def known_threads() -> dict[int, threading.Thread]:
    """The threads that Python's threading knows. Not by ``threading.enumerate``: that waits for a lock."""
    return dict(threading._active)  # type: ignore[attr-defined]


def main_ident(default: int) -> int:
    """Python's identifier of the main thread."""
    return plain_number(stored(threading.main_thread(), "_ident")) or default


def thread_number(thread: threading.Thread | None) -> int | None:
    """The kernel's number of a thread as Python was told it when it began."""
    return plain_number(stored(thread, "_native_id"))


def calls_of_running(
    made: Iterable[tuple[int, list[int]]], threads: Mapping[int, threading.Thread], pid: int
) -> dict[Caller, int]:
    """How many of some calls each running thread has made. ``made``: identifiers with times, in nanoseconds of the wall clock; what
    is older than the thread was made by another one, which had its identifier before."""
    counts: dict[Caller, int] = {}
    for ident, times in made:
        number = thread_number(threads.get(ident))
        began = began_at(pid, number) if number is not None else None
        count = sum(began is None or time_of_call >= began for time_of_call in times)
        if count:
            counts[ident, number] = counts.get((ident, number), 0) + count
    return counts


def thread_name(thread: threading.Thread | None) -> str:
    """The name of a thread as it was given; "" for none. ``name`` of a class of the script's may be its own code."""
    return plain_text(stored(thread, "_name"))


def handles_nothing(number: int) -> bool:
    """Whether the script has no handler for a signal."""
    handler = _raw_signals.getsignal(number)
    return type(handler) is int and handler == signal.SIG_DFL.value


def stack_text(frame: FrameType | None) -> str:
    """A stack as a traceback shows it. Not by ``traceback``, which imports and asks linecache."""
    lines: list[str] = []
    while frame is not None:
        code, line = frame.f_code, frame.f_lineno or 0
        text = _source_line(code.co_filename, line)
        lines.insert(
            0, f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' + (f"    {text}\n" if text else "")
        )
        frame = frame.f_back
    return "".join(lines)


def _source_line(file: str, number: int) -> str:
    try:
        with open_file(file, "rb") as source:
            found = next(itertools.islice(source, max(0, number - 1), None), b"")
    except (OSError, ValueError):
        return ""
    return found.strip().decode("utf-8", "replace")


def _cuda() -> bool:
    """Whether this process uses a GPU: then a thread that only waits may burn its processor."""
    cuda = sys.modules.get("torch.cuda")
    return bool(getattr(cuda, "_initialized", False))
