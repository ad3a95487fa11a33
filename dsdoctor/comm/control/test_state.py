"""The state of a test on rank 0, and its side of an order."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from dsdoctor.comm.collectives import checks as collective_checks
from dsdoctor.comm.collectives.checks import STOPPED, FailedExchange, is_consequence
from dsdoctor.comm.collectives.nccl import NcclFacts
from dsdoctor.comm.control.member import GATHERED, PACE, Member, take_evidence
from dsdoctor.comm.control.messages import EXCHANGES, ExchangeResult, PhaseLog, RankAnswer, RankOrder, Update
from dsdoctor.comm.mesh.mesh import reach
from dsdoctor.comm.models import Claim, CommPhase, CommSettings, Mode, Rank, by_rank, named
from dsdoctor.comm.rendezvous.notices import NOTICES, Notices
from dsdoctor.comm.results import ConnectOutcome, PairTime, Reach, Speed, Speeds, Stuck
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

# Rank 0's side of an order: give it, do its own part, gather the answers, end what hangs. Judges nothing.


MOVING = 3.0
"""Seconds without progress that are no hang yet: a large message on a slow link takes as long."""
GRACE = 1.0
"""Seconds that the others get to answer by themselves, after the first rank reported a problem."""
FINAL_SECONDS = 1.5
"""Seconds in which a rank that must stop has to say where it was."""
TELL_SECONDS = 1.0
"""Seconds between two words to the supervisor on what the own work is in."""
CALL_TIMEOUT = 1.0
LOOK_SECONDS = 1.0
"""Seconds after which a log is read although its next message has not come."""
CALL_AGAIN_SECONDS, MAX_REFUSALS, MAX_FAILURES = 3.0, 2, 5
"""Seconds between two calls to the ranks that import torch, and how often in a row that must be refused, or fail, to be the end of
the wait: a host that is overloaded answers late."""
CALLERS = 32


@dataclass(frozen=True, kw_only=True)
class Responses:
    """The answers to an order. ``silent``: how a connection to each rank that did not answer ended. ``still``: seconds
    since rank 0's own work last made progress."""

    order: RankOrder
    answers: tuple[RankAnswer, ...]
    silent: dict[int, ConnectOutcome] = field(default_factory=dict)
    seconds: float = 0.0
    still: float = 0.0

    @property
    def timed_out_in_progress(self) -> bool:
        """Whether the time was up while the work still made progress, and no rank had failed: that a connection was closed is no
        failure then, for the first rank that ended closed it. In groups every rank counts, for rank 0 is in one of them."""
        stuck = [answer.stuck for answer in self.answers if answer.stuck]
        fell_out = self.silent or any(_failed(one) for one in stuck)
        quiet = [one.quiet for one in stuck if not one.error]
        still = max(quiet, default=0.0) if self.order.groups else max(self.still, *quiet, 0.0)
        return not fell_out and self.seconds >= self.order.seconds and still < max(MOVING, self.order.seconds / 2)

    @property
    def all_succeeded(self) -> bool:
        """Whether every rank answered and none was stuck."""
        return not self.silent and not any(answer.stuck for answer in self.answers)


def _failed(stuck: Stuck) -> bool:
    """Whether a rank was not at work any more when its time was up, by itself."""
    own = stuck.error and not is_consequence(stuck.error)
    return bool(stuck.ended or own or stuck.process in STOPPED)


def gather(member: Member, claims: Sequence[Claim], order: RankOrder, *, patience: float) -> Responses:
    """Give an order to all and gather. Ends it when a rank has a problem, when rank 0's own work made no progress for
    ``patience`` seconds, or when its time is up."""
    began = time.monotonic()
    member.board.put(f"order/{order.number}", order)
    watch = _Watch(order, member, claims, math.inf if order.groups else patience)
    while not watch.over():
        continue
    member.board.put(f"stop/{order.number}", True)
    if not watch.complete:
        watch.final_answers(FINAL_SECONDS)
    silent = call(member, claims, watch.missing)
    now = time.monotonic()
    return Responses(
        order=order,
        answers=tuple(watch.answers.values()),
        silent=silent,
        seconds=now - began,
        still=now - watch.moved,
    )


