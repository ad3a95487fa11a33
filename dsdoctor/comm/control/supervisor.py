"""The supervisor is the first process of a rank: it starts the control process, reads its messages, and ends it at the deadline.

It uses no torch and no store, so it cannot hang. Where no verdict came from rank 0 it reports what it can see itself.
"""

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from dsdoctor.comm.control.agent import REACHING, control
from dsdoctor.comm.control.data_process import IMPORTING
from dsdoctor.comm.control.messages import StartInfo, Update
from dsdoctor.comm.launch.start import private_folder
from dsdoctor.comm.local.checks import too_little
from dsdoctor.comm.local.facts import look_local
from dsdoctor.comm.local.interfaces import bounded
from dsdoctor.comm.local.limits import limits_now, what_else, why_ended
from dsdoctor.comm.models import CommSettings, PhaseState, Rank
from dsdoctor.comm.rendezvous.notices import Notice, ask, send_notice
from dsdoctor.comm.rendezvous.store import Served, open_served
from dsdoctor.comm.results import ConnectOutcome, PhaseResult, Report
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.files import make_folder
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import end_session, ending_of, file_system_of, fork, state_of
from dsdoctor.rules import book

# A rank that got no verdict -> what happened to rank 0, or to its own control process. Judges, never looks.


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank that has no verdict: where its control process was last, how that ended, and how a connection to the master ended.
    ``cause``: the limit that ended it, where one is known to; ``perhaps``: what else may have.
    ``torch_on``: the folder of torch and its file system, asked where the import was not over."""

    rank: Rank
    host: str
    at: str
    seconds: float
    master: ConnectOutcome | None
    died: str | None
    stopped: bool = False
    log: str = ""
    cause: str = ""
    perhaps: str = ""
    tail: tuple[str, ...] = ()
    torch_on: str = ""

    @property
    def starting(self) -> bool:
        """Whether it was still importing torch when the time was up."""
        return self.died is None and not self.stopped and self.at == IMPORTING

    @property
    def because(self) -> str:
        """What is known of the cause, as the end of a sentence."""
        return f": {self.cause}" if self.cause else f"; {self.perhaps}" if self.perhaps else ""


def rank_zero_lost(lost: Lost) -> Iterator[Finding]:
    """A rank heard nothing more from rank 0."""
    if lost.rank.rank == 0 or lost.died is not None or lost.stopped or lost.starting or lost.master is None:
        return
    outcome, where = lost.master, f"{lost.rank.master}:{lost.rank.port}"
    yield book.finding(
        "rank-zero-lost",
        Severity.ERROR,
        case="refused"
        if outcome is ConnectOutcome.REFUSED
        else "silent"
        if outcome is ConnectOutcome.TIMED_OUT
        else "no-route"
        if outcome is ConnectOutcome.NO_ROUTE
        else "no-name"
        if outcome is ConnectOutcome.NO_NAME
        else "",
        evidence=(f"waited {lost.seconds:.0f} s in all",),
        rank=lost.rank.rank,
        host=lost.host,
        where=where,
        at=repr(lost.at),
        master=lost.rank.master,
    )


def import_slow(lost: Lost) -> Iterator[Finding]:
    """A rank was still importing torch when the time was up."""
    if lost.starting:
        yield book.finding(
            "import-slow",
            Severity.ERROR,
            evidence=(lost.torch_on,) if lost.torch_on else (),
            rank=lost.rank.rank,
            host=lost.host,
            at=lost.at,
            seconds=f"{lost.seconds:.0f}",
        )


def control_lost(lost: Lost) -> Iterator[Finding]:
    """The part of this rank that talks to the others ended or hung without a verdict."""
    if lost.starting or (lost.rank.rank != 0 and lost.died is None and not lost.stopped):
        return
    rank, host, at = lost.rank.rank, lost.host, repr(lost.at)
    if lost.died:
        yield book.finding(
            "control-lost",
            Severity.ERROR,
            case="died-limit" if lost.cause else "died-perhaps" if lost.perhaps else "died",
            evidence=lost.tail,
            rank=rank,
            host=host,
            ending=lost.died,
            at=at,
            limit=lost.cause,
            perhaps=lost.perhaps,
            log=lost.log,
        )
        return
    yield book.finding(
        "control-lost",
        Severity.ERROR,
        case="stopped" if lost.stopped else "limit" if lost.cause else "",
        evidence=lost.tail,
        rank=rank,
        host=host,
        seconds=f"{lost.seconds:.0f}",
        at=at,
        limit=lost.cause,
        log=lost.log,
    )


CHECKS = (rank_zero_lost, import_slow, control_lost)


LEADING, FOLLOWING = 0.5, 1.0
"""Seconds after the deadline at which a rank's supervisor reports by itself."""
SILENCE_SECONDS = 5.0
"""After so long without a word it is told what the test is in."""
AFTER_REPORT = 2.0
"""Seconds for the other ranks to read the last order."""
DYING = 0.3
BEFORE_ARRIVAL = ("starting", REACHING)
NOTICE = 20.0
"""Seconds in which rank 0 must be reached to be told, which may be starting itself."""
TAIL = 6
LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """The outcome of this rank. ``report``: rank 0 only; ``verdict``: what rank 0 told another rank. ``alone``: what this rank
    found by itself, instead of a report."""

    status: int
    report: Report | None = None
    verdict: str = ""
    alone: tuple[Finding, ...] = ()
    phases: tuple[PhaseResult, ...] = ()
    at: str = ""
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The functions that show results. ``found`` gets what was found as soon as it is known, ``progress`` what the test is in
    where that takes long. ``report`` is called, on rank 0, before the other ranks may end: a launcher may end this process as
    soon as one of them has left. ``broken_off`` gets where the test was when a signal ended it."""

    phase: Callable[[PhaseResult], None]
    found: Callable[[tuple[Finding, ...]], None]
    progress: Callable[[str], None]
    report: Callable[[Report], None]
    broken_off: Callable[[str], None]


def supervise(rank: Rank, settings: CommSettings, screen: Screen, *, began: float) -> Outcomes:
    """Run this rank's part to its end. Raises KeyboardInterrupt, and what ``screen`` raises, after everything was ended."""
    # a rank at its limit of open files could not read the book when it has something to say
    book.prepare("comm")
    local = look_local(LocalHost(), rank, settings.backend)
    with _folder(settings) as (folder, keep):
        briefing = StartInfo(rank=rank, settings=settings, local=local, folder=folder, began=began)
        served = open_served(rank) if rank.rank == 0 else None
        reader = _MessageReader(briefing, served)
        if served:
            served.server.serve()
        try:
            outcome = _follow_control(reader, briefing, screen)
        finally:
            end_session(reader.pid)
            reader.ending()
        outcome = replace(outcome, alone=_because_of_limits(briefing, outcome.alone))
        if outcome.alone or (outcome.report and outcome.report.state is PhaseState.BROKEN):
            keep()
        return outcome


