"""An exchange that did not end well, as rank 0 gathered it: who died, stands still, is cut off, stayed behind. Data only."""

from dataclasses import dataclass

from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import Outcome, Reach, Stuck

STOPPED = frozenset("Tt")
"""The kernel's letters for a process that a signal or a debugger has stopped."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """An exchange that did not end well. ``stuck`` are the ranks that told where they were, ``silent`` those that told nothing
    and how a call to them ended; ``reaches`` is a second mesh, made after it; ``waited`` is for how long nothing moved."""

    what: str
    claims: tuple[Claim, ...]
    stuck: tuple[Stuck, ...]
    silent: dict[int, Outcome]
    reaches: tuple[Reach, ...] = ()
    waited: float = 0.0
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
        """Ranks whose process is gone: its own supervisor says so, or its host refuses the port it listened on."""
        told = {one.rank for one in self.stuck if one.ended}
        return tuple(sorted(told | {rank for rank, outcome in self.silent.items() if outcome is Outcome.REFUSED}))

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks whose process stands still, or accepts a connection and does not answer."""
        told = {one.rank for one in self.stuck if one.process in STOPPED}
        quiet = {rank for rank, outcome in self.silent.items() if outcome in {Outcome.SILENT, Outcome.REACHED}}
        return tuple(sorted(told | quiet))

    @property
    def cut(self) -> tuple[int, ...]:
        """Ranks whose host does not answer any more."""
        gone = {Outcome.TIMED_OUT, Outcome.NO_ROUTE, Outcome.NO_NAME}
        return tuple(sorted(rank for rank, outcome in self.silent.items() if outcome in gone))

    @property
    def behind(self) -> tuple[Stuck, ...]:
        """Ranks that have not begun what others wait in."""
        living = [one for one in self.stuck if not one.ended and one.process not in STOPPED]
        most = max((one.step for one in living), default=0)
        return tuple(one for one in living if one.step < most and not one.error)
