"""How fast a rank is by itself, and how long it waits for the others: a group -> this rank's pace. Never judges."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Pace
from dsdoctor.comm.torch_ops import wait_for_device

Tell = Callable[[int, str], None]

TRIES = 7
SIDE, TIMES = {"cpu": 384, "cuda": 4096}, 16
"""The matrices that are multiplied, and how often: some 20 ms on one core and on a GPU. A scheduler runs shorter work at
once even where other processes need the core too."""


def pace(group: RankGroup, tell: Tell) -> Pace:
    """The median seconds of a fixed piece of work, and of the waits at barriers that follow it.

    The work is done first without any communication in between, on all ranks at the same time. Each rank uses one thread,
    because the threads of many ranks on a host would disturb each other.
    """
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work = _work(group)
        tell(1, "working alone")
        work()
        dist.barrier()
        alone = [_seconds(group, work) for _ in range(TRIES)]
        tell(2, "working, and waiting for the others")
        dist.barrier()
        waits = []
        for _ in range(TRIES):
            work()
            wait_for_device(group)
            waits.append(_seconds(group, dist.barrier))
    finally:
        torch.set_num_threads(threads)
    return Pace(rank=group.rank, compute=median(alone), waited=median(waits))


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


def _seconds(group: RankGroup, act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    wait_for_device(group)
    return time.perf_counter() - begun
