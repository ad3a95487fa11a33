"""How long the same exchange took in each group of nodes -> which groups are slow, and which node or path that shows. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from dsdoctor.comm.nodes.plan import FEWEST_PAIRS, Outcome, Part, Trial
from dsdoctor.comm.speed.bandwidth import BUSY, busbw
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.text import and_more_lines

SLOW = {"nccl": 1.5, "gloo": 4.0}
"""So many times slower than its like a group is slow; on two busy cores healthy pairs of gloo differ by 2.5 to 4."""
BELOW_LIMIT = 1 / 8
"""Less than this part of what the link carries is slow, whatever the others do."""
LEAST_TRANSFER = 1e-4
"""Seconds; a shorter transfer is not told from none."""
FAR, TIMES_FARTHER = 0.002, 10.0
"""Seconds there and back, and so many times those of the others, from which a node is far away."""
MOST = 6


@dataclass(frozen=True, kw_only=True)
class NodeSpeeds:
    """What the rounds showed: ``hosts`` is the host of each rank, the figures of the trials are bytes a second (busbw). ``trips``:
    the network's round trip between two ranks, the lower first, in seconds."""

    outcome: Outcome
    hosts: tuple[str, ...]
    trips: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def far(self, part: Part) -> tuple[float, float] | None:
        """A node's round trip to the others, and theirs among each other, where its own is far longer."""
        own = [trip for pair, trip in self.trips.items() if len({*pair} & {*part}) == 1]
        between = [
            trip for (one, other), trip in self.trips.items() if self._apart(one, other) and not {one, other} & {*part}
        ]
        if not own or not between or median(own) < max(FAR, TIMES_FARTHER * median(between)):
            return None
        return median(own), median(between)

    def _apart(self, one: int, other: int) -> bool:
        return max(one, other) >= len(self.hosts) or self.hosts[one] != self.hosts[other]

    def named(self, part: Part) -> str:
        """The node by its name."""
        return self.hosts[part[0]] or f"the node of rank {part[0]}"

    @property
    def pairs(self) -> dict[tuple[Part, ...], float]:
        """What each pair of nodes did."""
        return {pair: rate for trial in self.outcome.trials for pair, rate in trial.figures.items() if len(pair) == 2}

    @property
    def usual(self) -> str:
        """What the pairs do that were well."""
        slow = {group for trial in self.outcome.trials for group in trial.failed}
        well = [rate for pair, rate in self.pairs.items() if pair not in slow]
        return f"{median(well) / 1e6:.3g} MB/s" if well else "more"


def bandwidth(group: tuple[Part, ...], size: int, seconds: float, latency: float) -> float:
    """busbw of an all_reduce of ``size`` bytes over all ranks of a group, without the time that one of a few bytes takes.

    A rank that is late with every message slows no link: the phase of speed finds it.
    """
    return busbw("all_reduce", size, max(seconds - latency, LEAST_TRANSFER), sum(map(len, group)))


