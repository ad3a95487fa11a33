"""The lines of a test suite -> whether its summary answers for what stands above it.

pytest ends with how many tests passed, and then what its tests printed was expected. That is true only of what was printed
since pytest began, and only if no training ran, and no launcher ended badly, between: else the summary is of something else.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsdoctor.diagnosis.exits import Exit
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Line
from dsdoctor.diagnosis.stages import STEP

LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?(?:\d|-?nan\b)", re.IGNORECASE)
TROUBLES = (Event.FAILED, Event.EXITED, Event.EXCEPTION, Event.TRACEBACK, Event.COMPLAINED, Event.GPU_FAULT)
NEAR_THE_END = 8
"""So few lines stand at most below the summary of a suite by which the log ended."""


@dataclass
class Suite:
    """The test suite that is open. ``since``: the line on which pytest began, 0 where none is known to have."""

    since: int = 0
    captured: bool = False
    """Whether pytest has begun to print what its tests had printed."""

    def note(self, event: Event, line: int) -> None:
        """pytest begins, says how many tests it has collected, or prints what its tests had printed."""
        self.since = self.since or (line if event is Event.SUITE_BEGAN else 0)
        self.captured = event is Event.SUITE_CAPTURED

    def pass_lines(self, batch: Iterable[bytes]) -> None:
        """A step or a loss is of a training: the summary that comes answers for nothing any more."""
        if self.since and any(STEP.search(raw[-400:]) or LOSS.search(raw[-400:]) for raw in batch):
            self.since = 0

    def answers(
        self, first: Mapping[Event, Line], last: Mapping[Event, Line], hits: Sequence[int], exits: Sequence[Exit]
    ) -> bool:
        """Whether the summary of a suite that passed answers for all that went wrong: nothing had before it began."""
        captured, since, self.since, self.captured = self.captured, self.since, 0, False
        ends = [last[event].number for event in (Event.FAILED, Event.EXITED) if event in last]
        ends += [ended.line for ended in exits]
        if not since or (not captured and max(ends, default=0) > since):
            return False
        return all(line > since for line in (*hits, *(first[event].number for event in TROUBLES if event in first)))
