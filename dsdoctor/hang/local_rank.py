"""The ranks of this node, as its supervisor follows each from outside: its ring, its process, what it did lately, and since when
none of them has moved. Looks, judges nothing.
"""

import ast
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from dsdoctor.core.files import is_this_user
from dsdoctor.core.processes import holder_of
from dsdoctor.core.text import decode
from dsdoctor.hang import processes
from dsdoctor.hang.models import (
    MAX_SAMPLE_AGE,
    NOT_LOOKED,
    Frame,
    GroupState,
    Lock,
    Operation,
    RankArrivals,
    RankView,
    Sample,
    ThreadStack,
)
from dsdoctor.hang.processes import file_call, file_system_of, is_of_open_file
from dsdoctor.hang.ring import ARRIVALS, JOINED, LEAVING, UNWATCHED, Heartbeat, RingReader
from dsdoctor.hang.stacks import Sources, acting_stack, is_own, main_of, own_frame, pauses, with_texts

RING_NAME = re.compile(r"rank-(\d{1,6})-(\d{1,10})\.ring")
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 4, 30
"""Seconds before now, and since a rank last moved, that tell whether it works."""
MIN_CPU_SHARE, MIN_MOVED_BYTES = 0.10, 1 << 20
"""A rank works that took that share of a processor, or waited to be given one, or moved so many bytes in that time."""
RUNNING = {"R", "S"}
"""The kernel's letters of a process that nothing keeps from running."""
MIN_LOOKS = 3
"""Looks that tell whether a rank works, though they are further apart than the window is long: a machine has little time for us."""
FEW_LOOKS, MIN_PLACES_IN_FEW_LOOKS, MIN_PLACES = 8, 3, 5
"""Or that stood at so many places, in few looks or in more."""
MAX_PARSED_BYTES = 1 << 20
POLLS = {"poll", "is_alive", "is_running", "exitcode", "returncode", "waitpid", "pid_exists"}
"""What asks whether a process still runs: of subprocess, multiprocessing, psutil and os."""
MAX_PAUSE_DELAY_SECONDS = 5.0
"""Seconds by which a pause took longer than asked for, after which this process itself was not let run: nothing may be concluded
from that time."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was seen of a rank at one time. ``thread``: the kernel's number of the thread that trains; ``main``: seconds that it
    ran or waited for a processor; ``wakes``: how often it has woken, None where the kernel does not show it; ``line``: the
    user's own line in which it stands, ``pauses``: whether that line itself is what it sleeps in."""

    clock: float
    stack: int
    cpu: float
    main: float
    bytes: int
    thread: int = 0
    wakes: int | None = None
    line: tuple[str, int] | None = None
    pauses: bool = False


@dataclass(frozen=True, kw_only=True)
class ChildrenMoment:
    """What the processes below a rank had taken, and read and written, at one time, and how many of them lived that do not only
    serve the rank itself."""

    clock: float
    cpu: float
    bytes: int
    living: int = 0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's training thread stands, of its sample what is read once a second."""

    thread: int = 0
    threads: tuple[ThreadStack, ...] = ()
    loader_workers: tuple[int, ...] = ()


T = TypeVar("T")
Look = TypeVar("Look", Moment, ChildrenMoment)


