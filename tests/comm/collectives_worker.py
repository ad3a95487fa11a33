"""One rank for the tests of the collectives: RANK, WORLD_SIZE and a port; writes what it exchanged as JSON to a file.

Arguments: what to do ("right", "deepspeed" or "speed"), the mode, the file. Knows nothing of faults: those come from outside.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from dsdoctor.comm.collectives.calls import steps
from dsdoctor.comm.collectives.run import run_layer, run_steps
from dsdoctor.comm.models import Mode, RankGroup
from dsdoctor.comm.results import Speeds
from dsdoctor.comm.speed.pace import pace, time_pairs
from dsdoctor.comm.speed.speed import time_collectives


def tell(number: int, what: str) -> None:
    print(f"{time.monotonic():.3f} {number} {what}", flush=True)


class Printed:
    """Prints how far the rank is."""

    def tell(self, step: int, at: str) -> None:
        tell(step, at)

    def skip(self, step: int, reason: str) -> None:
        tell(step, f"left out: {reason}")


def speed(group: RankGroup, mode: Mode) -> list[Speeds]:
    own = pace(group, tell)
    pairs = time_pairs(group, tell, 5.0)
    return [Speeds(rank=group.rank, timings=time_collectives(group, mode, tell, 5.0), pairs=pairs, pace=own)]


def main(what: str, mode: Mode, answer: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, rank == 0, timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("test", store), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    group = RankGroup(rank=rank, world=world, device="cpu", backend="gloo", hosts=("here",) * world)
    begun = time.monotonic()
    if what == "speed":
        answer.write_bytes(msgspec.json.encode(speed(group, mode)))
    else:
        progress = Printed()
        layer = what == "deepspeed"
        found = run_layer(group, progress) if layer else run_steps(group, steps(mode, group), progress, budget=60)
        answer.write_bytes(msgspec.json.encode(found))
    tell(0, f"took {time.monotonic() - begun:.3f} s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Mode(sys.argv[2]), Path(sys.argv[3]))
