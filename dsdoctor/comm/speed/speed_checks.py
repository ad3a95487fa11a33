"""Two tests of the same ranks, now and before -> which collectives are slower, and between which hosts. Judges figures only."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dsdoctor.comm.models import named
from dsdoctor.comm.results import Held, Limit, Pace, PairTime, Reach, Report, Speed
from dsdoctor.comm.speed import rank_checks
from dsdoctor.comm.speed.pace import shared_rank, slower, within
from dsdoctor.comm.speed.speed import BUSY, TIMED
from dsdoctor.core.finding import Finding, Step, step

# The time of a message whatever its size, and the network's own round trip -> who is late, or which way is long. Judges.


LATE = 0.01
"""Seconds one way, at best of several, from which a message is late; 16 ranks on two processors stay below it."""
TIMES = 10.0
"""So many times the usual of the other pairs, or the network's round trip."""
SHOWN = 6
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
    return tuple(pair for pair in pairs if pair.latency >= LATE and pair.latency > TIMES * usual)


def messages_late(pairs: Sequence[PairTime], trips: Mapping[Pair, float], hosts: Sequence[str]) -> Iterator[Finding]:
    """Messages between ranks take a time that does not depend on their size.

    What counts is the best of several messages of one byte there and back, halved. It is compared with the other pairs, and
    with the round trip that the kernel measured on a plain TCP connection between the same two ranks. Where that is short,
    the network is not what takes the time: one of the two ranks is late with each message. Where it is long too, the way is.

    Why it matters: training waits for it at every collective, however small, and no bandwidth figure shows it.

    How to fix it: for a late rank see what else runs on its host, which cores it may use, and whether its process is
    throttled (a container's CPU limit). For a long way see the route and the interface that the ranks use.

        $ cat /sys/fs/cgroup/cpu.stat
        $ taskset -cp $$
        $ ip route get OTHER_HOST

    Since: 0.1
    """
    late = late_pairs(pairs)
    if not late:
        return
    near = [pair for pair in late if 2 * pair.latency > TIMES * trips.get((pair.source, pair.target), float("inf"))]
    yield Finding.warning(
        "messages-late",
        _title(near, late, trips, hosts),
        evidence=tuple(_evidence(pair, trips, hosts) for pair in sorted(late, key=lambda pair: -pair.latency)[:SHOWN]),
        fix="see what else runs on that host, and its limit of processors" if near else "see the route between the two",
        steps=(step("cat /sys/fs/cgroup/cpu.stat"), step("top -b -n 1 | head -20")) if near else (step("ip route"),),
    )


def _title(
    near: Sequence[PairTime], late: Sequence[PairTime], trips: Mapping[Pair, float], hosts: Sequence[str]
) -> str:
    """Who is late, as far as the figures decide. ``near``: the late pairs between which the network is quick."""
    worst = max(near or late, key=lambda pair: pair.latency)
    took, trip = f"{2e3 * worst.latency:.3g} ms", trips.get((worst.source, worst.target))
    shared = shared_rank(near or late)
    who = None if shared is None else named((shared,), hosts)
    several = f"{named((worst.source,), hosts)} and {named((worst.target,), hosts)}"
    if trip is None:
        return (
            f"a message between {who or several} and back takes {took}, whatever its size; rank or network: not known"
        )
    if not near:
        way = f"the network to {who}" if who else f"the network between {several}"
        return f"{way} takes {1e3 * trip:.3g} ms there and back, whatever the size"
    network = f"the network's own round trip is {1e3 * trip:.3g} ms"
    late_one = f"{who} is late with every message" if who else f"{several}: one of the two is late with every message"
    return f"{late_one}: {took} there and back whatever its size, while {network}"


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