class LocalRank:
    """A rank by its ring file, whose name holds its number and its process. Raises OSError or ValueError for what is none."""

    def __init__(self, path: Path, host: str, sources: Sources | None = None) -> None:
        found = RING_NAME.fullmatch(path.name)
        if found is None:
            raise ValueError(path.name)
        self.rank, self.pid, self.host, self.path = int(found[1]), int(found[2]), host, path
        self.moved = self.first = time.monotonic()
        self.window = float(MAX_WINDOW_SECONDS)
        self.beat: Heartbeat | None = None
        self.facts = processes.facts_of(self.pid)
        self.ended = "" if self.facts else "it had exited before the first sample"
        self.ended_at = 0.0
        self._started = self.facts.started if self.facts else 0
        self._place = Place()
        self.sources = sources or Sources()
        self._reader = RingReader(path)
        self._moments: deque[Moment] = deque(maxlen=MAX_WINDOW_SECONDS)
        self._children: deque[ChildrenMoment] = deque(maxlen=MAX_WINDOW_SECONDS)

    @property
    def owner(self) -> int:
        """The user who writes its ring."""
        return self._reader.owner

    @property
    def alive(self) -> bool:
        """Whether its process runs, or could."""
        return not self.ended

    def look(self) -> None:
        """Look again, once a second."""
        now = time.monotonic()
        if self.alive:
            self._look_at_process()
            self.ended_at = time.monotonic() if self.ended else 0.0
        beat = self._reader.beat()
        if beat is None:
            return
        if self.beat is None or beat.progress != self.beat.progress or (beat.flags ^ self.beat.flags) & LEAVING:
            self.moved = now
        self.beat = beat
        if self.facts is not None:
            self._moments.append(self._moment(now, beat.stack, self.facts.cpu))

    def _moment(self, clock: float, stack: int, cpu: float) -> Moment:
        """What is seen of it now, of the thread that trains as its newest sample says."""
        payload = self._reader.payload()
        self._place = (decoded(payload, Place) if payload else None) or self._place
        frames, thread = main_of(self._place.threads), self._place.thread or self.pid
        own = own_frame(frames, only=True)
        return Moment(
            clock=clock,
            stack=stack,
            cpu=cpu,
            main=processes.wanted_cpu(self.pid, thread),
            bytes=processes.moved_bytes(self.pid),
            thread=thread,
            wakes=processes.wakes_of(self.pid, thread),
            line=(own.file, own.line) if own else None,
            pauses=pauses(frames),
        )

    def look_at_children(self, parents: dict[int, int]) -> None:
        """Note what the processes below this one have taken: asked for only when nothing moves."""
        cpu, moved, living = processes.work_of_children(self.pid, parents, self._place.loader_workers)
        self._children.append(ChildrenMoment(clock=time.monotonic(), cpu=cpu, bytes=moved, living=living))

    def view(self, *, with_lines: bool = True) -> RankView:
        """The rank as it is now. ``with_lines``: with the source lines of its stacks."""
        payload = self._reader.payload()
        read = decoded(payload, Sample) if payload else None
        sample = self._with_source(read) if read and with_lines else read
        state = self.facts.state if self.facts and self.alive else ""
        thread = sample.thread if sample else 0
        if state in RUNNING and thread and processes.is_in_disk_sleep(self.pid, thread):
            state = "D"
        silent = max(0.0, time.monotonic() - self.beat.clock) if self.beat and self.alive else 0.0
        view = RankView(
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            sample=sample,
            state=state,
            ended=self.ended,
            ended_at=self.ended_at,
            silent=silent,
            age=silent,
            unread=NOT_LOOKED if sample and self._is_unlooked(sample, state, silent) else "",
            waits=processes.waits_in(self.pid, thread) if self.alive else "",
            unserved=bool(self.alive and sample and processes.is_unserved(self.pid, sample.rendezvous)),
        )
        view = with_call(view) if self.alive else view
        children = self._children[-1].living if self._children and self.alive else 0
        # as for source lines: of another user's rank no file is read
        may_read = children and with_lines and self._reader.owner == os.geteuid()
        since_moved = [look for look in self._moments if look.clock > self.moved]
        return replace(
            view,
            activity=self.activity(view),
            wakes=count_returns(since_moved) if self.alive else 0,
            children=children,
            polls=polling_loop(acting_stack(view), self.sources) if may_read else "",
            lock=lock_of(view),
        )

    def _is_unlooked(self, sample: Sample, state: str, silent: float) -> bool:
        """Whether its watch alone does not look any more: neither is the whole process kept from running, nor does C code hold the
        interpreter."""
        may_run = state in RUNNING and not self.leaving and sample.watcher != 0
        return silent >= MAX_SAMPLE_AGE and may_run and not processes.waits_for_interpreter(self.pid, sample.watcher)

    def world(self) -> int:
        """How many ranks the run has, as this one says; 0 before its first sample."""
        payload = self._reader.payload()
        sample = decoded(payload, Sample) if payload else None
        return sample.world if sample else 0

    def arrivals(self) -> RankArrivals | None:
        """When it called its last collectives, where its newest sample tells that, with the source lines of its stacks."""
        if self.beat is None or not self.beat.flags & ARRIVALS:
            return None
        payload = self._reader.payload()
        sample = decoded(payload, Sample) if payload else None
        return with_arrivals(sample.arrivals, self.sources) if sample and sample.arrivals else None

    def activity(self, view: RankView) -> str:
        """Why a rank is not still, in words; "" where it is."""
        since = time.monotonic() - min(max(self.window, MIN_WINDOW_SECONDS), MAX_WINDOW_SECONDS)
        moments = latest(self._moments, since, self.moved)
        if len(moments) < 2 or not self.alive:
            return ""
        first, last = moments[0], moments[-1]
        seconds = max(last.clock - first.clock, 1.0)
        places = len({moment.stack for moment in moments})
        enough = MIN_PLACES_IN_FEW_LOOKS if len(moments) < FEW_LOOKS else MIN_PLACES
        words = [f"it was at {places} places in {seconds:.0f} s"] if places >= enough else []
        of_thread = last.main - first.main if first.thread == last.thread else 0.0
        share = max(last.cpu - first.cpu, of_thread) / seconds
        # a thread that waits for a GPU may burn its processor
        if share >= MIN_CPU_SHARE and not (view.sample and view.sample.cuda and not words):
            words.append(f"it used or waited for {share:.0%} of a processor")
        # its own ring is a few kilobytes a second
        if (moved := last.bytes - first.bytes) >= MIN_MOVED_BYTES + seconds * 16_384:
            words.append(f"it read or wrote {moved >> 20} MiB")
        words += children_words(latest(self._children, since, self.moved))
        return ", ".join(words)

    @property
    def seen_enough(self) -> bool:
        """Whether it was looked at often enough since it moved to tell that it is still."""
        counts = [sum(look.clock > self.moved for look in looks) for looks in (self._moments, self._children)]
        return self.beat is None or min(counts) > 1

    @property
    def leaving(self) -> bool:
        """Whether its interpreter has begun to end: nothing of ours runs in it any more."""
        return self.beat is not None and bool(self.beat.flags & LEAVING)

    @property
    def unwatched(self) -> bool:
        """Whether its script has asked for the watch, and does not do so any more."""
        return self.beat is not None and bool(self.beat.flags & UNWATCHED)

    @property
    def joined(self) -> bool:
        """Whether its process group is there."""
        return self.beat is not None and bool(self.beat.flags & JOINED)

    @property
    def stacks(self) -> Path:
        """The file into which Python's fault handler writes all stacks at SIGUSR2."""
        return self.path.with_suffix(".stacks")

    @property
    def words(self) -> Path:
        """The file whose text this rank prints into its own stderr."""
        return self.path.with_suffix(".words")

    def with_texts(self, view: RankView) -> RankView:
        """The view with the source lines of its stacks."""
        return replace(view, sample=self._with_source(view.sample)) if view.sample else view

    def _with_source(self, sample: Sample) -> Sample:
        """What a rank of another user names as its source may be any file: none is read for it."""
        return with_source(sample, self.sources) if is_this_user(self._reader.owner) else sample

    def close(self) -> None:
        """Give the ring back."""
        self._reader.close()

    def _look_at_process(self) -> None:
        facts = processes.facts_of(self.pid)
        if facts is None or (self._started and facts.started != self._started):
            self.ended = "it ran to its end" if self.leaving else "its end was not observed"
        elif facts.state in {"Z", "X"}:
            self.ended, self.facts = processes.ending_words(facts), facts
        else:
            self.facts = facts