def call(member: Member, claims: Sequence[Claim], ranks: Sequence[int]) -> dict[int, ConnectOutcome]:
    """Connect to the ranks that did not answer."""
    by_rank = {claim.rank: claim for claim in claims}

    def outcome(rank: int) -> ConnectOutcome:
        return reach(member.claim, by_rank[rank], member.board.prefix, size=0, timeout=CALL_TIMEOUT).outcome

    with ThreadPoolExecutor(CALLERS) as pool:
        return dict(zip(ranks, pool.map(outcome, ranks), strict=True))


def release(member: Member, status: int, number: int, *, mute: int, verdict: str = "") -> None:
    """Send the last order, and wait a moment until the others have read it, because the store ends with this process. ``mute``
    ranks are known not to answer any more."""
    member.board.put(
        f"order/{number}", RankOrder(number=number, phase=CommPhase.RENDEZVOUS, status=status, verdict=verdict)
    )
    others = max(member.board.get(GATHERED, int) - 1 - mute, 0)
    log, gone, until = member.board.log("ends"), 0, time.monotonic() + FINAL_SECONDS
    while gone < others and time.monotonic() < until:
        log.wait(LOOK_SECONDS / 4)
        gone += sum(1 for _ in log.news(int))
    member.board.store.set(f"{NOTICES}/over", b"1")
    member.clear()


class _Watch:
    """The answers to one order, with rank 0's own work."""

    def __init__(self, order: RankOrder, member: Member, claims: Sequence[Claim], patience: float) -> None:
        self._member, self._claims, self._patience, self._order = member, claims, patience, order
        self._log = member.board.log(f"answers/{order.number}")
        self._job = member.begin(order)
        self._until = time.monotonic() + order.seconds
        self.answers: dict[int, RankAnswer] = {}
        self.moved, self._step = time.monotonic(), -1
        apart = {*range(member.world)} - {rank for group in order.groups for rank in group}
        self._groups = [set(group) for group in (*order.groups, tuple(apart)) if group]
        self._trouble: dict[int, float] = {}
        self._told, self._called, self._looked = self.moved, self.moved, self.moved
        self._failures: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        """Whether every rank has answered."""
        return len(self.answers) >= self._member.world

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._member.world) if rank not in self.answers]

    def over(self) -> bool:
        """Wait a moment for an answer, and return whether there is nothing more to wait for."""
        self._own(self._job.poll)
        self._read(0.0 if self.complete else PACE)
        now = time.monotonic()
        if now > self._told + TELL_SECONDS and self._job.at:
            self._told = now
            self._member.say(Update(at=self._doing(now)))
        if self._order.phase is CommPhase.SAME and self._is_importer_gone(now):
            return True
        if self._job.step != self._step:
            self._step, self.moved = self._job.step, now
        return self.complete or self._settled(now) or now > self._until or now > self.moved + self._patience

    def _doing(self, now: float) -> str:
        """What the order is in: of an import the ranks that are in it."""
        if self._order.phase is not CommPhase.SAME or not self.missing:
            return f"{self._order.phase.value}: {self._job.at}"
        who, took = named(self.missing, by_rank(self._claims)), now - self._member.briefing.began
        return f"{who} {'is' if len(self.missing) == 1 else 'are'} importing torch, {took:.0f} s"

    def _is_importer_gone(self, now: float) -> bool:
        """Whether a rank that imports torch does not answer any more: nobody says so of a process that was killed."""
        if now < self._called + CALL_AGAIN_SECONDS:
            return False
        outcomes = call(self._member, self._claims, self.missing)
        self._called = time.monotonic()
        self._failures = {
            rank: self._failures.get(rank, 0) + 1 for rank, how in outcomes.items() if how is not ConnectOutcome.REACHED
        }
        return any(
            count >= (MAX_REFUSALS if outcomes[rank] is ConnectOutcome.REFUSED else MAX_FAILURES)
            for rank, count in self._failures.items()
        )

    def _settled(self, now: float) -> bool:
        """Whether of every group all answered, or one had a problem and the others had a moment to say so too."""
        stuck = {rank for rank, answer in self.answers.items() if answer.stuck}
        if not stuck:
            return False
        for number, group in enumerate(self._groups):
            if group & stuck:
                self._trouble.setdefault(number, now)
        return all(
            now > self._trouble[number] + GRACE if number in self._trouble else group <= self.answers.keys()
            for number, group in enumerate(self._groups)
        )

    def final_answers(self, seconds: float) -> None:
        """Stop the own work, and read where the other ranks are."""
        self._own(self._job.stop)
        until = time.monotonic() + seconds
        while not self.complete and time.monotonic() < until:
            self._read(PACE)

    def _own(self, look: "Callable[[], RankAnswer | None]") -> None:
        if self._member.rank not in self.answers:
            answer = look()
            if answer is not None:
                self.answers[answer.rank] = answer

    def _read(self, seconds: float) -> None:
        """Take the answers that come within a moment. One whose writer died before its text was there holds up none for long."""
        if self._log.wait(seconds) or time.monotonic() > self._looked + LOOK_SECONDS:
            self._looked = time.monotonic()
            for answer in self._log.news(RankAnswer):
                self.answers[answer.rank] = answer


