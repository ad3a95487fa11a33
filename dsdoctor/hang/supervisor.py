"""The supervisor of a node: a small process beside the ranks, without torch. Looks once a second, and tells when nothing moves.

There is one a node: the process that has the lock of the run's folder there. It ends when the last rank of the node has ended.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.core.files import PRIVATE, write_bytes
from dsdoctor.core.finding import Finding
from dsdoctor.hang.channel import Answer, NodeReport, Nodes, RunIdentity, node_id
from dsdoctor.hang.incident_view import MAX_TIMEOUT_SHARE, first_to_exit, hung_after
from dsdoctor.hang.local_rank import RING_NAME, LocalRank, Node
from dsdoctor.hang.models import HangOptions, Incident, RankView
from dsdoctor.hang.outside import requested_stacks, waits_for_loader, workers_of
from dsdoctor.hang.processes import facts_of
from dsdoctor.hang.straggler import Comparison
from dsdoctor.ranks.nodelist import ranks_in_words

MIN_THRESHOLD_SECONDS, PAUSE_FACTOR = 60.0, 10.0
SURVIVED_FACTOR = 2.0
WORKS, LATE, HANGS = "works", "late", "hangs"
LOOK_SECONDS, QUICK_LOOK_SECONDS = 1.0, 0.2
FIRST_RANK_TIMEOUT_SECONDS = 30.0
"""Seconds after which a supervisor without a rank ends."""
FOLLOW_SECONDS = 2.0
"""Seconds that the other ranks have to notice the end of one."""
STOP_TIMEOUT_SECONDS = 6.0
"""Seconds that ranks have to end by themselves when all are to stop."""
MIN_LEFT_OVER_SECONDS = 120.0
"""Seconds after which a folder without a living rank is left over: a younger one may have its first rank in a moment."""
RETRY_SECONDS = 5.0
"""Seconds between two looks at a run whose late rank is seen to work."""


@dataclass
class StallThreshold:
    """How long this run stands still between two movements, as learned. ``after``: what the user asked for instead."""

    after: float | None = None
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    survived: float = 0.0

    def note(self, pause: float, *, was_reported: bool) -> None:
        """A pause has ended by itself. ``was_reported``: it had been called a hang."""
        self.pauses.append(pause)
        if was_reported or self.after is None:
            self.survived = max(self.survived, pause)

    def limit(self, timeout: float | None = None) -> float:
        """Seconds without movement after which the run is looked at.

        >>> pace = StallThreshold()
        >>> for _ in range(9): pace.note(12.0, was_reported=False)
        >>> pace.limit(), pace.limit(timeout=100.0), StallThreshold(after=6.0).limit()
        (120.0, 60.0, 6.0)
        """
        if self.after is not None:
            return max(self.after, SURVIVED_FACTOR * self.survived)
        typical = statistics.median(self.pauses) if self.pauses else 0.0
        learned = max(MIN_THRESHOLD_SECONDS, PAUSE_FACTOR * typical, SURVIVED_FACTOR * self.survived)
        return learned if timeout is None else min(learned, max(MAX_TIMEOUT_SHARE * timeout, 1.0))

    def limit_of_work(self, timeout: float | None) -> float:
        """Seconds after which even a rank that is seen to work is told of, because torch's own timeout comes near."""
        return hung_after(self.limit(timeout), timeout)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is said of an incident: HANGS, LATE where what the others wait for may still come, WORKS where it is seen to work, ""
    where there is nothing to say. ``late``: the ranks that are."""

    state: str
    late: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a supervisor is started with. ``tell`` prints and writes what was found, ``write`` only writes, ``mention`` only
    prints."""

    folder: Path
    options: HangOptions
    run: RunIdentity
    host: str
    tell: Callable[[Incident, Node], None]
    write: Callable[[Incident], object]
    mention: Callable[[Finding | str, Node], None]
    judge: Callable[[Incident], Judgement]


