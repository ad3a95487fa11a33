"""A training script that knows nothing of dsdoctor: a DeepSpeed engine, three steps, and a line that says what it saw.

`--fail RANK`: an error that a rule of `dsdoctor diagnose` knows. `--spawn N`: makes its own ranks, by torch.
"""

import argparse
import inspect
import json
import os
import sys

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    # DeepSpeed's own optimizers would compile an op
    "zero_allow_untested_optimizer": True,
}


def train(args: argparse.Namespace) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).mean())
        engine.step()
    if args.fail == rank:
        raise Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
    saw = {
        "rank": rank,
        "world": torch.distributed.get_world_size(),
        "steps": engine.global_steps,
        "argv": sys.argv[1:],
        "watched": inspect.unwrap(deepspeed.initialize) is not deepspeed.initialize,
    }
    # one write: the lines of several ranks share a pipe
    os.write(1, f"SAW {json.dumps(saw)}\n".encode())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def spawned(rank: int, args: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.spawn)}
    train(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    parser.add_argument("--fail", type=int, default=-1)
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--x", default="")
    given = parser.parse_args()
    if given.spawn:
        torch.multiprocessing.spawn(spawned, args=(given,), nprocs=given.spawn)
    else:
        train(given)
