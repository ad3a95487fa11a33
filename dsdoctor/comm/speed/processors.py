"""The processors that a rank may use, the time it waited for one, its control groups. Looks; ``turns``, ``equals`` are pure."""

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Held
from dsdoctor.core.cgroups import Cgroups, read_cgroups
from dsdoctor.core.host import LocalHost

MOST_TURNS = 8
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
        found.append(next((turn for turn in range(MOST_TURNS) if turn not in taken), rank % MOST_TURNS))
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