def supervise(task: Task) -> None:
    """Watch this node's ranks to their end; returns at once where another process does."""
    lock = os.open(task.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    sweep(task.folder.parent)
    Supervisor(task).run()


def sweep(outer: Path) -> None:
    """Remove what runs have left behind whose supervisors were killed: nobody holds the lock, and no rank lives."""
    for folder in filter(Path.is_dir, outer.iterdir()):
        with contextlib.suppress(OSError):
            lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = [RING_NAME.fullmatch(path.name) for path in folder.iterdir()]
                old = time.time() - folder.stat().st_mtime > MIN_LEFT_OVER_SECONDS
                if old and not any(name and facts_of(int(name[2])) for name in found):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class Supervisor:
    """One node's watch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.node = Node(task.folder, task.host)
        self.pace = StallThreshold(after=task.options.after)
        self._still = 0.0
        self._told = self._warned = self._written = False
        self._late: tuple[int, ...] = ()
        self._world = 0
        self._look_again = 0.0
        self._timeout: float | None = None
        self._dumps: dict[int, int] = {}
        self._dead = False
        self._comparison = Comparison()
        self.nodes = Nodes(task.run, task.host, node_id(task.folder), task.folder)

    def run(self) -> None:
        """Look until the last rank has ended."""
        began = time.monotonic()
        while True:
            self.node.look()
            self._tell_of_an_end()
            if not self.node.living() and (self.node.ranks or time.monotonic() - began > FIRST_RANK_TIMEOUT_SECONDS):
                break
            self.decide()
            if (finding := self._comparison.look(self.node)) is not None:
                self.task.mention(finding, self.node)
            self._wait()
            self._keep_in_touch()
        if summary := self._comparison.summary():
            self.task.mention(summary, self.node)
        self.node.remove()
        self.nodes.close()

    def _wait(self) -> None:
        """Until the next look: sooner shortly before the time is over, for all nodes are to tell of it together."""
        near = not self._told and abs(self._still + LOOK_SECONDS / 2 - self.pace.limit(self._timeout)) <= LOOK_SECONDS
        seconds, began = QUICK_LOOK_SECONDS if near else LOOK_SECONDS, time.monotonic()
        wait_for_an_end(self.node.living(), seconds)
        self.node.note_pause(seconds, time.monotonic() - began)

    def decide(self) -> None:
        """Tell what is to be told now."""
        still = self.node.still()
        if still < self._still:
            self.pace.note(self._still, was_reported=self._told or bool(self._late))
            if self._warned and not self._dead and (self._leads or self._alone):
                limit = self.pace.limit(self._timeout)
                # no more is known: torch's timeout may just have raised in a rank that did hang
                late = f" ({ranks_in_words(self._late)} had been late)" if self._late else ""
                goes_on = f"progress again after {self._still:.0f} s{late}; the limit is now {limit:.0f} s"
                self.task.mention(goes_on, self.node)
            self._told = self._warned = self._written = False
            self._late = ()
            self._look_again = 0.0
        self._still = still
        if self.was_asked():
            self.task.tell(self.incident(asked=True), self.node)
            return
        limit = self.pace.limit(self._timeout)
        if still >= limit / 3:
            self.node.look_at_children()
        if self._told or still < limit or time.monotonic() < self._look_again or not self.node.seen_enough():
            return
        incident = self._of_all_nodes(self.incident(), still, limit)
        state = "" if incident is None else self._state(incident, still)
        if incident is None or not state:
            self._look_again = time.monotonic() + min(RETRY_SECONDS, limit / 3)
            return
        # what worked or was late when it was told of may hang later on
        self._told, self._warned = state == HANGS, True
        self.task.tell(incident, self.node)
        # a rank that works, or may, or may still come is not ended for being slow
        if self._told and self.task.options.on_hang == "stop":
            if self._leads:
                self.nodes.tell_all(self._answer, 2 * RETRY_SECONDS, still_waiting=lambda: bool(self.node.living()))
            self._stop()

    def _stop(self) -> None:
        """End every rank of this node: by an exception where Python runs, else by a signal. The launchers of other nodes
        then end theirs."""
        for rank in self.node.living():
            with contextlib.suppress(OSError):
                write_bytes(Path(f"{rank.words}.stop"), b"", mode=PRIVATE)
        last = time.monotonic() + STOP_TIMEOUT_SECONDS
        while self.node.living() and time.monotonic() < last:
            wait_for_an_end(self.node.living(), 0.2)
            self.node.look()
        for rank in self.node.living():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)

    @property
    def _leads(self) -> bool:
        """Whether rank 0 is on this node: then the other nodes' supervisors report here."""
        return 0 in self.node.ranks

    @property
    def _alone(self) -> bool:
        """Whether all ranks of the run are on this node, as far as that is known."""
        self._world = self._world or self.node.world()
        return len(self.node.ranks) >= self._world

    @property
    def _answer(self) -> Answer:
        """What the other nodes are told by rank 0's."""
        stop = self._told and self.task.options.on_hang == "stop"
        return Answer(host=self.task.host, ranks=tuple(sorted(self.node.ranks)), told=self._told, stop=stop)

    def _keep_in_touch(self) -> None:
        """Between nodes: take what the others have sent, or tell rank 0's node that this one is there."""
        if self._alone:
            return
        if self._leads:
            self.nodes.take(self._answer)
        elif self.nodes.is_due(self.pace.limit(self._timeout)) and any(rank.joined for rank in self.node.living()):
            report = NodeReport(host="", still=self.node.still(), ranks=tuple(sorted(self.node.ranks)))
            self.nodes.send(report)

    def _of_all_nodes(self, incident: Incident, still: float, limit: float) -> Incident | None:
        """The incident as far as all nodes know; None where it is not for this one to tell, or not yet."""
        if self._alone:
            return incident
        if self._leads:
            joined = self.nodes.joined(incident, limit, self._answer)
            # a node that is there and does not call it a hang may move; but not for ever
            early = self.nodes.is_elsewhere_alive(joined) and still < self.pace.limit_of_work(self._timeout)
            return None if early else joined
        views = NodeReport(host="", still=incident.still, ranks=tuple(sorted(self.node.ranks)), views=incident.ranks)
        if not self.nodes.send(views):
            return self.nodes.without_leader(incident, limit)
        if not self._written:
            self._written = True
            self.task.write(incident)
        if (answer := self.nodes.answer) is not None:
            self._told = self._told or answer.told
            # what other nodes say ends nothing here that this one was not told to end
            if answer.stop and self.task.options.on_hang == "stop":
                self._stop()
        return None

    def _tell_of_an_end(self) -> None:
        """Tell of a rank that ended first and drew the others along: their errors come later, and name another cause."""
        if self._dead or self._told or self.node.unwatched or all(rank.alive for rank in self.node.ranks.values()):
            return
        first = first_to_exit(self.node.views(with_lines=False))
        lately = (
            max((self.node.ranks[rank].ended_at for rank in first), default=0.0) > time.monotonic() - FOLLOW_SECONDS
        )
        # those that follow say in a moment what they had called
        if first and not (lately and self.node.living()):
            self._dead = self._told = True
            self.task.tell(replace(self.incident(), first_ended=first), self.node)

    def _state(self, incident: Incident, still: float) -> str:
        """What is to be told of an incident; "" where that is nothing new, or what others wait for works and torch's own
        timeout is far."""
        timeouts = [group.timeout for view in incident.ranks if view.sample for group in view.sample.groups]
        self._timeout = min((seconds for seconds in timeouts if seconds), default=None)
        judgement = self.task.judge(incident)
        if judgement.state == WORKS and (self._warned or still < self.pace.limit_of_work(self._timeout)):
            return ""
        if judgement.state == LATE:
            if self._warned:
                return ""
            self._late = judgement.late
        return judgement.state

    def incident(self, *, asked: bool = False) -> Incident:
        """The run as it is now; a rank that writes nothing about itself is made to write its stacks."""
        for rank in self.node.ranks.values():
            rank.window = self.pace.limit(self._timeout) / 2
        views = tuple(self._with_workers(self._with_dump(view)) for view in self.node.views())
        self._world = max(self._world, self.node.world())
        return Incident(
            world=self._world,
            still=self.node.still(),
            after=self.pace.limit(self._timeout),
            ranks=views,
            asked=asked,
            when=time.time(),
            run=self.task.run.key,
        )

    def was_asked(self) -> bool:
        """Whether a rank was sent SIGUSR2 since the last look."""
        asked = False
        for rank in self.node.living():
            size = _size(rank.stacks)
            asked |= size > self._dumps.get(rank.pid, 0)
            self._dumps[rank.pid] = size
        return asked

    def _with_workers(self, view: RankView) -> RankView:
        if not view.state or not waits_for_loader(view):
            return view
        rank = self.node.ranks[view.rank]
        told = replace(view, workers=workers_of(view, rank.stacks, rank.sources))
        self._dumps[view.pid] = _size(rank.stacks)
        return told

    def _with_dump(self, view: RankView) -> RankView:
        rank, sample = self.node.ranks[view.rank], view.sample
        if sample is None or view.silent < 3 * LOOK_SECONDS or view.state in {"", "Z", "T", "t"}:
            return view
        # at its end an interpreter takes the handler away, and the signal would end it with another status
        # and the main thread, which writes its stack, may not be the one that trains
        if rank.leaving or not sample.signal_is_ours or sample.thread not in {0, view.pid}:
            return view
        stacks = requested_stacks(view.pid, rank.stacks)
        self._dumps[view.pid] = _size(rank.stacks)
        return (
            rank.with_texts(replace(view, sample=replace(sample, threads=stacks, all_threads=False), age=0.0))
            if stacks
            else view
        )


def wait_for_an_end(ranks: list[LocalRank], seconds: float) -> None:
    """Wait, but wake when a rank ends: its exit status is shown only until its launcher has asked for it."""
    poll = select.poll()
    handles = []
    for rank in ranks:
        # it has ended, or this kernel or Python has no handles of processes
        with contextlib.suppress(OSError, AttributeError):
            handles.append(os.pidfd_open(rank.pid))
            poll.register(handles[-1], select.POLLIN)
    poll.poll(seconds * 1000)
    for handle in handles:
        os.close(handle)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