def _because_of_limits(briefing: StartInfo, alone: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What a rank found by itself; where its limits leave it hardly anything they are the cause, and that was their effect."""
    limits = too_little(briefing.rank, briefing.local, backend=briefing.settings.backend) if alone else ()
    if not limits:
        return alone
    effect = (f"seen of it: {alone[0].title}", *alone[0].evidence[-2:])
    return (replace(limits[0], evidence=(*limits[0].evidence, *effect)), *limits[1:])


class _MessageReader:
    """The control process and its messages."""

    def __init__(self, briefing: StartInfo, served: Served | None) -> None:
        self._read, write = os.pipe()
        back, self._back = os.pipe()

        def shown() -> None:
            os.read(back, 1)

        def main() -> None:
            os.close(self._read)
            os.close(self._back)
            if served:
                served.server.close()
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            with os.fdopen(write, "wb") as pipe:
                control(briefing, pipe, shown, served)

        self.limits = limits_now()
        self.pid = fork(main)
        os.close(write)
        os.close(back)
        self._rest = b""
        self._status: int | None = None
        self.closed = False

    def news(self, seconds: float) -> list[Update]:
        """The messages that came within so many seconds; ``closed`` is set when no more will come."""
        if not select.select([self._read], [], [], max(seconds, 0))[0]:
            return []
        part = os.read(self._read, 1 << 20)
        self.closed = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [msgspec.json.decode(line, type=Update) for line in lines]

    def ending(self) -> str:
        """How the control process ended; it has closed its pipe, or was killed."""
        if self._status is None:
            with suppress(ChildProcessError):
                self._status = os.waitpid(self.pid, 0)[1]
        return ending_of(self._status or 0) or "status 0"

    def shown(self) -> None:
        """Tell the control process that the report was shown."""
        with suppress(OSError):
            os.write(self._back, b".")


class Silence:
    """Tells what the test is in where nothing has been shown for a while: the time since it is in that, ever more rarely."""

    def __init__(self, rank: int, show: Callable[[str], None]) -> None:
        self._rank, self._show = rank, show
        self._at, self._since = "", time.monotonic()
        self._next = self._since + SILENCE_SECONDS

    def at(self, at: str) -> None:
        """What it is in now. A text with seconds in it, such as "rank 1 is importing torch, 31 s", changes as they pass."""
        if at and _without_seconds(at) != _without_seconds(self._at):
            self._since, self._next = time.monotonic(), time.monotonic() + SILENCE_SECONDS
        self._at = at or self._at

    def look(self) -> None:
        """Show it if it is time."""
        now = time.monotonic()
        if now < self._next or not self._at:
            return
        took = now - self._since
        self._next = now + max(took, SILENCE_SECONDS)
        who = f"rank {self._rank} is " if self._at == IMPORTING else ""
        self._show(who + (self._at if _without_seconds(self._at) != self._at else f"{self._at}, {took:.0f} s"))


def _without_seconds(at: str) -> str:
    return re.sub(r", \d+ s$", "", at)


def _follow_control(reader: _MessageReader, briefing: StartInfo, screen: Screen) -> Outcomes:
    rank, at, phases = briefing.rank, "starting", list[PhaseResult]()
    silence = Silence(briefing.rank.rank, screen.progress)
    report: Report | None = None
    failure: Exception | None = None
    last = briefing.began + briefing.settings.deadline + (LEADING if rank.rank == 0 else FOLLOWING)
    try:
        while time.monotonic() < last and not reader.closed:
            for news in reader.news(min(last - time.monotonic(), 0.5)):
                at = news.at or at
                silence.at(at)
                if news.found:
                    screen.found(news.found)
                if news.phase:
                    phases.append(news.phase)
                    screen.phase(news.phase)
                if news.report:
                    report, failure = news.report, _shown(screen, news.report)
                    reader.shown()
                    # the other ranks must be released even when showing the report failed
                    last += AFTER_REPORT
                if news.alone is not None:
                    return Outcomes(status=1, alone=news.alone, folder=briefing.folder)
                if news.end is not None:
                    return Outcomes(status=news.end, verdict=news.verdict, folder=briefing.folder)
                if news.lost:
                    return _lost(briefing, reader, at, phases, died=None)
            silence.look()
    except KeyboardInterrupt:
        screen.broken_off(at)
        raise
    if failure is not None:
        raise failure
    if report is not None:
        return Outcomes(status=0, report=report, folder=briefing.folder)
    return _lost(briefing, reader, at, phases, died=reader.ending() if reader.closed else None)


def _shown(screen: Screen, report: Report) -> Exception | None:
    """Show the report. An error is returned, not raised: the other ranks must be released first."""
    try:
        screen.report(report)
    except (DoctorError, OSError) as error:
        return error
    return None


def _lost(
    briefing: StartInfo,
    reader: _MessageReader,
    at: str,
    phases: list[PhaseResult],
    *,
    died: str | None,
) -> Outcomes:
    rank = briefing.rank
    log = Path(briefing.folder) / f"rank-{rank.rank:05d}.log"
    limits = limits_now()
    tail = log.read_text(errors="replace").splitlines()[-TAIL:] if log.is_file() else []
    lost = Lost(
        rank=rank,
        host=briefing.local.hostname,
        at=at,
        seconds=time.monotonic() - briefing.began,
        master=_call(rank) if rank.rank else None,
        died=died,
        stopped=died is None and state_of(reader.pid) in {"T", "t"},
        log=str(log),
        cause=why_ended(reader.limits, limits, ended=died, error="\n".join(tail)),
        perhaps=what_else(reader.limits, limits, ended=died),
        tail=tuple(tail),
    )
    if lost.starting:
        lost = replace(lost, torch_on=_torch_on())
    if died and rank.rank and at in BEFORE_ARRIVAL:
        _tell_rank_zero(briefing, lost)
    found = tuple(finding for check in CHECKS for finding in check(lost))
    return Outcomes(status=1, alone=found, phases=tuple(phases), at=at, folder=briefing.folder)


def _torch_on() -> str:
    """Where this Python's torch lies; "" where that is not found in a moment, as on a file system that hangs."""
    found = bounded(lambda: find_spec("torch"), LOOK_SECONDS, (Exception,))
    folder = str(Path(found.origin).parent) if found and found.origin else ""
    kind = bounded(lambda: file_system_of(folder), LOOK_SECONDS) if folder else None
    return f"torch is in {folder}{f', on {kind}' if kind else ''}" if folder else ""


def _tell_rank_zero(briefing: StartInfo, lost: Lost) -> None:
    """That this rank will not come: else rank 0 waits for it until its time is up. A launcher ends all ranks when one has ended, so
    this one stays until rank 0 has reported."""
    rank, left = briefing.rank, briefing.began + briefing.settings.deadline - time.monotonic()
    why = f"{lost.died} in {lost.at!r}" + lost.because
    notice = Notice(run=rank.run, rank=rank.rank, host=briefing.local.hostname, why=why, port=rank.port)
    send_notice(rank.master, rank.port, notice, seconds=min(NOTICE, left), stay=max(left, 0.0))


def _call(rank: Rank) -> ConnectOutcome:
    """Connect to the master's port, again a moment later where it is open: a process that was just killed still holds it."""
    outcome = ask(rank.master, rank.port, timeout=0.3, listen=0.1).outcome
    if outcome in {ConnectOutcome.REACHED, ConnectOutcome.SILENT, ConnectOutcome.STRANGER}:
        time.sleep(DYING)
        outcome = ask(rank.master, rank.port, timeout=0.3, listen=0.1).outcome
    return outcome


@contextmanager
def _folder(settings: CommSettings) -> Iterator[tuple[str, Callable[[], None]]]:
    """The folder of this rank's files: the one that was named, or a private one that is removed when all is well."""
    if settings.out:
        make_folder(Path(settings.out), mode=0o700)
        yield settings.out, lambda: None
        return
    with private_folder() as (made, keep):
        yield str(made), keep