def judged(trials: tuple[Trial, ...], backend: str, limit: float | None) -> tuple[Trial, ...]:
    """The trials, in which those groups failed that are slow beside others of as many nodes, or beside what the links carry.

    What a quarter of the same round reaches is usual, because many at once are slower than few; where a round has few, the best of
    all rounds. A single node of gloo is never slow: that is memory and processors, and no network.
    """

    def usual(trial: Trial, size: int) -> float:
        like = [rate for group, rate in trial.figures.items() if len(group) == size]
        if len(like) < FEWEST_PAIRS:
            return max(rate for other in trials for group, rate in other.figures.items() if len(group) == size)
        return sorted(like, reverse=True)[(len(like) - 1) // 4]

    def is_slow(trial: Trial, group: tuple[Part, ...], rate: float) -> bool:
        if backend == "gloo" and (len(group) == 1 or rate > BUSY):
            return False
        return rate * SLOW[backend] < usual(trial, len(group)) or rate < (limit or 0.0) * BELOW_LIMIT

    return tuple(
        replace(trial, failed=tuple(group for group, rate in trial.figures.items() if is_slow(trial, group, rate)))
        for trial in trials
    )


def node_is_slow(seen: NodeSpeeds) -> Iterator[Finding]:
    """A node is slow together with each of two others that are fast together, or slow by itself.

    All nodes do the same all_reduce: each by itself, then in pairs at the same time, where every rank of both takes part.
    A pair that is slow is tried again, each of its nodes with one that was fast.

    Where the kernel measured a round trip to it that is ten times as long as that among the others, it is far away: that is
    said, for then neither adapter nor cable need be at fault.

    Why it matters: every collective over all nodes is as slow as this one.

    How to fix it: take it out of the job, and look at its adapter, cable, switch port and GPUs; of one that is far away at the
    route.

        $ ip -s link
        $ ethtool INTERFACE
        $ nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK

    Since: 0.1
    """
    for part in seen.outcome.bad:
        mine = {group: rate for group, rate in seen.pairs.items() if part in group}
        own = [
            trial.figures[part,]
            for trial in seen.outcome.trials
            if (part,) in trial.failed and (part,) in trial.figures
        ]
        lines = [f"with {_other(seen, group, part)}: {rate / 1e6:.3g} MB/s" for group, rate in mine.items()]
        rate = min((*own, *mine.values()), default=0.0)
        far = None if own else seen.far(part)
        away = f", {far[0] * 1e3:.3g} ms there and back (the others {far[1] * 1e3:.3g} ms)," if far else ""
        look = "the route to it" if far else "its adapter, cable and switch port"
        yield Finding.warning(
            "node-is-slow",
            f"{seen.named(part)} is {f'far away{away} and ' if far else ''}slow{' by itself' if own else ''}:"
            f" {rate / 1e6:.3g} MB/s, the others do {seen.usual}",
            evidence=tuple(and_more_lines(lines, MOST, of="pairs")),
            fix=f"take {seen.named(part)} out of the job, and look at {look}",
            steps=(
                step("traceroute {host}", host=seen.named(part))
                if far
                else step("ssh {host} ip -s link", host=seen.named(part)),
            ),
        )


def _other(seen: NodeSpeeds, group: tuple[Part, ...], part: Part) -> str:
    return next(seen.named(one) for one in group if one != part)


def node_path_is_slow(seen: NodeSpeeds) -> Iterator[Finding]:
    """Two nodes are slow together, and each of them is fast with another.

    Why it matters: collectives whose ring or tree takes this path are as slow as it is.

    How to fix it: look at what lies between the two: switch, route, a cable between switches.

        $ traceroute HOST

    Since: 0.1
    """
    for one, other in seen.outcome.paths:
        yield Finding.warning(
            "node-path-is-slow",
            f"the path between {seen.named(one)} and {seen.named(other)} is slow: {seen.pairs[one, other] / 1e6:.3g} MB/s,"
            f" each does more with others",
            fix="look at what lies between the two: switch, route, a cable between switches",
            steps=(step("traceroute {host}", host=seen.named(other)),),
        )


def node_groups_are_slow(seen: NodeSpeeds) -> Iterator[Finding]:
    """Some groups of four and more nodes are slow beside others as large, though all their nodes are fast in pairs.

    Why it matters: something that only many use at once is too narrow: an upper switch, links between switches.

    How to fix it: give the job nodes of one switch, and have the links between switches looked at.

        $ scontrol show topology

    Since: 0.1
    """
    size = seen.outcome.least_failing
    if size:
        well = {group for trial in seen.outcome.trials for group in trial.well}
        failed = (group for trial in seen.outcome.trials for group in trial.failed if len(group) == size)
        slow = tuple(dict.fromkeys(group for group in failed if group not in well))
        names = [", ".join(map(seen.named, group)) for group in slow]
        yield Finding.warning(
            "node-groups-are-slow",
            f"{len(slow)} groups of {size} nodes are slow, and all their nodes are fast in pairs",
            evidence=tuple(and_more_lines(names, MOST, of="groups")),
            fix="give the job nodes of one switch, and have the links between switches looked at",
            steps=(step("scontrol show topology"),),
        )


CHECKS = (node_is_slow, node_path_is_slow, node_groups_are_slow)
