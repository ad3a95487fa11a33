"""How fast a rank is by itself, and how long it waits for the others: a group -> this rank's pace. Never judges."""

from collections.abc import Callable
from statistics import median
from typing import Any

from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Pace
from dsdoctor.comm.speed.processors import all_places, clocks, equals, turns
from dsdoctor.comm.torch_ops import wait_for_device

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
