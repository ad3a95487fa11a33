"""What was timed -> which collectives and pairs are slow, which messages late, which rank is slow by itself. Judges, never looks.

Whoever takes long may have been slow, or may have waited for a processor; and whoever shares processors with another rank may
have waited for that one. Only what cannot be chance is said of a rank.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from dsdoctor.comm.models import named
from dsdoctor.comm.results import Held, Limit, Pace, PairTime, Reach, Speed
from dsdoctor.comm.speed.pace import shared_rank, slower, within
from dsdoctor.comm.speed.speed import BUSY, TIMED
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more_lines
from dsdoctor.rules import book


class Figure:
    """One figure of each rank; the questions leave some ranks out, in the time of those. At least one rank must be left.

    It is sorted once, so that each of thousands of ranks can be compared with its others.

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
        blames=[held.rank for held in found],
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
            blames=[pace.rank for pace in paces],
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
            blames=(pace.rank,),
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


RANK_CHECKS = (cpu_quota_used_up, rank_lacks_processor, rank_straggles, processors_busy)


LATE_SECONDS = 0.01
"""Seconds one way, at best of several, from which a message is late; 16 ranks on two processors stay below it."""
TIMES = 10.0
"""So many times the usual of the other pairs, or the network's round trip."""
MAX_SHOWN = 6
Pair = tuple[int, int]


def round_trips(reaches: Sequence[Reach]) -> dict[Pair, float]:
    """The kernel's round trip between two ranks, the lower first, in seconds; the shorter of the two directions."""
    found: dict[Pair, float] = {}
    for reach in reaches:
        if reach.rtt is not None:
            pair = min(reach.source, reach.target), max(reach.source, reach.target)
            found[pair] = min(reach.rtt, found.get(pair, reach.rtt))
    return found


