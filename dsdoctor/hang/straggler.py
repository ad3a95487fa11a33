"""When the ranks of a node came to the same collectives -> which rank the others wait for again and again. Judges, never looks.

Only ranks of one node are compared: clocks of two nodes differ by more than the milliseconds that are asked for here.
"""

import array
import base64
import binascii
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.hang.activity import StackActivity, activity_in
from dsdoctor.hang.local_rank import Node
from dsdoctor.hang.models import GroupArrivals, RankArrivals, RankView
from dsdoctor.hang.stacks import collective_in, frame_text, own_frame
from dsdoctor.rules import book

ARRIVAL_UNIT_SECONDS = 1e-4
"""Seconds in which arrivals are told."""
MIN_LATE_SECONDS = 1e-3
"""Seconds by which a last rank must be later than the one before it to count."""
MIN_LOST_SHARE, MIN_LEAD, MAX_CHANCE, MIN_WINDOWS = 0.05, 2.0, 1e-6, 3
"""A rank straggles that cost the others so much of the time, so many times more than any other rank did, which it would by
chance seldom be, in so many looks."""


@dataclass
class Lateness:
    """What each rank has cost the others so far, as far as it was looked at."""

    seconds: float = 0.0
    windows: int = 0
    least: int = 1 << 30
    lost: Counter[int] = field(default_factory=Counter)
    late: Counter[int] = field(default_factory=Counter)
    top: Counter[int] = field(default_factory=Counter)
    _last: dict[str, int] = field(default_factory=dict)

    def add(self, arrivals: Mapping[int, RankArrivals]) -> None:
        """Compare what all ranks of the node tell of the same moment."""
        groups: dict[str, dict[int, dict[int, float]]] = {}
        for rank, told in arrivals.items():
            for group in told.groups:
                groups.setdefault(group.name, {})[rank] = times_of(group)
        lost: Counter[int] = Counter()
        begin, end = math.inf, -math.inf
        for name, members in groups.items():
            common = set.intersection(*(set(times) for times in members.values())) if len(members) > 1 else set()
            for sequence in sorted(number for number in common if number > self._last.get(name, 0)):
                order = sorted((times[sequence], rank) for rank, times in members.items())
                begin, end = min(begin, order[0][0]), max(end, order[-1][0])
                if (delay := order[-1][0] - order[-2][0]) >= MIN_LATE_SECONDS:
                    lost[order[-1][1]] += delay  # type: ignore[assignment]
                    self.late[order[-1][1]] += 1
                    self.least = min(self.least, len(order))
            self._last[name] = max(common, default=self._last.get(name, 0))
        if end <= begin:
            return
        self.seconds, self.windows = self.seconds + end - begin, self.windows + 1
        self.lost.update(lost)
        if lost:
            self.top[lost.most_common(1)[0][0]] += 1

    def straggler(self) -> int | None:
        """The rank that the others wait for again and again; None where there is none, or ranks take turns.

        >>> turns, one = Lateness(seconds=60.0, least=4), Lateness(seconds=60.0, least=4)
        >>> turns.lost.update({0: 6.0, 1: 7.0}); turns.late.update({0: 60, 1: 70}); turns.top.update({0: 4, 1: 5})
        >>> one.lost.update({0: 0.1, 1: 7.0}); one.late.update({0: 5, 1: 70}); one.top.update({1: 5})
        >>> turns.straggler(), one.straggler()
        (None, 1)
        """
        if not self.lost or not self.seconds:
            return None
        (rank, lost), *others = self.lost.most_common(2)
        costs = lost >= MIN_LOST_SHARE * self.seconds and lost >= MIN_LEAD * max(
            (each for _, each in others), default=0.0
        )
        seldom = chance(self.late[rank], self.late.total(), 1 / self.least) <= MAX_CHANCE
        return rank if costs and seldom and self.top[rank] >= MIN_WINDOWS else None


