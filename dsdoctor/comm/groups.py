"""Groups of nodes that are tried: which, how fast each is, and where an exchange breaks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from dsdoctor.comm.collectives.calls import one_round
from dsdoctor.comm.models import Claim, by_rank, named
from dsdoctor.comm.speed.speed import BUSY, busbw
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more, and_more_lines
from dsdoctor.rules import book

# Nodes -> rounds of disjoint groups, each chosen by what the rounds before it showed, and what follows from all. Pure.
#
# A pair that fails says nothing of which of the two is bad, or whether it is the path between them: each is tried again with nodes
# that were well in other pairs. With n nodes of which few are bad it takes log2(n) + 3 rounds.


Part = tuple[int, ...]
"""The ranks of a node; of a single node each rank is one."""
Groups = tuple[tuple[Part, ...], ...]
MIN_PAIRS = 3
"""With fewer pairs none shows what is usual."""
MAX_WAVES = 4
"""Rounds in which nodes of failed pairs are tried again: with more bad nodes than good ones it takes several."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A round: which groups of nodes exchanged at the same time, and which of them failed; ``figures`` say how fast each was."""

    what: str
    groups: Groups
    failed: Groups
    figures: dict[tuple[Part, ...], float] = field(default_factory=dict)

    @property
    def well(self) -> Groups:
        """The groups that did not fail."""
        return tuple(group for group in self.groups if group not in self.failed)


Run = Callable[[str, Groups], Trial | None]
"""Plays a round; None where no time is left."""