# The state of a test on rank 0: which ranks came, what was found, how much time is left. Phases read it and add to it.


STALL_SECONDS = {Mode.QUICK: 8.0, Mode.DEFAULT: 20.0, Mode.FULL: 40.0}
"""Seconds in which an exchange must make progress."""
AGAIN_SECONDS = 4.0
MIN_PHASE_SECONDS = 2.0
"""A phase for which fewer seconds are left is not begun."""


@dataclass(kw_only=True)
class TestRun:
    """One test. ``end`` (time.monotonic) is the moment at which the report must be made. ``slow``: the ranks of slow nodes.
    ``tested``: exchanges of each rank in the collectives. ``group`` is the number of the order for which the ranks joined
    their group, ``together`` whether all are in it."""

    member: Member
    notices: Notices
    phase_log: PhaseLog
    began: float
    end: float
    claims: tuple[Claim, ...] = ()
    reaches: tuple[Reach, ...] = ()
    speeds: tuple[Speed, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    timed: tuple[Speeds, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    exchanges: int = 0
    tested: int = 0
    wrong: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    nccl: NcclFacts | None = None
    mute: set[int] = field(default_factory=set)
    orders: int = 0
    group: int = 0
    together: bool = True

    @property
    def me(self) -> Rank:
        """Rank 0."""
        return self.member.briefing.rank

    @property
    def settings(self) -> CommSettings:
        """The options of the test."""
        return self.member.briefing.settings

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    @property
    def call(self) -> float:
        """Seconds that an exchange took in the collectives, on average; 0 before them."""
        spent = sum(phase.seconds for phase in self.phase_log.phases if phase.phase is CommPhase.RIGHT)
        return spent / self.tested if self.tested else 0.0

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank, "" for one that did not come and that no launcher named."""
        came = {claim.rank: claim.host for claim in self.claims}
        named = self.me.hosts or ("",) * self.me.world
        return tuple(came.get(rank, named[rank]) for rank in range(self.me.world))

    def ask(
        self,
        phase: CommPhase,
        *,
        seconds: float,
        groups: tuple[tuple[int, ...], ...] = (),
        variables: dict[str, str] | None = None,
        patience: float | None = None,
    ) -> Responses:
        """Give an order to every rank and gather the answers. Smaller groups, or ranks of which not all are together in the group
        any more, join a new one: who joined the old one anew would find the addresses of processes that have ended."""
        self.orders += 1
        exchanges = phase in EXCHANGES
        if exchanges and (groups or not self.together):
            self.group = self.orders
        if patience is None:
            patience = STALL_SECONDS[self.settings.mode] if exchanges else math.inf
        order = RankOrder(
            number=self.orders,
            group=self.group,
            phase=phase,
            seconds=seconds,
            groups=groups,
            variables=variables or {},
        )
        gathered = gather(self.member, self.claims, order, patience=patience)
        self.together = gathered.all_succeeded if exchanges else self.together
        self.exchanges += sum(answer.result.done for answer in gathered.answers if answer.result)
        return gathered

    @property
    def _lossy(self) -> tuple[str, ...]:
        """What was found of lost packets before."""
        findings = (finding for phase in self.phase_log.phases for finding in phase.findings)
        return tuple(finding.title for finding in findings if finding.rule == "mesh-lossy")

    def _keep(self, stuck: tuple[Stuck, ...]) -> None:
        """Take the files of the ranks that failed, the first causes first, into this rank's folder."""
        order = sorted(
            stuck, key=lambda one: (not one.ended, not one.error, one.process not in STOPPED, one.step, one.rank)
        )
        briefing = self.member.briefing
        with contextlib.suppress(OSError):
            # a full disk hides no verdict
            take_evidence(self.member.board, (one.rank for one in order), briefing.folder, self.member.claim.host)

    def trouble(self, gathered: Responses, what: str) -> tuple[Finding, ...]:
        """Findings on why an order did not end well; a second mesh shows whether the hosts still reach each other."""
        if gathered.all_succeeded:
            return ()
        stuck = tuple(answer.stuck for answer in gathered.answers if answer.stuck)
        self.mute |= set(gathered.silent)
        if gathered.timed_out_in_progress:
            # who is still at work is not stuck
            return (time_used_up(gathered, what),)
        self.stuck += stuck + tuple(_vanished(rank, how, what) for rank, how in gathered.silent.items())
        self._keep(stuck)
        trouble = FailedExchange(
            what=what,
            claims=self.claims,
            stuck=stuck,
            silent=gathered.silent,
            left_out={answer.rank: answer.left_out for answer in gathered.answers if answer.left_out},
            waited=gathered.still,
            lossy=self._lossy,
            backend=self.member.backend,
        )
        if not (trouble.dead or trouble.stopped or trouble.cut) and self.left > 2:
            again = self.ask(CommPhase.MESH, seconds=min(AGAIN_SECONDS, self.left - 1))
            reaches = tuple(reach for answer in again.answers for reach in answer.reaches)
            trouble = replace(trouble, reaches=reaches, before=self.reaches)
        return tuple(finding for check in collective_checks.STUCK_CHECKS for finding in check(trouble))


def time_used_up(gathered: Responses, what: str) -> Finding:
    """An order that only lacked time: the ranks still exchanged when it was up."""
    measures = gathered.order.phase in {CommPhase.NODES, CommPhase.SPEED}
    return book.finding(
        "time-used-up",
        Severity.WARNING if measures else Severity.ERROR,
        case="measuring" if measures else "",
        seconds=f"{gathered.order.seconds:.0f}",
        phase=what,
        at=next((answer.stuck.at for answer in gathered.answers if answer.stuck), "the last one"),
    )


def results(gathered: Responses) -> dict[int, ExchangeResult]:
    """The results of the ranks that have one, by rank."""
    return {answer.rank: answer.result for answer in gathered.answers if answer.result}


def _vanished(rank: int, how: ConnectOutcome, what: str) -> Stuck:
    """A rank that did not answer any more, as the table of ranks shows it."""
    ended = {ConnectOutcome.REFUSED: "its port is closed", ConnectOutcome.SILENT: "it does not answer"}.get(
        how, f"its host: {how.value}"
    )
    return Stuck(rank=rank, at=what, step=0, seconds=0.0, ended=ended)
