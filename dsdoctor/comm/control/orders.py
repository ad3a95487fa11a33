"""Rank 0's side of an order: give it, do its own part, gather the answers, end what hangs. Judges nothing."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsdoctor.comm.collectives.trouble import CONSEQUENCE, STOPPED
from dsdoctor.comm.control.member import GATHERED, Member
from dsdoctor.comm.control.messages import RankAnswer, RankOrder
from dsdoctor.comm.mesh.mesh import reach
from dsdoctor.comm.models import Claim, CommPhase
from dsdoctor.comm.results import ConnectOutcome, Stuck

MOVING = 3.0
"""Seconds without progress that are no hang yet: a large message on a slow link takes as long."""
GRACE = 1.0
"""Seconds that the others get to answer by themselves, after the first rank reported a problem."""
FINAL_SECONDS = 1.5
"""Seconds in which a rank that must stop has to say where it was."""
CALL_TIMEOUT = 1.0
CALLERS = 32


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The answers to an order. ``silent``: how a connection to each rank that did not answer ended. ``still``: seconds
    since rank 0's own work last made progress."""

    order: RankOrder
    answers: tuple[RankAnswer, ...]
    silent: dict[int, ConnectOutcome] = field(default_factory=dict)
    seconds: float = 0.0
    still: float = 0.0

    @property
    def moving(self) -> bool:
        """Whether the time was up while the work still made progress, and no rank had failed: that a connection was closed is no
        failure then, for the first rank that ended closed it. In groups every rank counts, for rank 0 is in one of them."""
        stuck = [answer.stuck for answer in self.answers if answer.stuck]
        fell_out = self.silent or any(_failed(one) for one in stuck)
        quiet = [one.quiet for one in stuck if not one.error]
        still = max(quiet, default=0.0) if self.order.groups else max(self.still, *quiet, 0.0)
        return not fell_out and self.seconds >= self.order.seconds and still < max(MOVING, self.order.seconds / 2)

    @property
    def well(self) -> bool:
        """Whether every rank answered and none was stuck."""
        return not self.silent and not any(answer.stuck for answer in self.answers)


def _failed(stuck: Stuck) -> bool:
    """Whether a rank was not at work any more when its time was up, by itself."""
    own = stuck.error and not CONSEQUENCE.search(stuck.error)
    return bool(stuck.ended or own or stuck.process in STOPPED)


def gather(member: Member, claims: Sequence[Claim], order: RankOrder, *, patience: float) -> Gathered:
    """Give an order to all and gather. Ends it when a rank has a problem, when rank 0's own work made no progress for
    ``patience`` seconds, or when its time is up."""
    began = time.monotonic()
    member.board.put(f"order/{order.number}", order)
    watch = _Watch(order, member, math.inf if order.groups else patience)
    while not watch.over():
        time.sleep(member.pace)
    if not watch.complete:
        member.board.put(f"stop/{order.number}", True)
        watch.final_answers(FINAL_SECONDS)
    silent = _call(member, claims, watch.missing)
    now = time.monotonic()
    return Gathered(
        order=order,
        answers=tuple(watch.answers.values()),
        silent=silent,
        seconds=now - began,
        still=now - watch.moved,
    )


def _call(member: Member, claims: Sequence[Claim], ranks: Sequence[int]) -> dict[int, ConnectOutcome]:
    """Connect to the ranks that did not answer."""
    by_rank = {claim.rank: claim for claim in claims}

    def outcome(rank: int) -> ConnectOutcome:
        return reach(member.claim, by_rank[rank], member.board.prefix, size=0, timeout=CALL_TIMEOUT).outcome

    with ThreadPoolExecutor(CALLERS) as pool:
        return dict(zip(ranks, pool.map(outcome, ranks), strict=True))


def release(member: Member, status: int, number: int, *, mute: int) -> None:
    """Send the last order, and wait a moment until the others have read it, because the store ends with this process. ``mute``
    ranks are known not to answer any more."""
    member.board.put(f"order/{number}", RankOrder(number=number, phase=CommPhase.RENDEZVOUS, status=status))
    others = max(member.board.get(GATHERED, int) - 1 - mute, 0)
    log, gone, until = member.board.log("ends"), 0, time.monotonic() + FINAL_SECONDS
    while gone < others and time.monotonic() < until:
        gone += sum(1 for _ in log.news(int))
        time.sleep(member.pace)
    member.clear()


class _Watch:
    """The answers to one order, with rank 0's own work."""

    def __init__(self, order: RankOrder, member: Member, patience: float) -> None:
        self._member, self._patience, self._order = member, patience, order
        self._log = member.board.log(f"answers/{order.number}")
        self._job = member.begin(order)
        self._until = time.monotonic() + order.seconds
        self.answers: dict[int, RankAnswer] = {}
        self.moved, self._step = time.monotonic(), -1
        apart = {*range(member.world)} - {rank for group in order.groups for rank in group}
        self._groups = [set(group) for group in (*order.groups, tuple(apart)) if group]
        self._trouble: dict[int, float] = {}

    @property
    def complete(self) -> bool:
        """Whether every rank has answered."""
        return len(self.answers) >= self._member.world

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._member.world) if rank not in self.answers]

    def over(self) -> bool:
        """Look once, and return whether there is nothing more to wait for."""
        self._own(self._job.poll)
        self._read()
        now = time.monotonic()
        if self._job.step != self._step:
            self._step, self.moved = self._job.step, now
        return self.complete or self._settled(now) or now > self._until or now > self.moved + self._patience

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
            self._read()
            time.sleep(self._member.pace)

    def _own(self, look: "Callable[[], RankAnswer | None]") -> None:
        if self._member.rank not in self.answers:
            answer = look()
            if answer is not None:
                self.answers[answer.rank] = answer

    def _read(self) -> None:
        for answer in self._log.news(RankAnswer):
            self.answers[answer.rank] = answer
