"""The lines of a test suite -> whether its summary answers for what stands above it.

pytest ends with how many tests passed, and then what its tests printed was expected. That is true only of what was printed
since pytest began, and only if no training ran, and no launcher ended badly, between: else the summary is of something else.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dsdoctor.diagnosis.stages import STEP

LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?(?:\d|-?nan\b)", re.IGNORECASE)
NEAR_THE_END = 8
"""So few lines stand at most below the summary of a suite by which the log ended."""


@dataclass
class Suite:
    """The test suite that is open. ``since``: the line on which pytest began, 0 where none is known to have."""

    since: int = 0
    captured: bool = False
    """Whether pytest has begun to print what its tests had printed."""

    def begin(self, line: int) -> None:
        """pytest begins, or says how many tests it has collected."""
        self.since = self.since or line
        self.captured = False

    def capture(self) -> None:
        """What follows was printed by tests."""
        self.captured = True

    def pass_lines(self, batch: Iterable[bytes]) -> None:
        """A step or a loss is of a training: the summary that comes answers for nothing any more."""
        if self.since and any(STEP.search(raw[-400:]) or LOSS.search(raw[-400:]) for raw in batch):
            self.since = 0

    def end(self) -> int:
        """The summary: the first line it answers for, 0 where it answers for none."""
        since, self.since, self.captured = self.since, 0, False
        return since
