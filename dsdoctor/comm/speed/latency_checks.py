"""The time of a message whatever its size, and the network's own round trip -> who is late, or which way is long. Judges."""

from collections.abc import Iterator, Mapping, Sequence

from dsdoctor.comm.rank_names import named
from dsdoctor.comm.results import PairTime, Reach
from dsdoctor.comm.speed.pairs import shared_rank
from dsdoctor.core.finding import Finding, step

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