Judge = Callable[[tuple[Trial, ...]], tuple[Trial, ...]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the rounds showed, as far as they decide it. ``bad`` failed alone, or with two that are well; ``paths`` are pairs that
    fail while both are well with others."""

    trials: tuple[Trial, ...]

    @cached_property
    def good(self) -> set[Part]:
        """Those that were well together with another."""
        return {part for trial in self.trials for group in trial.well if len(group) > 1 for part in group}

    @cached_property
    def failing(self) -> tuple[tuple[Part, ...], ...]:
        """Every group that failed, of at most two nodes."""
        return tuple(group for trial in self.trials for group in trial.failed if len(group) < 3)

    @cached_property
    def bad(self) -> tuple[Part, ...]:
        """The nodes that are at fault."""
        good, failed_with = self.good, self.failed_with
        alone = {group[0] for group in self.failing if len(group) == 1}
        return tuple(
            sorted(alone | {part for part in failed_with if part not in good and len(failed_with[part] & good) > 1})
        )

    @cached_property
    def failed_with(self) -> dict[Part, set[Part]]:
        """By node: those with which it failed in a pair."""
        found: dict[Part, set[Part]] = {}
        for group in self.failing:
            for part in group:
                found.setdefault(part, set()).update({*group} - {part})
        return found

    @cached_property
    def paths(self) -> tuple[tuple[Part, ...], ...]:
        """The pairs between which something is at fault."""
        ends, well = self.good - {*self.bad}, {group for trial in self.trials for group in trial.well}
        found = (group for group in self.failing if len(group) == 2 and {*group} <= ends and group not in well)
        return tuple(dict.fromkeys(found))

    @cached_property
    def least_failing(self) -> int:
        """The size of the smallest groups that failed although all their nodes are well in pairs; 0 where none did."""
        good = self.good - {*self.bad}
        well = {group for trial in self.trials for group in trial.well}
        failed = (group for trial in self.trials for group in trial.failed if len(group) > 2 and group not in well)
        return min((len(group) for group in failed if {*group} <= good), default=0)


def play(parts: Sequence[Part], run: Run, judge: Judge = tuple) -> Outcome:
    """Each node alone, pairs at once, the nodes of failed pairs with good ones, then groups of four, eight and so on.

    ``judge`` says anew after each round which groups of all rounds failed, where that shows only beside the others.
    """
    trials: list[Trial] = []

    def tried(what: str, groups: Sequence[Sequence[Part]]) -> bool:
        trial = run(what, tuple(map(tuple, groups))) if groups else None
        if trial is not None:
            trials[:] = judge((*trials, trial))
        return trial is not None or not groups

    if not tried("each node alone", [(part,) for part in parts if len(part) > 1]):
        return Outcome(trials=tuple(trials))
    bad = {*Outcome(trials=tuple(trials)).bad}
    left = [part for part in parts if part not in bad]
    for what, groups in _pairings(left, trials):
        if not tried(what, groups):
            return Outcome(trials=tuple(trials))
    for size in _sizes(len(left)):
        good = [part for part in left if part in Outcome(trials=tuple(trials)).good]
        of_size = [good[start : start + size] for start in range(0, len(good) - size + 1, size)]
        if not tried(f"groups of {size}", of_size) or not of_size:
            break
        if trials[-1].failed and (not tried(f"groups of {size}, again", of_size) or trials[-1].failed):
            break
    return Outcome(trials=tuple(trials))


def _pairings(parts: Sequence[Part], trials: list[Trial]) -> Iterator[tuple[str, Groups]]:
    """Pairs of all, again where none was well; then those that are not decided, each with one that is well."""
    for turn in range(min(max(len(parts).bit_length(), MIN_PAIRS), len(parts) - 1 + len(parts) % 2)):
        yield "in pairs", tuple((parts[first], parts[second]) for first, second in one_round(len(parts), turn))
        if (
            Outcome(trials=tuple(trials)).good
            and sum(len(group) == 2 for trial in trials for group in trial.groups) >= MIN_PAIRS
        ):
            break
    for _ in range(MAX_WAVES):
        outcome = Outcome(trials=tuple(trials))
        decided = outcome.good | {*outcome.bad}
        open_ = [part for part in parts if part not in decided]
        good = [part for part in parts if part in outcome.good]
        matched = tuple(_matched(open_, good, outcome.failed_with))
        if not matched:
            break
        yield "again, each with a healthy one", _with_others(matched, outcome.good)
    outcome = Outcome(trials=tuple(trials))
    yield "pairs that failed, again", _with_others(tuple(_apart(outcome.paths)), outcome.good)


def _with_others(pairs: tuple[tuple[Part, ...], ...], good: set[Part]) -> Groups:
    """The pairs, and pairs of the others that are well beside them: as many at the same time as before, so that figures compare."""
    rest = sorted(good - {part for pair in pairs for part in pair})
    return (*pairs, *zip(rest[::2], rest[1::2], strict=False)) if pairs else ()


def _apart(pairs: Sequence[tuple[Part, ...]]) -> Iterator[tuple[Part, ...]]:
    """Those of which no node is in two."""
    taken: set[Part] = set()
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            yield pair


def _matched(
    open_: Sequence[Part], good: list[Part], failed_with: dict[Part, set[Part]]
) -> Iterator[tuple[Part, Part]]:
    """Each that is not decided with a good one that it was not with, as far as there are enough."""
    for part in open_:
        partner = next((one for one in good if one not in failed_with.get(part, ())), None)
        if partner is not None:
            good.remove(partner)
            yield part, partner


def _sizes(count: int) -> Iterator[int]:
    """Four, eight and so on, less than all.

    >>> list(_sizes(17)), list(_sizes(4))
    ([4, 8, 16], [])
    """
    size = 4
    while size < count:
        yield size
        size *= 2


# How long the same exchange took in each group of nodes -> which groups are slow, and which node or path that shows. Pure.


SLOW = {"nccl": 1.5, "gloo": 4.0}
"""So many times slower than its like a group is slow; on two busy cores healthy pairs of gloo differ by 2.5 to 4."""
BELOW_LIMIT = 1 / 8
"""Less than this part of what the link carries is slow, whatever the others do."""
MIN_TRANSFER_SECONDS = 1e-4
"""Seconds; a shorter transfer is not told from none."""
FAR, TIMES_FARTHER = 0.002, 10.0
"""Seconds there and back, and so many times those of the others, from which a node is far away."""
MAX_LINES = 6


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
    return busbw("all_reduce", size, max(seconds - latency, MIN_TRANSFER_SECONDS), sum(map(len, group)))


def judged(trials: tuple[Trial, ...], backend: str, limit: float | None) -> tuple[Trial, ...]:
    """The trials, in which those groups failed that are slow beside others of as many nodes, or beside what the links carry.

    What a quarter of the same round reaches is usual, because many at once are slower than few; where a round has few, the best of
    all rounds. A single node of gloo is never slow: that is memory and processors, and no network.
    """

    def usual(trial: Trial, size: int) -> float:
        like = [rate for group, rate in trial.figures.items() if len(group) == size]
        if len(like) < MIN_PAIRS:
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
    """A node is slow together with each of two others that are fast together, or slow by itself."""
    for part in seen.outcome.bad:
        mine = {group: rate for group, rate in seen.pairs.items() if part in group}
        own = [
            trial.figures[part,]
            for trial in seen.outcome.trials
            if (part,) in trial.failed and (part,) in trial.figures
        ]
        lines = [
            f"with {seen.named(one)}: {rate / 1e6:.3g} MB/s"
            for group, rate in mine.items()
            for one in group
            if one != part
        ]
        far = None if own else seen.far(part)
        yield book.finding(
            "node-is-slow",
            Severity.WARNING,
            case="far" if far else "alone" if own else "",
            evidence=tuple(and_more_lines(lines, MAX_LINES, of="pairs")),
            node=seen.named(part),
            rate=f"{min((*own, *mine.values()), default=0.0) / 1e6:.3g}",
            usual=seen.usual,
            trip=f"{far[0] * 1e3:.3g}" if far else None,
            other_trip=f"{far[1] * 1e3:.3g}" if far else None,
        )


def node_path_is_slow(seen: NodeSpeeds) -> Iterator[Finding]:
    """Two nodes are slow together, and each of them is fast with another."""
    for one, other in seen.outcome.paths:
        yield book.finding(
            "node-path-is-slow",
            Severity.WARNING,
            one=seen.named(one),
            other=seen.named(other),
            rate=f"{seen.pairs[one, other] / 1e6:.3g}",
        )


def node_groups_are_slow(seen: NodeSpeeds) -> Iterator[Finding]:
    """Some groups of four and more nodes are slow beside others as large, though all their nodes are fast in pairs."""
    size = seen.outcome.least_failing
    if size:
        well = {group for trial in seen.outcome.trials for group in trial.well}
        failed = (group for trial in seen.outcome.trials for group in trial.failed if len(group) == size)
        slow = tuple(dict.fromkeys(group for group in failed if group not in well))
        names = [", ".join(map(seen.named, group)) for group in slow]
        evidence = tuple(and_more_lines(names, MAX_LINES, of="groups"))
        yield book.finding("node-groups-are-slow", Severity.WARNING, evidence=evidence, count=len(slow), size=size)


CHECKS = (node_is_slow, node_path_is_slow, node_groups_are_slow)


# Repeats a failed exchange: transports switched off one after the other, then smaller groups as ``nodes.plan`` chooses them.


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A variable that switches one transport or algorithm off, which is at fault when the exchange works without it."""

    variable: str
    value: str


SWITCHES = {
    "nccl": (
        Switch(variable="NCCL_P2P_DISABLE", value="1"),
        Switch(variable="NCCL_SHM_DISABLE", value="1"),
        Switch(variable="NCCL_IB_DISABLE", value="1"),
        Switch(variable="NCCL_NVLS_ENABLE", value="0"),
        Switch(variable="NCCL_ALGO", value="Ring"),
        Switch(variable="NCCL_PROTO", value="Simple"),
    ),
}
"""In the order in which they are tried: the first that helps shows the layer."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What was tried: the switches, of which the last helped where ``cured``, and the rounds in smaller groups."""

    claims: tuple[Claim, ...]
    switches: tuple[Switch, ...] = ()
    cured: bool = False
    outcome: Outcome = field(default_factory=lambda: Outcome(trials=()))

    @property
    def trials_text(self) -> str:
        """How much was tried."""
        return book.phrase("comm", "trials", count=len(self.switches) + len(self.outcome.trials))


def parts_of(claims: Sequence[Claim], least: int = 3) -> tuple[Part, ...]:
    """The ranks of each host; where there are fewer hosts than ``least``, each rank by itself."""
    hosts = dict.fromkeys(claim.host for claim in claims)
    if len(hosts) < least:
        return tuple((claim.rank,) for claim in claims)
    return tuple(tuple(sorted(claim.rank for claim in claims if claim.host == host)) for host in hosts)


def isolate(
    claims: Sequence[Claim], backend: str, with_switch: Callable[[Switch], bool | None], in_groups: Run
) -> Isolation:
    """Try the switches until one helps, else go on in smaller groups. ``with_switch``: whether the exchange then works, None where
    no time is left."""
    tried: list[Switch] = []
    for switch in SWITCHES.get(backend, ()):
        works = with_switch(switch)
        if works is None:
            return Isolation(claims=tuple(claims), switches=tuple(tried))
        tried.append(switch)
        if works:
            return Isolation(claims=tuple(claims), switches=tuple(tried), cured=True)
    return Isolation(claims=tuple(claims), switches=tuple(tried), outcome=play(parts_of(claims), in_groups))


def transport_broken(search: Isolation) -> Iterator[Finding]:
    """An exchange that fails works once a single transport of NCCL is switched off."""
    if search.cured:
        *others, switch = search.switches
        variable = switch.variable
        yield book.finding(
            "transport-broken",
            Severity.ERROR,
            case="shared-memory"
            if variable == "NCCL_SHM_DISABLE"
            else "infiniband"
            if variable == "NCCL_IB_DISABLE"
            else "nvls"
            if variable == "NCCL_NVLS_ENABLE"
            else "tree"
            if variable == "NCCL_ALGO"
            else "low-latency"
            if variable == "NCCL_PROTO"
            else "",
            evidence=tuple(f"{other.variable}={other.value}: fails" for other in others),
            hosts=and_more(list(dict.fromkeys(claim.host for claim in search.claims)), 4),
            variable=variable,
            value=switch.value,
        )


def narrowed_to(search: Isolation) -> Iterator[Finding]:
    """A rank or host fails by itself, or with each of two others that are well; or two fail together that are well with others."""
    hosts, outcome = by_rank(search.claims), search.outcome
    bad = tuple(sorted(rank for part in outcome.bad for rank in part))
    evidence = tuple(_told(trial) for trial in outcome.trials)
    if bad:
        yield book.finding("narrowed-to", Severity.ERROR, evidence=evidence, ranks=named(bad, hosts))
    for one, other in outcome.paths:
        yield book.finding(
            "narrowed-to",
            Severity.ERROR,
            case="path",
            evidence=evidence,
            one=named(one, hosts),
            other=named(other, hosts),
        )
    if not bad and not outcome.paths and outcome.least_failing:
        yield book.finding("narrowed-to", Severity.ERROR, case="size", evidence=evidence, size=outcome.least_failing)


def _told(trial: Trial) -> str:
    def words(group: tuple[Part, ...]) -> str:
        return "+".join("-".join(map(str, sorted({part[0], part[-1]}))) for part in group)

    failed = [words(group) for group in trial.failed]
    return f"{trial.what}: {len(trial.well)} of {len(trial.groups)} well" + (
        f"; ranks {and_more(failed, 6)} not" if failed else ""
    )


ISOLATE_CHECKS = (transport_broken, narrowed_to)