def late_pairs(pairs: Sequence[PairTime]) -> tuple[PairTime, ...]:
    """Pairs whose messages are late whatever their size, measured against a third of the pairs, where there are several."""
    known = sorted(pair.latency for pair in pairs if pair.latency)
    usual = known[(len(known) - 1) // 3] if len(known) > 1 else 0.0
    return tuple(pair for pair in pairs if pair.latency >= LATE_SECONDS and pair.latency > TIMES * usual)


def messages_late(pairs: Sequence[PairTime], trips: Mapping[Pair, float], hosts: Sequence[str]) -> Iterator[Finding]:
    """Messages between ranks take a time that does not depend on their size: who is late, as far as the figures decide."""
    late = late_pairs(pairs)
    if not late:
        return
    near = [pair for pair in late if 2 * pair.latency > TIMES * trips.get((pair.source, pair.target), float("inf"))]
    worst = max(near or late, key=lambda pair: pair.latency)
    one, other = named((worst.source,), hosts), named((worst.target,), hosts)
    took, trip = f"{2e3 * worst.latency:.3g} ms", trips.get((worst.source, worst.target))
    shared = shared_rank(near or late)
    blamed = (worst.source, worst.target) if shared is None else (shared,)
    evidence = tuple(_evidence(pair, trips, hosts) for pair in sorted(late, key=lambda pair: -pair.latency)[:MAX_SHOWN])
    if trip is None:
        yield book.finding(
            "messages-late",
            Severity.WARNING,
            case="unmeasured",
            evidence=evidence,
            blames=blamed,
            ranks=f"{one} and {other}" if shared is None else named(blamed, hosts),
            took=took,
        )
    elif near:
        yield book.finding(
            "messages-late",
            Severity.WARNING,
            case="pair" if shared is None else "",
            evidence=evidence,
            blames=blamed,
            rank=named(blamed[:1], hosts),
            other=other,
            took=took,
            trip=f"{1e3 * trip:.3g} ms",
        )
    else:
        yield book.finding(
            "messages-late",
            Severity.WARNING,
            case="far-pair" if shared is None else "far",
            evidence=evidence,
            blames=blamed,
            rank=named(blamed[:1], hosts),
            other=other,
            trip=f"{1e3 * trip:.3g} ms",
        )


def _evidence(pair: PairTime, trips: Mapping[Pair, float], hosts: Sequence[str]) -> str:
    trip = trips.get((pair.source, pair.target))
    network = "not measured" if trip is None else f"{1e3 * trip:.3g} ms"
    both = f"{named((pair.source,), hosts)} - {named((pair.target,), hosts)}"
    return f"{both}: one byte there and back in {2e3 * pair.latency:.3g} ms, network {network}"


GB = 1e9
LARGE = {"nccl": 64 << 20, "gloo": 1 << 20}
"""From this size on a collective can be expected to fill its links."""

FINE = {"nccl": 0.8, "gloo": 0.25}
"""The share of the limit that is reached where all is well; gloo is limited by the processors, not by the link."""

SLOW_PAIR = 3.0
"""From so many times slower than its kind a pair is not slow by chance; on two busy cores healthy pairs of gloo differ by
2.5 to 4."""

STAR = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything timed over all ranks; ``limit`` is what the slowest link between them can do, if that is known;
    ``starts``: the seconds that each rank waited for a processor until it came."""

    speeds: Sequence[Speed] = ()
    pairs: Sequence[PairTime] = ()
    paces: Sequence[Pace] = ()
    held: Sequence[Held] = ()
    starts: Mapping[int, float] = field(default_factory=dict)
    reaches: Sequence[Reach] = ()
    limit: Limit | None = None
    hosts: Sequence[str] = ()
    backend: str = "gloo"

    @property
    def slow_pairs(self) -> tuple[PairTime, ...]:
        """Pairs slower than their kind, or, across hosts, than an eighth of what the link between them can do.

        Not gloo within a host: that is memory and processors, and no network path. Not those whose messages are late whatever
        their size: of their bandwidth nothing is known.
        """
        least = self.limit.bandwidth / 8 if self.limit else 0.0
        bad = {*slower(self.pairs, self.hosts, SLOW_PAIR)}
        bad |= {pair for pair in self.pairs if not within(pair, self.hosts) and bandwidth(pair) < least}
        if self.backend == "gloo":
            bad = {pair for pair in bad if not within(pair, self.hosts) and bandwidth(pair) < BUSY}
        late = late_pairs(self.pairs)
        return tuple(pair for pair in self.pairs if pair in bad and pair not in late)


def bandwidth(pair: PairTime) -> float:
    """Bytes a second of one message."""
    return pair.size / pair.transfer if pair.seconds > 0 else float("inf")


def examine(measured: Measured) -> tuple[Finding, ...]:
    """All findings on what was timed."""
    late = messages_late(measured.pairs, round_trips(measured.reaches), measured.hosts)
    ranks = Ranks(paces=measured.paces, held=measured.held, starts=measured.starts, hosts=measured.hosts)
    alone = [finding for check in RANK_CHECKS for finding in check(ranks)]
    return (*late, *(finding for check in SPEED_CHECKS for finding in check(measured)), *alone)


def collective_below_limit(measured: Measured) -> Iterator[Finding]:
    """A collective moves much less than the links between the ranks can carry."""
    limit, backend = measured.limit, measured.backend
    if limit is None or backend not in FINE or (backend == "gloo" and len(set(measured.hosts)) < 2):
        return
    best = _best(measured.speeds, LARGE[backend])
    if not best or _fine(best[-1 if backend == "gloo" else 0].busbw, limit, backend):
        return
    worst, part = best[0], best[0].busbw / limit.bandwidth
    yield book.finding(
        "collective-below-limit",
        Severity.WARNING,
        case="half" if 0.4 <= part < 0.6 else "eighth" if 0.1 <= part < 0.15 else "",
        evidence=(*(_beside(speed, limit) for speed in best[:MAX_SHOWN]), f"limit: {limit.because}"),
        steps=None if backend == "nccl" else (),
        op=worst.op,
        rate=f"{worst.busbw / GB:.3g}",
        link=limit.link,
        share=f"{part:.0%}",
        limit=f"{limit.bandwidth / GB:.3g}",
    )


def pair_is_slow(measured: Measured) -> Iterator[Finding]:
    """Messages between two ranks take several times as long as between the others."""
    slow = measured.slow_pairs
    if not slow:
        return
    place = _centre(slow, measured)
    worst = max(slow, key=lambda pair: pair.seconds)
    usual = [
        bandwidth(pair)
        for pair in measured.pairs
        if pair not in slow and within(pair, measured.hosts) == within(worst, measured.hosts)
    ]
    yield book.finding(
        "pair-is-slow",
        Severity.WARNING,
        case=("" if usual else "all-slow") if place else ("path" if usual else "only-path"),
        evidence=tuple(_pair(pair, measured) for pair in sorted(slow, key=lambda pair: -pair.seconds)[:MAX_SHOWN]),
        place=place,
        one=named((worst.source,), measured.hosts),
        other=named((worst.target,), measured.hosts),
        rate=f"{bandwidth(worst) / 1e6:.3g}",
        usual=f"{median(usual) / 1e6:.3g}" if usual else None,
    )


def _fine(busbw: float, limit: Limit, backend: str) -> bool:
    """Whether a bandwidth is what can be expected; of gloo never more than what busy processors give."""
    expected = FINE[backend] * limit.bandwidth
    return busbw >= (min(expected, BUSY) if backend == "gloo" else expected)


def _best(speeds: Sequence[Speed], least: int) -> list[Speed]:
    """The best of each collective among its large sizes, the slowest first."""
    ordered = sorted((speed for speed in speeds if speed.size >= least), key=lambda speed: speed.busbw)
    return sorted({speed.op: speed for speed in ordered}.values(), key=lambda speed: speed.busbw)


def _beside(speed: Speed, limit: Limit) -> str:
    return (
        f"{speed.op} of {speed.size} bytes: {speed.seconds * 1e3:.3g} ms on the slowest rank ({speed.slowest}), busbw"
        f" {speed.busbw / GB:.3g} GB/s, {speed.busbw / limit.bandwidth:.0%} of the limit ({TIMED[speed.op].formula})"
    )


def _pair(pair: PairTime, measured: Measured) -> str:
    return (
        f"{named((pair.source,), measured.hosts)} - {named((pair.target,), measured.hosts)}: {bandwidth(pair) / 1e6:.3g} MB/s"
        f" ({pair.size} bytes in {pair.seconds * 1e3:.3g} ms)"
    )


def _centre(slow: Sequence[PairTime], measured: Measured) -> str | None:
    """The rank that all of several slow pairs have in common, or else the host; None where they share nothing."""
    if len(slow) < STAR:
        return None
    if (shared := shared_rank(slow)) is not None:
        return named((shared,), measured.hosts)
    place = dict(enumerate(measured.hosts))
    hosts = Counter(host for pair in slow for host in {place.get(pair.source), place.get(pair.target)} if host)
    common = [host for host, count in hosts.items() if count == len(slow)]
    return f"host {common[0]}" if len(common) == 1 else None


SPEED_CHECKS = (collective_below_limit, pair_is_slow)
