"""Ranks that did the same work -> which is slow by itself, and which is kept from its processors. Judges, never looks.

Whoever takes long may have been slow, or may have waited for a processor; and whoever shares processors with another rank may
have waited for that one. Only what cannot be chance is said of a rank.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dsdoctor.comm.models import named
from dsdoctor.comm.results import Held, Pace
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more_lines
from dsdoctor.rules import book

# A figure of all ranks -> that of all but some. It is sorted once, so that each of thousands of ranks can be compared with its
# others.


class Figure:
    """One figure of each rank; the questions leave some ranks out, in the time of those. At least one rank must be left.

    >>> Figure({0: 5.0, 1: 1.0, 2: 3.0, 3: 9.0}).median({3}), Figure({0: 5.0, 1: 1.0, 2: 3.0}).median({1, 7})
    (3.0, 4.0)
    """

    def __init__(self, by_rank: Mapping[int, float]) -> None:
        self._by_rank = by_rank
        self._sorted = sorted((figure, rank) for rank, figure in by_rank.items())

    def least(self, without: Iterable[int]) -> float:
        """The smallest of the others."""
        return self._at(0, self._places(without))

    def most(self, without: Iterable[int]) -> float:
        """The largest of the others."""
        places = self._places(without)
        return self._at(len(self._sorted) - len(places) - 1, places)

    def median(self, without: Iterable[int]) -> float:
        """The median of the others."""
        places = self._places(without)
        left = len(self._sorted) - len(places)
        return (self._at((left - 1) // 2, places) + self._at(left // 2, places)) / 2

    def _places(self, without: Iterable[int]) -> list[int]:
        """Where the ranks that are left out stand in the order."""
        those = {rank for rank in without if rank in self._by_rank}
        return sorted(bisect_left(self._sorted, (self._by_rank[rank], rank)) for rank in those)

    def _at(self, index: int, left_out: list[int]) -> float:
        for place in left_out:
            if place > index:
                break
            index += 1
        return self._sorted[index][0]


SLOW_WORK, SLOWER_WORK = 2.0, 1.25
SLOW_PROCESSOR = 1.5
"""From so many times the processor time of the others a rank's processor is slow. What counts is the best of fifteen; two hardware
threads of one core cost each other less."""
LATE_SHARE = 0.2
"""A rank is late when the others wait for it longer than this part of the work that goes before."""
DELAYED, OTHERS_LESS = 0.3, 2.0
"""The part of its time in which a rank waits for a processor that is no noise, and how much less the others wait."""
LONG_START, TIMES_LONGER = 2.0, 2.5
"""Seconds that a rank waited for a processor while it started, and so many times as long as the others: all import the same."""
THROTTLED = 0.2
"""The part of the periods in which a quota was used up that is told."""
MIN_PERIODS = 5
MAX_LINES = 6


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What every rank did by itself, and what its control group took from it; ``starts``: the seconds that each
    waited for a processor until it came to the rendezvous."""

    paces: Sequence[Pace] = ()
    held: Sequence[Held] = ()
    starts: Mapping[int, float] = field(default_factory=dict)
    hosts: Sequence[str] = ()

    @cached_property
    def throttled(self) -> tuple[Held, ...]:
        """Those whose quota was used up in more periods than chance explains."""
        return tuple(
            held for held in self.held if held.periods >= MIN_PERIODS and held.throttled > THROTTLED * held.periods
        )

    def known(self, pace: Pace) -> bool:
        """Whether a rank's quota explains what it does."""
        return pace.rank in self._throttled_ranks

    @cached_property
    def _throttled_ranks(self) -> frozenset[int]:
        return frozenset(held.rank for held in self.throttled)

    @cached_property
    def _by_rank(self) -> dict[int, Pace]:
        return {pace.rank: pace for pace in self.paces}

    @cached_property
    def compute(self) -> Figure:
        """The seconds of each rank's piece of work."""
        return Figure({rank: pace.compute for rank, pace in self._by_rank.items()})

    @cached_property
    def cpu(self) -> Figure:
        """The seconds of processor time of that work."""
        return Figure({rank: pace.cpu for rank, pace in self._by_rank.items()})

    @cached_property
    def waited(self) -> Figure:
        """The seconds that each waits at a barrier."""
        return Figure({rank: pace.waited for rank, pace in self._by_rank.items()})

    @cached_property
    def delayed(self) -> Figure:
        """The part of the time in which each waits for a processor."""
        return Figure({rank: pace.delayed for rank, pace in self._by_rank.items()})

    @cached_property
    def began(self) -> Figure:
        """The seconds that each waited for a processor until it came."""
        return Figure({rank: self.starts.get(rank, 0.0) for rank in self._by_rank})

    def alone(self, pace: Pace) -> bool:
        """Whether there is no rank that a rank can be compared with."""
        return len(self._by_rank.keys() & _same(pace)) == len(self._by_rank)


def _same(pace: Pace) -> set[int]:
    """The ranks that a rank cannot be compared with: itself, and those that are given the same processors."""
    return {pace.rank, *pace.equals}


