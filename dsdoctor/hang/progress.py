"""The times at which a run moved -> when it is to be called hung. Decides, never looks."""

import statistics
from collections import deque
from dataclasses import dataclass, field

LEAST, TIMES = 60.0, 10.0
SURVIVED = 2.0
SHARE_OF_TIMEOUT = 0.6
"""Of torch's own timeout: an answer that comes after it helps nobody."""
USUAL_TIMEOUT = 600.0
"""Seconds of torch's timeout for NCCL where nothing is recorded."""


@dataclass
class Pace:
    """How long this run stands still between two movements, as learned. ``after``: what the user asked for instead."""

    after: float | None = None
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    survived: float = 0.0

    def note(self, pause: float, *, was_told: bool) -> None:
        """A pause has ended by itself. ``was_told``: it had been called a hang."""
        self.pauses.append(pause)
        if was_told or self.after is None:
            self.survived = max(self.survived, pause)

    def limit(self, timeout: float | None = None) -> float:
        """Seconds without movement after which the run is looked at.

        >>> pace = Pace()
        >>> for _ in range(9): pace.note(12.0, was_told=False)
        >>> pace.limit(), pace.limit(timeout=100.0), Pace(after=6.0).limit()
        (120.0, 60.0, 6.0)
        """
        if self.after is not None:
            return max(self.after, SURVIVED * self.survived)
        typical = statistics.median(self.pauses) if self.pauses else 0.0
        learned = max(LEAST, TIMES * typical, SURVIVED * self.survived)
        return learned if timeout is None else min(learned, max(SHARE_OF_TIMEOUT * timeout, 1.0))

    def limit_of_work(self, timeout: float | None) -> float:
        """Seconds after which even a rank that is seen to work is told of, because torch's own timeout comes near."""
        limit = self.limit(timeout)
        return max(limit, min(TIMES * limit, SHARE_OF_TIMEOUT * (timeout or USUAL_TIMEOUT)))
