"""The largest values of a module, batch by batch -> whether they grow, and when they reach the limit. Pure, flat memory."""

import math
from dataclasses import dataclass

CRITICAL = (636.62, 31.60, 12.92, 8.610, 6.869, 5.959, 5.408, 5.041, 4.781, 4.587)
"""Student's t, two-sided, at 99.9 %, for 1 to 10 degrees of freedom: a model has hundreds of modules, and none
of them may raise a false alarm."""
BEYOND_TEN, MANY = 4.587, 30
CRITICAL_MANY = 3.646
FEWEST = 3
HORIZON = 10
"""A prediction reaches at most this many times as far as the batches that were seen."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Growth: ``doubles_every`` so many batches; ``reaches_in``: batches after the last until the limit, at this pace."""

    doubles_every: float
    reaches_in: float


@dataclass
class Growth:
    """Sums of a least-squares line through log2 of the largest value over the batch number (Draper and Smith, chapter 1)."""

    count: int = 0
    first: int = 0
    last: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, batch: int, absmax: float) -> None:
        """Add a batch. Zeros and infinities say nothing about growth and are left out."""
        if absmax <= 0 or not math.isfinite(absmax):
            return
        if not self.count:
            self.first = batch
        self.last = batch
        x, y = float(batch - self.first), math.log2(absmax)
        self.count += 1
        self.x, self.y = self.x + x, self.y + y
        self.xx, self.xy, self.yy = self.xx + x * x, self.xy + x * y, self.yy + y * y

    def trend(self, limit: float) -> Trend | None:
        """The growth, if it is significant and reaches the limit within the horizon; else None.

        >>> growth = Growth()
        >>> for batch in range(6):
        ...     growth.add(batch, 2.0 ** batch)
        >>> growth.trend(1024.0)
        Trend(doubles_every=1.0, reaches_in=5.0)
        """
        if self.count < FEWEST:
            return None
        spread = self.xx - self.x * self.x / self.count
        if spread <= 0:
            return None
        slope = (self.xy - self.x * self.y / self.count) / spread
        if slope <= 0 or not self._is_significant(slope, spread):
            return None
        now = self.y / self.count + slope * ((self.last - self.first) - self.x / self.count)
        left = (math.log2(limit) - now) / slope
        if left <= 0 or left > HORIZON * (self.last - self.first + 1):
            return None
        return Trend(doubles_every=1 / slope, reaches_in=left)

    def _is_significant(self, slope: float, spread: float) -> bool:
        """Whether the slope is more than noise: t = slope / its standard error."""
        freedom = self.count - 2
        total = self.yy - self.y * self.y / self.count
        rest = max(total - slope * slope * spread, 1e-12 * abs(total))
        error = math.sqrt(rest / freedom / spread)
        return error == 0 or slope / error > critical(freedom)


def critical(freedom: int) -> float:
    """The least t that is significant.

    >>> critical(1), critical(4), critical(20), critical(500)
    (636.62, 8.61, 4.587, 3.646)
    """
    if freedom <= len(CRITICAL):
        return CRITICAL[freedom - 1]
    return BEYOND_TEN if freedom < MANY else CRITICAL_MANY