class LateSpot(NamedTuple):
    """A line of the user's at which a late rank was seen, and what it was busy with there."""

    activity: StackActivity
    line: str

    @property
    def words(self) -> str:
        """As the middle of a sentence."""
        return f"{f'{self.activity.words} ' if self.activity.words else ''}at {self.line}"


class Comparison:
    """The ranks of a node, compared again and again: one that is late is reported once, and once more at the end of the run."""

    def __init__(self) -> None:
        self._lateness = Lateness()
        self._number = -1
        self._is_reported = False

    def look(self, node: Node) -> Finding | None:
        """Compare what the ranks tell, when all of them do; a finding when one is seen to be late again and again."""
        ranks = node.living()
        told = {rank.rank: arrivals for rank in ranks if (arrivals := rank.arrivals()) is not None}
        numbers = {arrivals.number for arrivals in told.values()}
        if len(told) < max(2, len(ranks)) or len(numbers) > 1 or self._number in numbers:
            return None
        self._number = numbers.pop()
        self._lateness.add(told)
        late = self._lateness.straggler()
        if late is None or self._is_reported:
            return None
        self._is_reported = True
        return rank_late_again(self._lateness, late, node.ranks[late].view(), told[late])

    def summary(self) -> str:
        """A line for the end of a run that had a straggler to its end; "" for none."""
        late = self._lateness.straggler() if self._is_reported else None
        return "" if late is None else summary_line(self._lateness, late)


def times_of(group: GroupArrivals) -> dict[int, float]:
    """Sequence numbers with the seconds at which they were called; empty for what is damaged."""
    numbers = array.array("I")
    try:
        numbers.frombytes(base64.b64decode(group.calls, validate=True))
    except (binascii.Error, ValueError):
        return {}
    pairs = zip(numbers[::2], numbers[1::2], strict=False)
    return {group.sequence + number: group.created / 1e9 + when * ARRIVAL_UNIT_SECONDS for number, when in pairs}


def chance(found: int, of: int, each: float) -> float:
    """How likely so many or more are, where each has this probability.

    >>> round(chance(9, 10, 0.5), 4)
    0.0107
    """
    logs = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(each)
        + (of - k) * math.log1p(-each)
        for k in range(found, of + 1)
    )
    return min(1.0, sum(math.exp(each) for each in logs))


def rank_late_again(lateness: Lateness, rank: int, view: RankView, told: RankArrivals) -> Finding:
    """The other ranks of a node wait for the same rank again and again, though nothing hangs."""
    share = lateness.lost[rank] / lateness.seconds
    seen = where_seen(told)
    return book.finding(
        "rank-late-again",
        Severity.WARNING,
        case="data" if seen and seen[0].activity.waits_for_data else "",
        evidence=(
            f"it was last by {MIN_LATE_SECONDS * 1000:.0f} ms or more in {lateness.late[rank]} of {lateness.late.total()} "
            f"collectives that had to wait for one rank, in {lateness.seconds:.0f} s sampled",
            *(f"rank {rank} {each.words}" for each in seen[1:]),
        ),
        rank=rank,
        host=view.host,
        pid=view.pid,
        share=f"{share:.0%}",
        where=f"; seen most often: {seen[0].words}" if seen else "",
    )


def summary_line(lateness: Lateness, rank: int) -> str:
    """At the end of a run that had a straggler."""
    share = lateness.lost[rank] / lateness.seconds
    return (
        f"over the run, the other ranks of this node waited for rank {rank} {share:.0%} of the time "
        f"({lateness.seconds:.0f} s sampled)"
    )


def where_seen(told: RankArrivals) -> list[LateSpot]:
    """Where a rank was seen outside of collectives, the two lines at which it was most often."""
    looks: Counter[LateSpot] = Counter()
    for seen in told.stacks:
        own = own_frame(seen.frames)
        if own is not None and not collective_in(seen.frames):
            looks[LateSpot(activity_in(seen.frames), frame_text(own))] += seen.looks
    return [spot for spot, _ in looks.most_common(2)]
