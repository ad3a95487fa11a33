"""Lines with losses and gradient norms -> the series of those that are no numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dsdoctor.diagnosis.clean import last_segment
from dsdoctor.diagnosis.stages import last_step

NAN_LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?-?nan\b", re.IGNORECASE)
NAN_NORM = re.compile(rb"\bgrad_?(?:ient_?)?norm['\"]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?-?nan\b", re.IGNORECASE)
ZERO_LOSS = re.compile(rb"\bloss['\"]?\s{0,3}[:=]\s{0,3}['\"]?0(?:\.0{1,9})?(?![\d.])", re.IGNORECASE)
FINITE = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?\d{1,9}(?:\.\d{1,20})?\b", re.IGNORECASE)


@dataclass
class Series:
    """Losses, or gradient norms, that are no numbers."""

    count: int = 0
    first: int = 0
    last: int = 0
    text: str = ""
    step: int | None = None
    of_norms: bool = False
    before: str = ""
    """The step before, where its gradient was no number and its loss was one."""

    def note(self, raw: bytes, line: int, recent: Sequence[bytes]) -> None:
        """A line with nan, perhaps that of a loss. ``recent``: the lines before it."""
        of_norms = not NAN_LOSS.search(raw)
        if of_norms and not NAN_NORM.search(raw):
            return
        if of_norms and FINITE.search(raw) and not ZERO_LOSS.search(raw):
            if not self.count:
                self.before = last_segment(raw)[:200]
            return  # why: fp16 finds its loss scale by steps whose gradients overflow, and skips them
        if not self.count:
            step = last_step([raw, *reversed(recent)])
            self.first, self.text, self.step, self.of_norms = line, last_segment(raw)[:200], step, of_norms
        self.count += 1
        self.last = line

    def finite_again(self, last_line: int, recent: Sequence[bytes]) -> bool:
        """Whether a loss after the last nan is a number."""
        after = list(recent)[-(last_line - self.last) :] if last_line > self.last else []
        return any(FINITE.search(raw) and not NAN_LOSS.search(raw) and not ZERO_LOSS.search(raw) for raw in after)
