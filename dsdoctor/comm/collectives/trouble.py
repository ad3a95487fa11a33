"""Where every rank was when an exchange was ended: who died, stopped, vanished, raised, or is not where the others are.

When a single rank fails, all others fail too, at once or later, and their errors do not name it.
"""

import math
import re
from dataclasses import dataclass, field

from dsdoctor.comm.models import Claim
from dsdoctor.comm.rank_names import named
from dsdoctor.comm.results import ConnectOutcome, Reach, SkippedStep, Stuck

MOST_RECORDED = 4
STOPPED = frozenset("Tt")
"""The kernel's letters for a process that a signal or a debugger has stopped."""
CONSEQUENCE = re.compile(
    r"connection (was |has been )?(closed|reset|refused|lost)|closed by peer|broken pipe|timed? ?out|remote process|"
    r"ncclRemoteError|ncclSystemError|socket|network error|op\.preamble|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
"""What a library raises when another rank is gone, late, or in another exchange: such an error is no cause."""
TRANSPORT = re.compile(
    r'File "[^"]*(/torch/(distributed|cuda)/|/deepspeed/comm/|/dsdoctor/comm/(torch_ops|collectives/calls)\.py")'
)
"""A frame in which a rank waits for others: torch's that communicate or synchronise, or ours that waits for what torch returned."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """An exchange that did not end well. ``stuck`` are the ranks that reported where they were, ``silent`` those that did
    not and how a connection to them ended; ``left_out`` the steps that a rank did not take part in; ``reaches`` are the
    connections that were tried again after it, ``before`` those of the mesh; ``waited`` is how long nothing moved; ``lossy``
    is what was found of lost packets before."""

    what: str
    claims: tuple[Claim, ...]
    stuck: tuple[Stuck, ...]
    silent: dict[int, ConnectOutcome]
    left_out: dict[int, tuple[SkippedStep, ...]] = field(default_factory=dict)
    reaches: tuple[Reach, ...] = ()
    before: tuple[Reach, ...] = ()
    waited: float = 0.0
    lossy: tuple[str, ...] = ()
    backend: str = "gloo"

    def who(self, rank: int) -> str:
        """A rank with host and pid."""
        claim = next((claim for claim in self.claims if claim.rank == rank), None)
        return f"rank {rank} ({claim.host}, pid {claim.pid})" if claim else f"rank {rank}"

    def host(self, rank: int) -> str:
        """The host of a rank."""
        return next((claim.host for claim in self.claims if claim.rank == rank), "that host")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(self.host(rank) for rank in range(max((claim.rank for claim in self.claims), default=-1) + 1))

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks whose process is gone: their own supervisor reports it, or their host refuses the port they listened on."""
        told = {stuck.rank for stuck in self.stuck if stuck.ended}
        return tuple(
            sorted(told | {rank for rank, outcome in self.silent.items() if outcome is ConnectOutcome.REFUSED})
        )

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks whose process is stopped, or accepts a connection and does not answer."""
        told = {stuck.rank for stuck in self.stuck if stuck.process in STOPPED}
        quiet = {
            rank for rank, outcome in self.silent.items() if outcome in {ConnectOutcome.SILENT, ConnectOutcome.REACHED}
        }
        return tuple(sorted(told | quiet))

    @property
    def cut(self) -> tuple[int, ...]:
        """Ranks whose host does not answer any more."""
        gone = {
            ConnectOutcome.TIMED_OUT,
            ConnectOutcome.NO_ROUTE,
            ConnectOutcome.UNREACHABLE,
            ConnectOutcome.NO_NAME,
        }
        return tuple(sorted(rank for rank, outcome in self.silent.items() if outcome in gone))

    @property
    def waiting(self) -> tuple[Stuck, ...]:
        """Living ranks that raised nothing."""
        return tuple(
            stuck for stuck in self.stuck if not stuck.ended and stuck.process not in STOPPED and not stuck.error
        )

    @property
    def raised(self) -> tuple[Stuck, ...]:
        """Ranks that raised an error of their own, or left out a step in which others took part, the first first. Where a rank
        died or vanished, only what came before that."""
        lost = {stuck.step for stuck in self.stuck if stuck.ended} | (set(self.silent) and {0})
        before = min(lost, default=math.inf)
        own = [
            stuck
            for stuck in self.stuck
            if stuck.error and not stuck.ended and stuck.step < before and not CONSEQUENCE.search(stuck.error)
        ]
        left = [
            Stuck(rank=rank, at=skipped.at, step=skipped.step, seconds=0.0, error=skipped.reason)
            for rank, steps in self.left_out.items()
            for skipped in steps
            if self._took_part(skipped.step)
        ]
        return tuple(sorted((*own, *left), key=lambda stuck: (stuck.step, stuck.rank)))

    def _took_part(self, step: int) -> bool:
        """Whether some rank that came as far did not leave a step out."""
        without = {rank for rank, steps in self.left_out.items() if step in {skipped.step for skipped in steps}}
        return any(stuck.rank not in without and stuck.step >= step for stuck in self.stuck)

    @property
    def behind(self) -> tuple[Stuck, ...]:
        """Ranks that have not begun the exchange in which the others wait."""
        most = max((stuck.step for stuck in self.waiting), default=0)
        return tuple(stuck for stuck in self.waiting if stuck.step < most)

    @property
    def fewer_begun(self) -> tuple[Stuck, ...]:
        """Ranks in the step of the others that have begun fewer collectives by torch's flight recorder, and whose stack was not
        to be seen: with a stack inside of the library a rank may wait in an earlier one for the others. Empty unless the
        recorders of all that wait were read."""
        if self.behind or not all(stuck.sequence is not None for stuck in self.waiting):
            return ()
        most = max((stuck.sequence or 0 for stuck in self.waiting), default=0)
        return tuple(stuck for stuck in self.waiting if (stuck.sequence or 0) < most and not stuck.stack)

    @property
    def recorded(self) -> tuple[str, ...]:
        """What the flight recorders say, a line for each collective that ranks began last."""
        last: dict[tuple[int, str], list[int]] = {}
        for stuck in self.stuck:
            if stuck.sequence is not None:
                last.setdefault((stuck.sequence, stuck.operation), []).append(stuck.rank)
        return tuple(
            f"torch's flight recorder: {named(tuple(sorted(ranks)), ())} began {number} collectives, the last {operation}"
            for (number, operation), ranks in sorted(last.items())
        )[:MOST_RECORDED]

    @property
    def before_it(self) -> tuple[Stuck, ...]:
        """Ranks that stand in Python in the step in which others wait inside of the library."""
        inside = [stuck for stuck in self.waiting if stuck.stack and TRANSPORT.match(stuck.stack[0])]
        outside = [stuck for stuck in self.waiting if stuck.stack and not TRANSPORT.match(stuck.stack[0])]
        return tuple(outside) if inside else ()

    @property
    def explained(self) -> bool:
        """Whether a rank that died, stopped, vanished or raised explains what the others wait for."""
        return bool(self.dead or self.stopped or self.cut or self.raised)