def cpu_quota_used_up(ranks: Ranks) -> Iterator[Finding]:
    """The quota of processors of a rank's control group was used up while it exchanged, and the kernel made it wait."""
    found = ranks.throttled
    if not found:
        return
    worst = max(found, key=lambda held: held.throttled / held.periods)
    lines = [
        f"rank {held.rank}: its {held.quota:.3g} CPUs were used up in {held.throttled} of {held.periods} periods"
        for held in found
    ]
    yield book.finding(
        "cpu-quota-used-up",
        Severity.WARNING,
        evidence=tuple(and_more_lines(lines, MAX_LINES, of="ranks")) if len(found) > 1 else (),
        ranks=named(tuple(held.rank for held in found), ranks.hosts),
        processors=f"{worst.quota:.3g}",
        throttled=worst.throttled,
        periods=worst.periods,
    )


def rank_lacks_processor(ranks: Ranks) -> Iterator[Finding]:
    """A rank often waits until it is given a processor; ranks on other processors do not."""
    found: dict[str, list[Pace]] = defaultdict(list)
    for pace in ranks.paces:
        if not ranks.known(pace) and _lacks(pace, ranks):
            found[_host(pace, ranks)].append(pace)
    for paces in found.values():
        worst = max(paces, key=lambda pace: pace.delayed)
        same = _same(worst)
        mine, theirs = ranks.starts.get(worst.rank, 0.0), ranks.began.median(same)
        share, usual = f"{worst.delayed:.0%}", f"{ranks.delayed.median(same):.0%}"
        now = _less_now(worst, ranks)
        other = (
            f"it waited {mine:.1f} s for a CPU during startup, the others {theirs:.1f} s"
            if now
            else f"it waited for a CPU {share} of the time, the others {usual}"
        )
        yield book.finding(
            "rank-lacks-processor",
            Severity.WARNING,
            case="" if now else "at-start",
            evidence=(
                other,
                f"{_ms(worst.compute)} for work that takes the others {_ms(ranks.compute.median(same))} (medians)",
            ),
            ranks=named(tuple(pace.rank for pace in paces), ranks.hosts),
            share=share,
            usual=usual,
            seconds=f"{mine:.1f}",
            others=f"{theirs:.1f}",
            host=_host(worst, ranks),
        )


def processors_busy(ranks: Ranks) -> Iterator[Finding]:
    """Ranks wait long until they are given a processor, and nothing tells them from the others: their hosts are busy."""
    busy = [pace for pace in ranks.paces if pace.delayed >= DELAYED and not ranks.known(pace)]
    busy = sorted((pace for pace in busy if not _lacks(pace, ranks)), key=lambda pace: pace.rank)
    if busy:
        shares = [pace.delayed for pace in busy]
        yield book.finding(
            "processors-busy",
            Severity.NOTE,
            evidence=("the measured speeds are those of a busy machine",),
            ranks=named(tuple(pace.rank for pace in busy), ranks.hosts),
            share=" to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares)))),
        )


def _lacks(pace: Pace, ranks: Ranks) -> bool:
    """Whether a rank waits for a processor, and the ranks on others do not, or did not while they started."""
    if pace.delayed < DELAYED or ranks.alone(pace):
        return False
    began = ranks.starts.get(pace.rank, 0.0)
    return _less_now(pace, ranks) or (began > LONG_START and began > TIMES_LONGER * ranks.began.median(_same(pace)))


def _less_now(pace: Pace, ranks: Ranks) -> bool:
    """Whether the others wait far less than a rank, and work faster."""
    same = _same(pace)
    less = ranks.delayed.median(same) * OTHERS_LESS <= pace.delayed
    return less and pace.compute > SLOWER_WORK * ranks.compute.median(same)


def rank_straggles(ranks: Ranks) -> Iterator[Finding]:
    """A rank is slower than the others by itself."""
    for pace in ranks.paces:
        if ranks.known(pace) or _lacks(pace, ranks) or not _late(pace, ranks):
            continue
        processor, same = bool(pace.cpu), _same(pace)
        mine, theirs = (pace.cpu, ranks.cpu.median(same)) if processor else (pace.compute, ranks.compute.median(same))
        wait = ranks.waited.median(same)
        yield book.finding(
            "rank-straggles",
            Severity.WARNING,
            case="" if processor else "gpu",
            evidence=(f"it waits {_ms(pace.waited)} at a barrier, the others {_ms(wait)} (medians)",),
            ranks=named((pace.rank,), ranks.hosts),
            took=_ms(mine),
            usual=_ms(theirs),
            host=_host(pace, ranks),
        )


def _late(pace: Pace, ranks: Ranks) -> bool:
    """Whether a rank works slowly and the others wait for it; two ranks of which each could be the slow one decide nothing."""
    same = _same(pace)
    if ranks.alone(pace) or pace.waited >= ranks.waited.least(same):
        return False
    if pace.cpu:
        return pace.cpu > SLOW_PROCESSOR * ranks.cpu.most(same)
    work, wait = ranks.compute.median(same), ranks.waited.median(same)
    late = wait - pace.waited > LATE_SHARE * work and pace.compute > SLOWER_WORK * work
    return late or pace.compute > SLOW_WORK * work


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _host(pace: Pace, ranks: Ranks) -> str:
    return ranks.hosts[pace.rank] if pace.rank < len(ranks.hosts) else ""


CHECKS = (cpu_quota_used_up, rank_lacks_processor, rank_straggles, processors_busy)