def count_returns(looks: Iterable[Moment]) -> int:
    """How often a thread came back to the user's own code: it woke from a sleep in a line of it, or stood at another line.

    Within a wait of a library it may wake for ever, to look whether its worker still lives.

    >>> at = lambda wakes, **more: Moment(clock=0.0, stack=1, cpu=0.0, main=0.0, bytes=0, wakes=wakes, **more)
    >>> count_returns([at(1, pauses=True), at(5, pauses=True), at(90, pauses=True, thread=7)])
    4
    >>> count_returns([at(1, line=("t.py", 3)), at(90, line=("t.py", 3)), at(91, line=("t.py", 4))])
    1
    """
    count = 0
    for earlier, later in pairwise(looks):
        # another thread has a count of its own
        if earlier.thread != later.thread:
            continue
        if later.pauses and earlier.wakes is not None and later.wakes is not None:
            count += max(0, later.wakes - earlier.wakes)
        else:
            count += earlier.line != later.line
    return count


def latest(looks: Iterable[Look], since: float, moved: float) -> list[Look]:
    """The looks of a time; where those are few the last ones since the rank moved.

    >>> looks = [ChildrenMoment(clock=clock, cpu=0.0, bytes=0) for clock in (1.0, 5.0, 9.0, 13.0)]
    >>> [[look.clock for look in latest(looks, since, 4.0)] for since in (4.5, 10.0)]
    [[5.0, 9.0, 13.0], [5.0, 9.0, 13.0]]
    """
    known = [look for look in looks if look.clock > moved]
    recent = [look for look in known if look.clock > since]
    return recent if len(recent) >= MIN_LOOKS else known[-MIN_LOOKS:]


