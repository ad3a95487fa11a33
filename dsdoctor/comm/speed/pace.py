"""Times a message there and back for each pair of ranks: a group -> the times of the pairs in which this rank is the lower one."""

import os
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dsdoctor.comm.collectives.calls import Pair, agreed, spread_rounds, wait_for_device
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Held, Pace, PairTime
from dsdoctor.core.cgroups import Cgroups, read_cgroups
from dsdoctor.core.host import LocalHost

# The processors that a rank may use, the time it waited for one, its control groups. Looks; ``turns``, ``equals`` are pure.


MAX_TURNS = 8
WORDS, BITS = 16, 60
"""Of the processors so many times so many bits are sent to the other ranks."""


class Place(NamedTuple):
    """Where a rank runs: the kernel (of its boot id; 0: not known), a bit for each processor that it may use, its cgroup's hash."""

    kernel: int
    processors: int
    group: int


def place_here() -> Place:
    """This process's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        kernel = int(boot.strip().replace("-", "")[:15], 16)
    except (OSError, ValueError):
        kernel = 0
    processors = sum(1 << processor for processor in os.sched_getaffinity(0))
    return Place(kernel, processors, zlib.crc32(groups_here().paths.get("cpu", "").encode()))


def all_places(group: RankGroup) -> list[Place]:
    """Every rank's, on every rank."""
    import torch
    import torch.distributed as dist

    own = place_here()
    words = [own.processors >> (BITS * word) & ((1 << BITS) - 1) for word in range(WORDS)]
    row = torch.tensor([own.kernel, own.group, *words], dtype=torch.int64, device=group.device)
    rows = [torch.zeros_like(row) for _ in range(group.world)]
    dist.all_gather(rows, row)
    return [
        Place(kernel, sum(word << (BITS * number) for number, word in enumerate(words)), cgroup)
        for kernel, cgroup, *words in (row.tolist() for row in rows)
    ]


def equals(places: Sequence[Place], rank: int) -> tuple[int, ...]:
    """The other ranks with which a rank shares processors by the same rights: what one waits for them says nothing about it.

    >>> equals([Place(7, 0b01, 1), Place(7, 0b11, 1), Place(7, 0b11, 2), Place(7, 0b10, 1), Place(8, 0b01, 1)], 0)
    (1,)
    """
    own = places[rank]
    return tuple(
        other for other, place in enumerate(places) if other != rank and _meet(place, own) and place.group == own.group
    )


def turns(places: Sequence[Place]) -> list[int]:
    """When each rank works: those that share processors not at the same time, as far as they are few.

    >>> turns([Place(7, 0b01, 1), Place(7, 0b10, 1), Place(7, 0b01, 1), Place(8, 0b11, 1)])
    [0, 0, 1, 0]
    """
    found: list[int] = []
    there: dict[int, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        taken = {found[other] for other in there[place.kernel] if _meet(places[other], place)}
        found.append(next((turn for turn in range(MAX_TURNS) if turn not in taken), rank % MAX_TURNS))
        there[place.kernel].append(rank)
    return found


def _meet(one: Place, other: Place) -> bool:
    """Whether both may be given the same processor."""
    return one.kernel == other.kernel and bool(one.processors & other.processors)


def clocks() -> tuple[float, float, float]:
    """Seconds of wall time, of processor time of this thread, and in which it could have run and was given no processor (0 where
    the kernel does not tell; Documentation/scheduler/sched-stats.rst)."""
    try:
        delay = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        delay = 0.0
    return time.perf_counter(), time.thread_time(), delay


def groups_here() -> Cgroups:
    """This process's control groups now."""
    return read_cgroups(LocalHost())


def held(rank: int, before: Cgroups, after: Cgroups) -> Held:
    """What the quota of this rank's control group took from it in between."""
    return Held(
        rank=rank,
        quota=after.quota,
        periods=max(after.periods - before.periods, 0),
        throttled=max(after.throttled - before.throttled, 0),
    )


# How fast a rank is by itself, and how long it waits for the others: a group -> this rank's pace. Never judges.


Tell = Callable[[int, str], None]

TRIES, TRIES_ALONE = 7, 15
SIDE, TIMES = {"cpu": 384, "cuda": 4096}, 16
"""The matrices that are multiplied, and how often: some 20 ms on one core and on a GPU. A scheduler runs shorter work at
once even where other processes need the core too."""


def pace(group: RankGroup, tell: Tell) -> Pace:
    """The median seconds of a fixed piece of work, and of the waits at barriers that follow it.

    The work is done first without any communication in between, by ranks that share processors one after the other: whom a
    rank then waits for is no rank of the job. Each rank uses one thread, because threads of many ranks would disturb each other.
    """
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work, places = _work(group), all_places(group)
        tell(1, "working alone")
        work()
        alone = _alone(group, work, turns(places))
        tell(2, "working, and waiting for the others")
        dist.barrier()
        waits = []
        for _ in range(TRIES):
            work()
            wait_for_device(group)
            waits.append(_seconds(group, dist.barrier)[0])
    finally:
        torch.set_num_threads(threads)
    on_processor = group.device == "cpu"
    return Pace(
        rank=group.rank,
        compute=median(wall for wall, _, _ in alone),
        waited=median(waits),
        cpu=min(cpu for _, cpu, _ in alone) if on_processor else 0.0,
        delayed=median(min(delay / wall, 1.0) if wall else 0.0 for wall, _, delay in alone) if on_processor else 0.0,
        equals=equals(places, group.rank) if on_processor else (),
    )


def _alone(group: RankGroup, work: Callable[[], None], when: list[int]) -> list[tuple[float, float, float]]:
    """The clocks of this rank's work, done in its turn."""
    import torch.distributed as dist

    found = []
    for turn in range(max(when) + 1):
        dist.barrier()
        if when[group.rank] == turn:
            found = [_seconds(group, work) for _ in range(TRIES_ALONE)]
    return found


def _work(group: RankGroup) -> Callable[[], None]:
    import torch

    side = SIDE["cpu" if group.device == "cpu" else "cuda"]
    dtype = torch.float32 if group.device == "cpu" else torch.float16
    left = torch.ones(side, side, dtype=dtype, device=group.device)
    right, result = torch.ones_like(left), torch.empty_like(left)

    def work() -> None:
        for _ in range(TIMES):
            torch.matmul(left, right, out=result)

    return work


def _seconds(group: RankGroup, act: Callable[[], Any]) -> tuple[float, float, float]:
    """How far the clocks went on: wall time, processor time, waiting for a processor."""
    begun = clocks()
    act()
    wait_for_device(group)
    wall, cpu, delay = (now - before for now, before in zip(clocks(), begun, strict=True))
    return wall, cpu, delay


SIZE = 1 << 20
REPEATS = 3
LONG = 0.5
"""Seconds there and back from which a message is sent once more, and from three times as much not again: on a slow way chance
counts for little."""
AGAIN = 2.0
"""A pair this many times slower than usual for its kind is tried again; ``speed.checks`` reports only slower ones."""


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