HALF = 0.5
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
    """A collective moves much less than the links between the ranks can carry.

    busbw (nccl-tests' definition) is comparable with the speed of a single link, whatever the number of ranks. With
    nccl and large messages 80 % of the limit is usual. gloo is bound by the processors, so it is reported only where
    its best collective stays below a quarter of the network link and below 250 MB/s.

    Why it matters: half of the limit hints at one of two rails or a link at half its width, an eighth at one of eight
    network adapters. Every step of the training waits for it.

    How to fix it: look in NCCL's log for the interface and transport of each rank, and at the slow pairs, if there are
    any.

        $ NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH dsdoctor comm --full

    Since: 0.1
    """
    limit, backend = measured.limit, measured.backend
    if limit is None or backend not in FINE or (backend == "gloo" and len(set(measured.hosts)) < 2):
        return
    best = _best(measured.speeds, LARGE[backend])
    if not best or _fine(best[-1 if backend == "gloo" else 0].busbw, limit, backend):
        return
    worst, part = best[0], best[0].busbw / limit.bandwidth
    much = "less than half of" if part < HALF else "less than"
    yield Finding.warning(
        "collective-below-limit",
        f"{worst.op} moves {worst.busbw / GB:.3g} GB/s, {much} what {limit.link} carries: {limit.bandwidth / GB:.3g} GB/s",
        evidence=(*(_beside(speed, limit) for speed in best[:SHOWN]), f"limit: {limit.because}"),
        fix="see which interface and transport each rank takes; " + _ratio(part),
        steps=(step("NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH dsdoctor comm --full"),)
        if backend == "nccl"
        else (),
    )


def pair_is_slow(measured: Measured) -> Iterator[Finding]:
    """Messages between two ranks take several times as long as between the others.

    What counts is the best of several messages of 1 MiB there and back, halved. Pairs on one host and pairs across
    hosts are compared separately, and slow ones are tried a second time before they are reported.

    Why it matters: a collective is as slow as its slowest pair. If the slow pairs have a rank or host in common, that
    one is slow (its adapter, its cable, its switch port); a single pair is the path between the two.

    How to fix it: look at the network adapter, cable and switch port that they share: speed, duplex, errors; for a
    single pair at what lies between the two: switch, route, MTU, a lossy cable.

        $ ip -s link
        $ ethtool INTERFACE

    Since: 0.1
    """
    slow = measured.slow_pairs
    if not slow:
        return
    centre = _centre(slow, measured)
    worst = max(slow, key=lambda pair: pair.seconds)
    usual = [
        pair
        for pair in measured.pairs
        if pair not in slow and within(pair, measured.hosts) == within(worst, measured.hosts)
    ]
    rate = f"{bandwidth(worst) / 1e6:.3g} MB/s" + (
        f", others do {median(map(bandwidth, usual)) / 1e6:.3g} MB/s" if usual else ""
    )
    path = f"the path between {named((worst.source,), measured.hosts)} and {named((worst.target,), measured.hosts)} is slow"
    yield Finding.warning(
        "pair-is-slow",
        f"{centre} is slow to reach: {rate}" if centre else f"{path}: {rate}",
        evidence=tuple(_pair(pair, measured) for pair in sorted(slow, key=lambda pair: -pair.seconds)[:SHOWN]),
        fix=f"look at the network adapter, cable and switch port of {centre}: speed, duplex, errors"
        if centre
        else "look at what lies between the two: switch, route, MTU, a lossy cable",
        steps=LINK_FIGURES,
    )