def children_words(moments: list[ChildrenMoment]) -> list[str]:
    """How the processes below a rank are seen to work; none where they are not.

    >>> at = lambda clock, cpu, bytes: ChildrenMoment(clock=clock, cpu=cpu, bytes=bytes)
    >>> children_words([at(0.0, 1.0, 0), at(10.0, 6.0, 9 << 20)])
    ['its child processes used or waited for 50% of a processor', 'its child processes read or wrote 9 MiB']
    >>> children_words([at(0.0, 1.0, 0), at(10.0, 1.0, 9000)])
    []
    >>> children_words([at(0.0, 6.0, 0), at(5.0, 0.0, 0), at(10.0, 2.0, 0)])
    ['its child processes used or waited for 20% of a processor']
    """
    if len(moments) < 2:
        return []
    first, last = moments[0], moments[-1]
    seconds = max(last.clock - first.clock, 1.0)
    # what a process had taken goes with it when it ends, and another one begins
    pairs = tuple(pairwise(moments))
    share = sum(max(0.0, later.cpu - earlier.cpu) for earlier, later in pairs) / seconds
    moved = sum(max(0, later.bytes - earlier.bytes) for earlier, later in pairs)
    words = [f"its child processes used or waited for {share:.0%} of a processor"] if share >= MIN_CPU_SHARE else []
    return words + ([f"its child processes read or wrote {moved >> 20} MiB"] if moved >= MIN_MOVED_BYTES else [])


def with_call(view: RankView) -> RankView:
    """The view with what its process asks of the kernel, as itself says it, else as that is seen from here."""
    own = view.sample.call if view.sample else ()
    call = own if any(own) else file_call(view.pid, view.sample.thread if view.sample else 0)
    # a path that is still being opened may go over links
    known = len(call) > 1 and is_of_open_file(call[0]) and call[1].startswith("/") and view.state == "D"
    return replace(view, call=call if any(call) else (), disk=file_system_of(view.pid, call[1]) if known else "")


def lock_of(view: RankView) -> Lock | None:
    """The lock of a torch extension that a rank waits for, and who on this host holds it."""
    path = view.sample.lock if view.sample else ""
    holder = holder_of(path) if path else None
    try:
        age = time.time() - os.stat(path).st_mtime if holder else 0.0  # noqa: PTH116
    except OSError:
        return None
    return Lock(path=path, holder=holder, age=max(0.0, age)) if holder else None


def decoded(payload: bytes, kind: type[T]) -> T | None:
    """What a rank has written of itself; None for what cannot be read."""
    try:
        return decode(payload, kind)
    except msgspec.DecodeError:
        return None


def with_arrivals(arrivals: RankArrivals, sources: Sources) -> RankArrivals:
    """The arrivals with the source lines of the user's own frames."""
    stacks = (replace(seen, frames=_own_with_line(seen.frames, sources)) for seen in arrivals.stacks)
    return replace(arrivals, stacks=tuple(stacks))


