"""Figures of two runs, now and then -> what lost more than noise makes: hosts, paths between hosts, pairs of ranks."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from dsdoctor.comm.results import Pace, PairTime

LEAST_LOSS = 0.15
"""The least loss that is reported."""
SPREADS = 3
"""A loss must also be so many times the spread of the other figures, which is the noise of these two runs."""
FEW, FEW_LOSS = 12, 2 / 3
"""Fewer figures do not show what is noise. Healthy runs of four ranks on two busy processors differ by up to 61 % in a pair."""

FEW_PACES = 6
"""Ranks. Computing varies less than messages do."""
LEAST_PATH = 3
"""The fewest pairs that count as a path."""
ALONE = 2
"""A pair that is slower alone, without the others of its path, must have lost so many times more: among many pairs some are
slow by chance."""

Path = tuple[str, ...]
"""One host, or two between which something is."""
Hosts = tuple[str, ...]
"""The host of every rank."""


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """One figure now and then, of the kind that is better when larger; ``between`` is where it was measured."""

    between: Path
    ranks: tuple[int, ...]
    now: float
    then: float

    @property
    def log(self) -> float:
        """The logarithm of now to then: a loss is negative."""
        return math.log(self.now / self.then)


def pair_changes(
    now: Iterable[PairTime], here: Hosts, then: Iterable[PairTime], there: Hosts
) -> tuple[SpeedChange, ...]:
    """Bandwidths of the pairs that both runs have: the same places on the same hosts, with as many ranks on each."""
    seats, old_seats = _seats(here), _seats(there)
    before = {
        (frozenset((old_seats.get(pair.source), old_seats.get(pair.target))), pair.size): pair
        for pair in then
        if pair.seconds > 0
    }
    alike = {host for host, count in Counter(here).items() if Counter(there)[host] == count}
    found = []
    for pair in now:
        places = frozenset((seats[pair.source], seats[pair.target]))
        old, between = before.get((places, pair.size)), tuple(sorted({host for host, _ in places}))
        if old and pair.seconds > 0 and alike.issuperset(between):
            rates = {"now": pair.size / pair.seconds, "then": old.size / old.seconds}
            found.append(SpeedChange(between=between, ranks=(pair.source, pair.target), **rates))
    return tuple(found)


def pace_changes(now: Iterable[Pace], here: Hosts, then: Iterable[Pace], there: Hosts) -> tuple[SpeedChange, ...]:
    """How often a second each rank does the fixed piece of work, by the place that it has on its host."""
    seats, old_seats = _seats(here), _seats(there)
    before = {old_seats[pace.rank]: pace.compute for pace in then if pace.compute > 0 and pace.rank in old_seats}
    return tuple(
        SpeedChange(
            between=(seats[pace.rank][0],), ranks=(pace.rank,), now=1 / pace.compute, then=1 / before[seats[pace.rank]]
        )
        for pace in now
        if pace.compute > 0 and seats[pace.rank] in before
    )


def _seats(hosts: Hosts) -> dict[int, tuple[str, int]]:
    """The host of each rank, and which of its ranks it is: a run may number hosts in another order."""
    counts: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
    return {rank: (host, next(counts[host])) for rank, host in enumerate(hosts)}


def loss(changes: Iterable[SpeedChange]) -> float:
    """The share that the median of figures has lost.

    >>> round(loss([SpeedChange(between=("a",), ranks=(0, 1), now=7.8e8, then=1e9)]), 2)
    0.22
    """
    return 1 - math.exp(median(change.log for change in changes))


def lossy_paces(changes: Sequence[SpeedChange]) -> Iterator[tuple[str, tuple[SpeedChange, ...]]]:
    """Hosts nearly all of whose ranks compute slower."""
    needed = _needed([change.log for change in changes], few=FEW_PACES)
    by_host: dict[str, list[SpeedChange]] = defaultdict(list)
    for change in changes:
        by_host[change.between[0]].append(change)
    for host, mine in by_host.items():
        if _most(change.log for change in mine) <= -needed:
            yield host, tuple(mine)


def lossy_hosts(changes: Sequence[SpeedChange]) -> dict[str, tuple[SpeedChange, ...]]:
    """Hosts nearly all of whose pairs with other hosts lost. None where there are only two hosts: then it cannot be known
    which of them it is."""
    across: dict[str, list[SpeedChange]] = defaultdict(list)
    for change in changes:
        for host in change.between if len(change.between) > 1 else ():
            across[host].append(change)
    if len(across) < 3:
        return {}
    needed = needed_of(changes)
    return {host: tuple(mine) for host, mine in across.items() if _most(change.log for change in mine) <= -needed}


def lossy_paths(changes: Sequence[SpeedChange], explained: Iterable[str]) -> Iterator[tuple[SpeedChange, ...]]:
    """Pairs that lost beyond what their hosts (``explained``) explain, those of one path together.

    Nearly all pairs of a path, or those that lost by themselves.
    """
    needed, known = needed_of(changes), set(explained)
    alone_needed = needed if len(changes) < FEW else ALONE * needed
    for mine in _by_path(change for change in changes if len(change.between) < 2 or known.isdisjoint(change.between)):
        if len(mine) >= LEAST_PATH and _most(change.log for change in mine) <= -needed:
            yield mine
        elif alone := tuple(change for change in mine if change.log <= -alone_needed):
            yield alone


def needed_of(changes: Sequence[SpeedChange]) -> float:
    """The loss of a pair's bandwidth, as a positive logarithm, that is more than noise.

    What a whole host or a whole path lost is no noise: it is taken out first.
    """
    paths = {mine[0].between: median(change.log for change in mine) for mine in _by_path(changes)}
    hosts: dict[str, list[float]] = defaultdict(list)
    for between, log in paths.items():
        for host in between if len(between) > 1 else ():
            hosts[host].append(log)
    if len(hosts) < 3:
        return _needed([change.log - paths[change.between] for change in changes])
    worst = {between: min(_most(hosts[host]) for host in between) for between in paths if len(between) > 1}
    return _needed([change.log - worst.get(change.between, paths[change.between]) for change in changes])


def _needed(logs: Sequence[float], few: int = FEW) -> float:
    if len(logs) < few:
        return -math.log(1 - FEW_LOSS)
    middle = median(logs)
    spread = 1.4826 * median(abs(log - middle) for log in logs)
    return max(-math.log(1 - LEAST_LOSS), SPREADS * spread)


def _most(logs: Iterable[float]) -> float:
    """What three quarters of the figures lost at least; of three or fewer, all."""
    ordered = sorted(logs)
    return ordered[(3 * (len(ordered) - 1) + 3) // 4]


def _by_path(changes: Iterable[SpeedChange]) -> Iterator[tuple[SpeedChange, ...]]:
    paths: dict[Path, list[SpeedChange]] = defaultdict(list)
    for change in changes:
        paths[change.between].append(change)
    yield from map(tuple, paths.values())
