"""The state of a test on rank 0: which ranks came, what was found, how much time is left. Phases read it and add to it."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from dsdoctor.comm.collectives import stuck_checks
from dsdoctor.comm.collectives.nccl_log import NcclFacts
from dsdoctor.comm.collectives.trouble import STOPPED, Trouble
from dsdoctor.comm.control.evidence import take_evidence
from dsdoctor.comm.control.member import Member
from dsdoctor.comm.control.messages import EXCHANGES, ExchangeResult, RankOrder
from dsdoctor.comm.control.orders import Gathered, gather
from dsdoctor.comm.control.phases import PhaseLog
from dsdoctor.comm.models import Claim, CommPhase, CommSettings, Mode, Rank
from dsdoctor.comm.rendezvous.notices import NoticeListener
from dsdoctor.comm.results import ConnectOutcome, PairTime, Reach, Speed, Speeds, Stuck
from dsdoctor.core.finding import Finding, step

PATIENCE = {Mode.QUICK: 8.0, Mode.DEFAULT: 20.0, Mode.FULL: 40.0}
"""Seconds in which an exchange must make progress."""
AGAIN_SECONDS = 4.0
LEAST = 2.0
"""A phase for which fewer seconds are left is not begun."""


@dataclass(kw_only=True)
class TestRun:
    """One test. ``end`` (time.monotonic) is the moment at which the report must be made. ``slow``: the ranks of slow nodes.
    ``tested``: exchanges of each rank in the collectives. ``group`` is the number of the order for which the ranks joined
    their group, ``together`` whether all are in it."""

    member: Member
    notices: NoticeListener
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
    ) -> Gathered:
        """Give an order to every rank and gather the answers. Smaller groups, or ranks of which not all are together in the group
        any more, join a new one: who joined the old one anew would find the addresses of processes that have ended."""
        self.orders += 1
        exchanges = phase in EXCHANGES
        if exchanges and (groups or not self.together):
            self.group = self.orders
        if patience is None:
            patience = PATIENCE[self.settings.mode] if exchanges else math.inf
        order = RankOrder(
            number=self.orders,
            group=self.group,
            phase=phase,
            seconds=seconds,
            groups=groups,
            variables=variables or {},
        )
        gathered = gather(self.member, self.claims, order, patience=patience)
        self.together = gathered.well if exchanges else self.together
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

    def trouble(self, gathered: Gathered, what: str) -> tuple[Finding, ...]:
        """Findings on why an order did not end well; a second mesh shows whether the hosts still reach each other."""
        if gathered.well:
            return ()
        stuck = tuple(answer.stuck for answer in gathered.answers if answer.stuck)
        self.mute |= set(gathered.silent)
        if gathered.moving:
            # who is still at work is not stuck
            return tuple(unfinished(gathered, what))
        self.stuck += stuck + tuple(_vanished(rank, how, what) for rank, how in gathered.silent.items())
        self._keep(stuck)
        trouble = Trouble(
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
        return tuple(finding for check in stuck_checks.CHECKS for finding in check(trouble))


def unfinished(gathered: Gathered, what: str) -> Iterator[Finding]:
    """An order that only lacked time."""
    at = next((answer.stuck.at for answer in gathered.answers if answer.stuck), "the last one")
    measures = gathered.order.phase in {CommPhase.NODES, CommPhase.SPEED}
    seconds = f"{gathered.order.seconds:.0f} s"
    given = f"{what} was given {seconds} of the deadline" if measures else f"the deadline left {seconds} for {what}"
    title = f"{given}, and the ranks were still at work, in {at}"
    yield from time_used_up(title, grave=not measures)


def time_used_up(title: str, *, grave: bool, evidence: Iterable[str] = ()) -> Iterator[Finding]:
    """The time was up while the ranks still exchanged, or before they could.

    Why it matters: nothing hung: the work takes longer here than the deadline leaves. A slow link does that, few processors
    for many ranks, or an import of torch that takes long. What was not exchanged is not tested.

    How to fix it: give it more time.

        $ python -m dsdoctor comm --deadline 600

    Since: 0.1
    """
    yield (Finding.error if grave else Finding.warning)(
        "time-used-up",
        title,
        evidence=evidence,
        fix="give it more time with --deadline",
        steps=(step("python -m dsdoctor comm --deadline 600"),),
    )


def results(gathered: Gathered) -> dict[int, ExchangeResult]:
    """The results of the ranks that have one, by rank."""
    return {answer.rank: answer.result for answer in gathered.answers if answer.result}


def _vanished(rank: int, how: ConnectOutcome, what: str) -> Stuck:
    """A rank that did not answer any more, as the table of ranks shows it."""
    ended = {ConnectOutcome.REFUSED: "its port is closed", ConnectOutcome.SILENT: "it does not answer"}.get(
        how, f"its host: {how.value}"
    )
    return Stuck(rank=rank, at=what, step=0, seconds=0.0, ended=ended)
