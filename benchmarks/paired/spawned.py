"""Ranks that the script makes itself, by torch.multiprocessing.spawn."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def rank_main(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29627")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(rank)
    x = torch.rand(3)
    dist.all_reduce(x)
    say(rank, x.tolist(), __name__, sys.argv[1:])
    if "fail" in sys.argv and rank == 1:
        raise ValueError("on purpose")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, args=(2,), nprocs=2)
    say("all done")
