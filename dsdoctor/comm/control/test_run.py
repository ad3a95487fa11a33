"""The state of a test on rank 0: which ranks came, what was found, how much time is left. Phases read it and add to it."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dsdoctor.comm.collectives import stuck_checks
from dsdoctor.comm.collectives.nccl_log import NcclFacts
from dsdoctor.comm.collectives.trouble import STOPPED, Trouble
from dsdoctor.comm.control.evidence import take_evidence
from dsdoctor.comm.control.member import Member
from dsdoctor.comm.control.messages import ExchangeResult, OrderKind, RankOrder, Task
from dsdoctor.comm.control.orders import Conductor, Gathered
from dsdoctor.comm.control.phases import PhaseLog
from dsdoctor.comm.models import Claim, CommSettings, Mode, Rank
from dsdoctor.comm.rendezvous.notices import NoticeListener
from dsdoctor.comm.results import ConnectOutcome, PairTime, Reach, Speed, Speeds, Stuck
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import step

PATIENCE = {Mode.QUICK: 8.0, Mode.DEFAULT: 20.0, Mode.FULL: 40.0}
"""Seconds in which an exchange must make progress."""
AGAIN_SECONDS = 4.0
LEAST = 2.0
"""A phase for which fewer seconds are left is not begun."""


@dataclass(kw_only=True)
class TestRun:
    """One test. ``end`` (time.monotonic) is the moment at which the report must be made. ``slow``: the ranks of slow nodes."""

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
    wrong: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    nccl: NcclFacts | None = None
    mute: set[int] = field(default_factory=set)
    conductor: Conductor | None = field(default=None)

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
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank, "" for one that did not come and that no launcher named."""
        came = {claim.rank: claim.host for claim in self.claims}
        named = self.me.hosts or ("",) * self.me.world
        return tuple(came.get(rank, named[rank]) for rank in range(self.me.world))

    def ask(
        self,
        kind: OrderKind,
        *,
        seconds: float,
        task: Task = Task.RIGHT,
        groups: tuple[tuple[int, ...], ...] = (),
        variables: dict[str, str] | None = None,
        patience: float | None = None,
    ) -> Gathered:
        """Give an order to every rank and gather the answers."""
        if self.conductor is None:
            self.conductor = Conductor(self.member, self.claims)
        if patience is None:
            patience = PATIENCE[self.settings.mode] if kind is OrderKind.RUN else math.inf
        order = RankOrder(number=0, kind=kind, seconds=seconds, task=task, groups=groups, variables=variables or {})
        gathered = self.conductor.ask(order, patience=patience)
        self.exchanges += sum(answer.result.done for answer in gathered.answers if answer.result)
        return gathered

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
        self.stuck += stuck + tuple(_vanished(rank, how, what) for rank, how in gathered.silent.items())
        self._keep(stuck)
        if gathered.moving:
            return tuple(time_used_up(gathered, what))
        trouble = Trouble(
            what=what,
            claims=self.claims,
            stuck=stuck,
            silent=gathered.silent,
            left_out={answer.rank: answer.left_out for answer in gathered.answers if answer.left_out},
            waited=gathered.still,
            backend=self.member.backend,
        )
        if not (trouble.dead or trouble.stopped or trouble.cut) and self.left > 2:
            again = self.ask(OrderKind.MESH, seconds=min(AGAIN_SECONDS, self.left - 1))
            trouble = replace(trouble, reaches=tuple(reach for answer in again.answers for reach in answer.reaches))
        return tuple(finding for check in stuck_checks.CHECKS for finding in check(trouble))


def time_used_up(gathered: Gathered, what: str) -> Iterator[Finding]:
    """The time was up while the ranks still exchanged.

    Why it matters: nothing hung: the work takes longer here than the deadline leaves. A slow link does that, or few
    processors for many ranks. What was not exchanged is not tested.

    How to fix it: give it more time.

        $ python -m dsdoctor comm --deadline 600

    Since: 0.1
    """
    at = next((answer.stuck.at for answer in gathered.answers if answer.stuck), "the last one")
    yield (Finding.warning if gathered.order.task in {Task.NODES, Task.SPEED} else Finding.error)(
        "time-used-up",
        f"the deadline left {gathered.order.seconds:.0f} s for {what}, and the ranks were still at work, in {at}",
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