def polling_loop(frames: Sequence[Frame], sources: Sources) -> str:
    """The first line of the loop in which a stack goes round, where that asks whether a process still runs; "" where it does not.

    It is the innermost loop around the innermost line of the user's own that stands in one.
    """
    for frame in filter(is_own, reversed(frames)):
        text = sources.text(frame.file, MAX_PARSED_BYTES)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ""
        loops = [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.While, ast.For)) and node.lineno <= frame.line <= (node.end_lineno or 0)
        ]
        if loops:
            loop = max(loops, key=lambda node: (node.lineno, node.col_offset))
            named = {node.attr for node in ast.walk(loop) if isinstance(node, ast.Attribute)}
            named |= {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
            return sources.line(frame.file, loop.lineno) if named & POLLS else ""
    return ""


def with_source(sample: Sample, sources: Sources) -> Sample:
    """The sample with the source lines of the frames that are told of."""
    wanted = {(frame.file, frame.line) for thread in sample.threads for frame in thread.frames[-8:]}
    wanted |= {(own.file, own.line) for thread in sample.threads if (own := own_frame(thread.frames))}
    texts = {(file, line): sources.line(file, line) for file, line in wanted}
    return replace(
        sample,
        threads=with_texts(sample.threads, texts),
        groups=tuple(_calls_with_lines(group, sources) for group in sample.groups),
        failed_in=_own_with_line(sample.failed_in, sources),
        deaths=tuple(replace(death, frames=_own_with_line(death.frames, sources)) for death in sample.deaths),
    )


def _calls_with_lines(group: GroupState, sources: Sources) -> GroupState:
    past = group.history
    known = replace(past, kinds=tuple(_call_with_line(kind, sources) for kind in past.kinds)) if past else None
    calls = tuple(_call_with_line(operation, sources) for operation in group.operations)
    return replace(group, operations=calls, history=known)


def _call_with_line(operation: Operation, sources: Sources) -> Operation:
    return replace(operation, place=_own_with_line(operation.place, sources)) if operation.place else operation


def _own_with_line(frames: tuple[Frame, ...], sources: Sources) -> tuple[Frame, ...]:
    """Frames with the source line of the innermost one that is the user's own."""
    own = own_frame(frames)
    text = sources.line(own.file, own.line) if own else ""
    return tuple(replace(frame, text=text) if frame == own else frame for frame in frames)


class Node:
    """The ranks whose rings lie in a folder."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.ranks: dict[int, LocalRank] = {}
        self._sources = Sources()

    def look(self) -> None:
        """Look at every rank, and for new ones."""
        self._find()
        for rank in self.ranks.values():
            rank.look()
        if self.unwatched:
            self._moved_now()

    @property
    def unwatched(self) -> bool:
        """Whether no rank asks for the watch just now, as between two parts of a script that do."""
        return bool(self.ranks) and all(rank.unwatched for rank in self.ranks.values())

    def note_pause(self, wanted: float, took: float) -> None:
        """This process wanted a pause of so many seconds, and it took so many. What it does between two pauses says nothing
        of the ranks."""
        if took - wanted > MAX_PAUSE_DELAY_SECONDS:
            self._moved_now()

    def _moved_now(self) -> None:
        now = time.monotonic()
        for rank in self.ranks.values():
            rank.moved = now

    def look_at_children(self) -> None:
        """Look at what the ranks' child processes take."""
        parents = processes.all_parents()
        for rank in self.living():
            rank.look_at_children(parents)

    def seen_enough(self) -> bool:
        """Whether all living ranks were looked at often enough to tell which of them are still."""
        return all(rank.seen_enough for rank in self.living())

    def living(self) -> list[LocalRank]:
        """The ranks whose process has not ended."""
        return [rank for rank in self.ranks.values() if rank.alive]

    def still(self) -> float:
        """Seconds since any rank moved."""
        now = time.monotonic()
        return now - max((rank.moved for rank in self.ranks.values()), default=now)

    def views(self, *, with_lines: bool = True) -> tuple[RankView, ...]:
        """All ranks of this node, those that ended too. ``with_lines``: with the source lines of their stacks."""
        return tuple(self.ranks[number].view(with_lines=with_lines) for number in sorted(self.ranks))

    def world(self) -> int:
        """How many ranks the run has, as its ranks say; 0 while none has said anything."""
        return max((rank.world() for rank in self.ranks.values()), default=0)

    def remove(self) -> None:
        """Take the rings away: the run is over on this node."""
        for rank in self.ranks.values():
            rank.close()
        for name in os.listdir(self.folder):  # noqa: PTH208
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rmdir()

    def _find(self) -> None:
        for name in os.listdir(self.folder):  # noqa: PTH208
            found = RING_NAME.fullmatch(name)
            if found is None:
                continue
            known = self.ranks.get(int(found[1]))
            if known is not None and known.pid == int(found[2]):
                continue
            try:
                new = LocalRank(self.folder / name, self.host, self._sources)
            except (OSError, ValueError):
                continue
            if known is None or (new.alive and not known.alive) or (new.alive and new.first > known.first):
                self.ranks[new.rank] = new