LINK_FIGURES = (
    step("ip -s link"),
    step("ethtool $(ip -o route get 8.8.8.8 | sed 's/.* dev \\([^ ]*\\).*/\\1/')"),
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


def _ratio(part: float) -> str:
    """A hint from the share of the limit that is reached."""
    if 0.4 <= part < 0.6:
        return "half of the limit is what one of two rails, or a link at half its width, gives"
    if 0.1 <= part < 0.15:
        return "an eighth of the limit is what one of eight adapters gives"
    return "something slower than that link carries it, or the link is shared"


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


LEAST_LOSS = 0.15
"""The least loss that is reported."""
TIMES_SLOWER = {"gloo": 3.0}
"""From so many times its median of before a collective counts, whatever its 99th percentile was; TIMES for other backends.
gloo's depends on what else the processors do: of eleven healthy runs on two processors at a load of 2 to 9, two by two, half
had a collective that was 3 times slower or more, up to 13, and 13 of 62 had three or more of nine at two sizes. No bar
parts these from a loss, so several have to agree, and it is said that it may be load."""
TIMES_WORSE = 2.0
SEVERAL = {"gloo": 3}
"""So many collectives, of two sizes at least, have to agree; 1 for other backends."""
PLACE_SLOWER = {"gloo": 5.0}
"""From so many times slower on messages between two hosts count by themselves; the same runs' best messages differed by 4.1."""
MOST = 12
"""Lines of evidence about collectives."""
MOST_PLACES = 3
AGAIN = step("python -m dsdoctor comm --json > again.json", note="with the same options")
OTHER_BASE = step("python -m dsdoctor comm --json > base-of-this-job.json", note="with the options of this job")
SMALL = 1 << 10
"""Bytes; what is smaller is of one size: its time is latency."""
LOAD = "with gloo it may be load: on busy processors ranks wait this long for each other, and nothing is wrong then"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What both tests timed, and what of it is slower: collectives, and messages by the hosts between which they went."""

    timed: int
    collectives: int = 0
    slow: tuple[tuple[Speed, Speed], ...] = ()
    places: int = 0
    slow_places: int = 0
    agree: bool = False

    @property
    def told(self) -> str:
        """In words; empty where nothing was compared."""
        if not self.collectives and not self.places:
            return ""
        lone = f"{len(self.slow)} slower, too few to tell from load" if self.slow else "none slower"
        paths = f" and messages on {self.places} path{'s' * (self.places != 1)}" if self.places else ""
        return f"{self.collectives} of {self.timed} collectives{paths} compared with before: {lone}"


def slower_collectives(report: Report, base: Report) -> tuple[Finding, ...]:
    """Everything that a report shows against one from before: what got slower, and whether it can be compared at all."""
    return tuple(finding for check in BASELINE_CHECKS for finding in check(report, base))


def compare(report: Report, base: Report) -> Compared:
    """What is in both tests; nothing where they are of other ranks."""
    if any(_differences(report, base)):
        return Compared(timed=len(report.speeds))
    before = {(speed.op, speed.size): speed for speed in base.speeds if speed.p50 > 0}
    both = [(now, before[now.op, now.size]) for now in report.speeds if now.p50 > 0 and (now.op, now.size) in before]
    slow = [(now, then) for now, then in both if _counts(now, then, report.backend)]
    slow.sort(key=lambda pair: pair[1].p50 / pair[0].p50)
    parts = [part for part, _ in _kept(report, base)]
    several = min(SEVERAL.get(report.backend, 1), len(both))
    sizes, slow_sizes = ({max(now.size, SMALL) for now, _ in pairs} for pairs in (both, slow))
    return Compared(
        timed=len(report.speeds),
        collectives=len(both),
        slow=tuple(slow),
        places=len(parts),
        slow_places=sum(part * PLACE_SLOWER.get(report.backend, TIMES_WORSE) <= 1 for part in parts),
        agree=len(slow) >= max(several, 1) and len(slow_sizes) >= min(2, several, len(sizes)),
    )


def _counts(now: Speed, then: Speed, backend: str) -> bool:
    """Whether a collective is slower than its times of before explain."""
    bar = min(max(then.p99, then.p50), TIMES_SLOWER.get(backend, TIMES_WORSE) * then.p50)
    return now.p50 > bar and now.p50 * (1 - LEAST_LOSS) >= then.p50


def slower_than_before(report: Report, base: Report) -> Iterator[Finding]:
    """Communication is slower than it was when the other test was made.

    A collective counts when its median time is now above the 99th percentile of then, or twice the median of then (with
    gloo three times), and at least 15 % of its bandwidth is lost. With gloo three have to agree, of two sizes. Messages
    between two hosts count by themselves from half of their bandwidth (with gloo a fifth) on.

    Why it matters: something changed since: the versions (reported if they differ), the link's speed, or another job on
    the same nodes. Where all nodes lost alike, no comparison among them shows it. gloo works on the processors, so with
    it load alone can look the same: run it again before anything is changed.

    How to fix it: see what else runs there, and run the test again with the same options. If it is as slow, find out what
    changed. Keep the figures of before until then.

        $ uptime
        $ python -m dsdoctor comm --json > again.json
        $ ethtool INTERFACE
        $ ibstat
        $ nvidia-smi topo -m

    Since: 0.1
    """
    found = compare(report, base)
    lines = [_collective(now, then) for now, then in found.slow] if found.agree else []
    places = list(_worst_places(report, base))
    if not lines and not found.slow_places:
        return
    gloo = report.backend == "gloo"
    look = step("uptime") if gloo else step("nvidia-smi")
    first = f"{lines[0]} of before" if lines else places.pop(0)
    count = [f"{len(lines)} of {found.collectives} timed collectives are slower"] if lines else []
    versions = _other_versions(report, base)
    yield Finding.warning(
        "slower-than-before",
        first,
        evidence=(*count, *lines[1:MOST], *places, *versions, *([LOAD] if gloo else [])),
        fix="see what else runs there, and run it again; if it is as slow then, find out what changed since",
        steps=(look, AGAIN, *_looks(report)),
    )


def _looks(report: Report) -> Iterator[Step]:
    """At what may have changed between these ranks."""
    if report.backend == "nccl":
        yield step("nvidia-smi topo -m")
    interfaces = {rank.interface for rank in report.ranks} - {"", "lo"}
    if len(set(report.hosts)) > 1 and len(interfaces) == 1:
        yield step("ethtool {interface|INTERFACE}", interface=interfaces.pop())


def baseline_not_comparable(report: Report, base: Report) -> Iterator[Finding]:
    """The test from before was of other ranks or timed other things, so its figures say nothing about these.

    Why it matters: times of collectives can be compared between tests with the same backend and as many ranks on as many
    hosts, and at the same sizes. Nothing was compared.

    How to fix it: compare with a test of the same job.

        $ python -m dsdoctor comm --json > base-of-this-job.json

    Since: 0.1
    """
    why = next(_differences(report, base), None)
    fix = "compare with a test of the same job, which had the same options"
    steps: tuple[Step, ...] = (OTHER_BASE,)
    if why is None and not report.speeds:
        why, fix, steps = "nothing was timed now", "run it without --quick", ()
    elif why is None and not base.speeds:
        why = "it holds no times: it was quick, or broken"
    elif why is None and not compare(report, base).collectives:
        known = {(speed.op, speed.size) for speed in base.speeds}
        common = any((speed.op, speed.size) in known for speed in report.speeds)
        why = "a time in it is 0" if common else "no collective of the same size was timed in both"
    if why is not None:
        title = f"the test from before cannot be compared with this one: {why}"
        yield Finding.note("baseline-not-comparable", title, fix=fix, steps=steps)


def _differences(report: Report, base: Report) -> Iterator[str]:
    if report.backend != base.backend:
        yield f"the backend is {report.backend}, was {base.backend}"
    if report.world != base.world:
        yield f"{report.world} ranks, were {base.world}"
    elif _shape(report) != _shape(base):
        yield "the ranks are spread over the hosts in another way"


def _shape(report: Report) -> list[int]:
    """How many ranks each host has, without their names."""
    return sorted(Counter(report.hosts).values())


def _collective(now: Speed, then: Speed) -> str:
    ratio = now.p50 / then.p50
    return f"{now.op} of {now.size:,} bytes takes {now.p50 * 1e3:.3g} ms, {ratio:.1f} times its {then.p50 * 1e3:.3g} ms"


def _worst_places(report: Report, base: Report) -> Iterator[str]:
    """The hosts between which messages lost most, as far as both tests timed them."""
    now, then = _rates(report), _rates(base)
    for part, place in _kept(report, base)[:MOST_PLACES]:
        if part <= 1 - LEAST_LOSS:
            where = " - ".join(place) if len(place) > 1 else f"within {place[0]}"
            yield f"{where}: {now[place] / 1e6:,.0f} MB/s between two ranks, were {then[place] / 1e6:,.0f}"


def _kept(report: Report, base: Report) -> list[tuple[float, tuple[str, ...]]]:
    """The part of its bandwidth that is left between two hosts, the least first."""
    now, then = _rates(report), _rates(base)
    return sorted((now[place] / then[place], place) for place in now.keys() & then.keys())


def _rates(report: Report) -> dict[tuple[str, ...], float]:
    """Bytes a second between two ranks, by the hosts that they are on."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    hosts = dict(enumerate(report.hosts))
    for pair in report.pairs:
        place = {hosts.get(pair.source, ""), hosts.get(pair.target, "")}
        if pair.seconds > 0 and pair.size > 0 and "" not in place:
            found[tuple(sorted(place))].append(pair.size / pair.seconds)
    return {place: median(rates) for place, rates in found.items()}


def _other_versions(report: Report, base: Report) -> Iterator[str]:
    for name, version in report.versions.items():
        if base.versions.get(name, version) != version:
            yield f"{name} is {version}, was {base.versions[name]}"


BASELINE_CHECKS = (slower_than_before, baseline_not_comparable)
