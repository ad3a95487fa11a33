"""What was timed -> which collectives are below their link, which pairs are slow, which messages late. Judges figures only."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dsdoctor.comm.models import named
from dsdoctor.comm.results import Held, Limit, Pace, PairTime, Reach, Speed
from dsdoctor.comm.speed import rank_checks
from dsdoctor.comm.speed.pace import shared_rank, slower, within
from dsdoctor.comm.speed.speed import BUSY, TIMED
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

# The time of a message whatever its size, and the network's own round trip -> who is late, or which way is long. Judges.


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
    evidence = tuple(_evidence(pair, trips, hosts) for pair in sorted(late, key=lambda pair: -pair.latency)[:MAX_SHOWN])
    if trip is None:
        yield book.finding(
            "messages-late",
            Severity.WARNING,
            case="unmeasured",
            evidence=evidence,
            ranks=f"{one} and {other}" if shared is None else named((shared,), hosts),
            took=took,
        )
    elif near:
        yield book.finding(
            "messages-late",
            Severity.WARNING,
            case="pair" if shared is None else "",
            evidence=evidence,
            rank=one if shared is None else named((shared,), hosts),
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
            rank=one if shared is None else named((shared,), hosts),
            other=other,
            trip=f"{1e3 * trip:.3g} ms",
        )


def _evidence(pair: PairTime, trips: Mapping[Pair, float], hosts: Sequence[str]) -> str:
    trip = trips.get((pair.source, pair.target))
    network = "not measured" if trip is None else f"{1e3 * trip:.3g} ms"
    both = f"{named((pair.source,), hosts)} - {named((pair.target,), hosts)}"
    return f"{both}: one byte there and back in {2e3 * pair.latency:.3g} ms, network {network}"


# Judges what was timed: collectives, pairs and paces, compared with the limit of the links -> what is slow. Looks at
# nothing.


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
    ranks = rank_checks.Ranks(paces=measured.paces, held=measured.held, starts=measured.starts, hosts=measured.hosts)
    alone = [finding for check in rank_checks.CHECKS for finding in check(ranks)]
    return (*late, *(finding for check in CHECKS for finding in check(measured)), *alone)


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


CHECKS = (collective_below_limit, pair_is_slow)
