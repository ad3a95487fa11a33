"""Times a message there and back for each pair of ranks: a group -> the times of the pairs in which this rank is the lower one."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import PairTime
from dsdoctor.comm.torch_ops import Pair, agreed, spread_rounds, wait_for_device

Tell = Callable[[int, str], None]
SIZE = 1 << 20
REPEATS = 3
LONG = 0.5
"""Seconds there and back from which a message is sent once more, and from three times as much not again: on a slow way chance
counts for little."""
AGAIN = 2.0
"""A pair this many times slower than usual for its kind is tried again; ``speed_checks`` reports only slower ones."""


def within(pair: PairTime, hosts: Sequence[str]) -> bool:
    """Whether both are on one host, as far as the hosts are known."""
    names = {hosts[rank] if rank < len(hosts) else "" for rank in (pair.source, pair.target)}
    return len(names) == 1


def slower(times: Sequence[PairTime], hosts: Sequence[str], factor: float) -> tuple[PairTime, ...]:
    """The pairs that take more than ``factor`` times the usual of their kind: within a host, or across hosts.

    The usual is the time that a third of them stays below, not the median: with one bad rank of three or four, half of the
    pairs or more are slow.
    """
    found: list[PairTime] = []
    for inside in (True, False):
        like = sorted((pair for pair in times if within(pair, hosts) is inside), key=lambda pair: pair.transfer)
        if like:
            usual = like[(len(like) - 1) // 3].transfer
            found += [pair for pair in like if pair.transfer > factor * usual]
    return tuple(found)


def shared_rank(pairs: Sequence[PairTime]) -> int | None:
    """The one rank that all of several pairs have in common."""
    counts = Counter(rank for pair in pairs for rank in (pair.source, pair.target))
    shared = [rank for rank, count in counts.items() if count == len(pairs)]
    return shared[0] if len(shared) == 1 else None


def apart(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """These pairs in rounds in which no rank comes twice.

    >>> apart([(0, 1), (0, 2), (2, 3)])
    (((0, 1), (2, 3)), ((0, 2),))
    """
    turns: list[list[Pair]] = []
    for pair in pairs:
        free = next((turn for turn in turns if not any(set(pair) & set(other) for other in turn)), None)
        if free is None:
            turns.append([pair])
        else:
            free.append(pair)
    return tuple(map(tuple, turns))


def time_pairs(group: RankGroup, tell: Tell, budget: float) -> tuple[PairTime, ...]:
    """The best of a few messages of 1 MiB and of one byte there and back in each pair, halved; the lower rank reports it.

    At most about ``budget`` seconds: rank 0 decides by its clock whether another round is run. Slow
    pairs are tried again when little else is running.
    """
    import torch

    if group.world < 2:
        return ()
    until = time.monotonic() + budget
    buffer = torch.zeros(SIZE, dtype=torch.uint8, device=group.device)
    best: dict[Pair, float] = {}
    latency: dict[Pair, float] = {}
    _play(group, spread_rounds(group.world), buffer[:1], latency, tell, until, "pairs, one byte")
    _play(group, spread_rounds(group.world), buffer, best, tell, until, "pairs")
    doubtful = _doubtful(group, best)
    _play(group, apart(doubtful), buffer, best, tell, until, "slow pairs again")
    return tuple(
        PairTime(source=low, target=high, size=SIZE, seconds=seconds, latency=latency.get((low, high), 0.0))
        for (low, high), seconds in sorted(best.items())
    )


def _play(
    group: RankGroup,
    turns: tuple[tuple[Pair, ...], ...],
    buffer: Any,
    best: dict[Pair, float],
    tell: Tell,
    until: float,
    what: str,
) -> None:
    """Round after round; ``best`` keeps this rank's least times."""
    for number, turn in enumerate(turns, 1):
        tell(number, f"{what}, round {number} of {len(turns)}")
        if not agreed(group, time.monotonic() < until):
            return
        pair = next((pair for pair in turn if group.rank in pair), None)
        if pair is not None:
            seconds = _there_and_back(group, pair, buffer) / 2
            if group.rank == pair[0]:
                best[pair] = min(seconds, best.get(pair, seconds))


def _there_and_back(group: RankGroup, pair: Pair, buffer: Any) -> float:
    """The least seconds of some messages to the higher rank and back, after a first that opens the connection; where that took
    very long it counts. How often is decided by the lower rank."""
    import torch
    import torch.distributed as dist

    low, high = pair

    def once() -> float:
        wait_for_device(group)
        begun = time.perf_counter()
        if group.rank == low:
            dist.send(buffer, high)
            dist.recv(buffer, high)
        else:
            dist.recv(buffer, low)
            dist.send(buffer, low)
        wait_for_device(group)
        return time.perf_counter() - begun

    first = once()
    count = torch.tensor([repeats(first)], dtype=torch.int64, device=group.device)
    if group.rank == low:
        dist.send(count, high)
    else:
        dist.recv(count, low)
    return min((once() for _ in range(int(count.item()))), default=first)


def repeats(first: float) -> int:
    """How often a message is sent again, by the seconds of the first.

    >>> [repeats(seconds) for seconds in (0.001, 0.6, 6.0)]
    [3, 1, 0]
    """
    return REPEATS if first < LONG else int(first < 3 * LONG)


def _doubtful(group: RankGroup, best: dict[Pair, float]) -> list[Pair]:
    """The pairs of all ranks that are slower than their kind. The same list on every rank, because rank 0's table is used."""
    import torch
    import torch.distributed as dist

    turns = spread_rounds(group.world)
    own = [next((best[pair] for pair in turn if pair[0] == group.rank and pair in best), 0.0) for turn in turns]
    row = torch.tensor(own, dtype=torch.float64, device=group.device)
    rows = [torch.zeros_like(row) for _ in range(group.world)]
    dist.all_gather(rows, row)
    table = torch.stack(rows)
    dist.broadcast(table, 0)
    seconds = table.tolist()
    found = ((low, high, seconds[low][number]) for number, turn in enumerate(turns) for low, high in turn)
    times = [PairTime(source=low, target=high, size=SIZE, seconds=took) for low, high, took in found if took > 0]
    return [(pair.source, pair.target) for pair in slower(times, group.hosts, AGAIN)]
