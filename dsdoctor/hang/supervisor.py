"""The supervisor of a node: a small process beside the ranks, without torch. Looks once a second, and tells when nothing moves.

There is one a node: the process that has the lock of the run's folder there. It ends when the last rank of the node has ended.
"""

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.files import PRIVATE, write_bytes
from dsdoctor.core.finding import Finding
from dsdoctor.hang.channel import Listener, NodeReport, send_report
from dsdoctor.hang.comparison import Comparison
from dsdoctor.hang.fault_dump import asked_for
from dsdoctor.hang.local_rank import NAME, LocalRank
from dsdoctor.hang.models import HangOptions, Incident, RankView
from dsdoctor.hang.node import Node
from dsdoctor.hang.processes import facts_of
from dsdoctor.hang.progress import Pace
from dsdoctor.hang.run_identity import RunIdentity

WORKS, HANGS = "works", "hangs"
EVERY = 1.0
FIRST_RANK = 30.0
"""Seconds after which a supervisor without a rank ends."""
KILLED, ASKED_TO_END = "killed by", ("SIGTERM", "SIGINT", "SIGHUP")
"""Launchers end the ranks that are left by these signals."""
PEER = re.compile(r"(closed|reset) by peer|Broken pipe|remote (process|worker)", re.IGNORECASE)
"""What libraries say when another rank is gone."""
TOGETHER, OLD = 4.0, 30.0
"""Seconds to wait for the other nodes' reports, and after which one is of the past."""
LAST_WORDS = 6.0
"""Seconds that ranks have to end by themselves when all are to stop."""
OLD_FOLDER = 120.0
"""Seconds after which a folder without a living rank is left over: a younger one may have its first rank in a moment."""
AGAIN = 5.0
"""Seconds between two looks at a run whose late rank is seen to work."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a supervisor is started with. ``tell`` prints and writes what was found, ``write`` only writes, ``mention`` only
    prints. ``judge`` says of an incident HANGS, WORKS where what the others wait for is seen to work, "" where there is
    nothing to say."""

    folder: Path
    options: HangOptions
    run: RunIdentity
    host: str
    tell: Callable[[Incident, Node], None]
    write: Callable[[Incident], object]
    mention: Callable[[Finding | str, Node], None]
    judge: Callable[[Incident], str]


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
                found = [NAME.fullmatch(path.name) for path in folder.iterdir()]
                old = time.time() - folder.stat().st_mtime > OLD_FOLDER
                if old and not any(name and facts_of(int(name[2])) for name in found):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class Supervisor:
    """One node's watch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.node = Node(task.folder, task.host)
        self.pace = Pace(after=task.options.after)
        self._still = 0.0
        self._told = self._written = False
        self._world = 0
        self._look_again = 0.0
        self._timeout: float | None = None
        self._dumps: dict[int, int] = {}
        self._dead = False
        self._comparison = Comparison()
        self._listener: Listener | None = None
        self._reports: dict[str, tuple[float, NodeReport]] = {}

    def run(self) -> None:
        """Look until the last rank has ended."""
        began = time.monotonic()
        while True:
            self.node.look()
            self._tell_of_an_end()
            if not self.node.living() and (self.node.ranks or time.monotonic() - began > FIRST_RANK):
                break
            self.decide()
            if (finding := self._comparison.look(self.node)) is not None:
                self.task.mention(finding, self.node)
            wait_for_an_end(self.node.living(), EVERY)
            self._take_reports()
        if summary := self._comparison.summary():
            self.task.mention(summary, self.node)
        self.node.remove()
        if self._listener is not None:
            self._listener.close()

    def decide(self) -> None:
        """Tell what is to be told now."""
        still = self.node.still()
        if still < self._still:
            self.pace.note(self._still, was_told=self._told)
            self._told, self._look_again, self._written = False, 0.0, False
        self._still = still
        if self.was_asked():
            self.task.tell(self.incident(asked=True), self.node)
            return
        limit = self.pace.limit(self._timeout)
        if still >= limit / 3:
            self.node.look_at_children()
        if self._told or still < limit or time.monotonic() < self._look_again:
            return
        incident = self.incident()
        if self._leads or len(incident.ranks) == incident.world:
            incident = self._with_other_nodes(incident)
        elif self._handed_over(incident):
            self._look_again = time.monotonic() + min(AGAIN, limit / 3)
            return
        if self._slow(incident, still):
            self._look_again = time.monotonic() + min(AGAIN, limit / 3)
            return
        self._told = True
        self.task.tell(incident, self.node)
        if self.task.options.on_hang == "stop":
            self._stop()

    def _stop(self) -> None:
        """End every rank of this node: by an exception where Python runs, else by a signal. The launchers of other nodes
        then end theirs."""
        for rank in self.node.living():
            with contextlib.suppress(OSError):
                write_bytes(Path(f"{rank.words}.stop"), b"", mode=PRIVATE)
        last = time.monotonic() + LAST_WORDS
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

    def _take_reports(self) -> None:
        """On rank 0's host: take what the other nodes have sent since the last look."""
        self._world = self._world or self.node.world()
        if not self._leads or len(self.node.ranks) >= self._world:
            return
        self._listener = self._listener or Listener(self.task.run)
        for report in self._listener.reports(0.0):
            self._reports[report.host] = (time.monotonic(), report)

    def _with_other_nodes(self, incident: Incident) -> Incident:
        """The incident with what the other nodes say, which is waited for a little: they notice it in the same seconds."""
        last = time.monotonic() + TOGETHER
        views = incident.ranks
        while self._listener is not None and len(views) < incident.world and time.monotonic() < last:
            for report in self._listener.reports(EVERY, enough=incident.world - len(views)):
                self._reports[report.host] = (time.monotonic(), report)
            fresh = [report for when, report in self._reports.values() if time.monotonic() - when < OLD]
            own = {view.rank for view in incident.ranks}
            views = (*incident.ranks, *(view for each in fresh for view in each.views if view.rank not in own))
        return replace(incident, ranks=tuple(sorted(views, key=lambda view: view.rank)))

    def _handed_over(self, incident: Incident) -> bool:
        """Whether rank 0's host took what this node saw; this node's files are written in any case."""
        report = NodeReport(host=self.task.host, still=incident.still, views=incident.ranks)
        if not send_report(self.task.run, report):
            return False
        if not self._written:
            self._written = True
            self.task.write(incident)
        return True

    def _tell_of_an_end(self) -> None:
        """Tell of a rank that ended first and drew the others along: their errors come later, and name another cause."""
        ended = [rank for rank in self.node.ranks.values() if not rank.alive]
        if not ended or self._dead or self._told:
            return
        first = [rank for rank in ended if not missed_another(rank)]
        killed = [rank for rank in first if rank.ended.startswith(KILLED) and not rank.ended.endswith(ASKED_TO_END)]
        drew_along = len(first) == 1 < len(ended) and not own_failure(first[0])
        if (killed and killed == first) or drew_along:
            self._dead = self._told = True
            self.task.tell(replace(self.incident(), first_ended=tuple(rank.rank for rank in first)), self.node)

    def _slow(self, incident: Incident, still: float) -> bool:
        """Whether there is nothing to tell, or what others wait for works, and torch's own timeout is far."""
        timeouts = [group.timeout for view in incident.ranks if view.sample for group in view.sample.groups]
        self._timeout = min((seconds for seconds in timeouts if seconds), default=None)
        state = self.task.judge(incident)
        return not state or (state == WORKS and still < self.pace.limit_of_work(self._timeout))

    def incident(self, *, asked: bool = False) -> Incident:
        """The run as it is now; a rank that writes nothing about itself is made to write its stacks."""
        for rank in self.node.ranks.values():
            rank.window = self.pace.limit(self._timeout) / 2
        views = tuple(self._with_dump(view) for view in self.node.views())
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

    def _with_dump(self, view: RankView) -> RankView:
        rank, sample = self.node.ranks[view.rank], view.sample
        if sample is None or view.silent < 3 * EVERY or view.state in {"", "Z", "T", "t"}:
            return view
        # at its end an interpreter takes the handler away, and the signal would end it with another status
        if rank.leaving or not sample.signal_is_ours:
            return view
        stacks = asked_for(view.pid, rank.stacks)
        self._dumps[view.pid] = _size(rank.stacks)
        return rank.with_texts(replace(view, sample=replace(sample, threads=stacks))) if stacks else view


def own_failure(rank: LocalRank) -> str:
    """The exception that ended a rank, "" for none."""
    sample = rank.view().sample
    return sample.failure if sample else ""


def missed_another(rank: LocalRank) -> bool:
    """Whether a rank failed because another one was not there any more."""
    return PEER.search(own_failure(rank)) is not None


def wait_for_an_end(ranks: list[LocalRank], seconds: float) -> None:
    """Wait, but wake when a rank ends: its exit status is shown only until its launcher has asked for it."""
    poll = select.poll()
    handles = [handle for rank in ranks if (handle := _process_handle(rank.pid)) is not None]
    for handle in handles:
        poll.register(handle, select.POLLIN)
    poll.poll(seconds * 1000)
    for handle in handles:
        os.close(handle)


def _process_handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
