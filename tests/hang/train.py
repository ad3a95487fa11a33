"""A training script that knows nothing of dsdoctor, with one mistake planted: a DeepSpeed engine, gloo, a few steps.

`--kind KIND --on RANK --at STEP --stage N`: what goes wrong, on which rank, in which step, under which ZeRO stage.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from mistakes import EVERYWHERE, MISTAKES, WIDTH
from more_waits import MORE_EVERYWHERE, MORE_WAITS
from own_waits import OWN_EVERYWHERE, OWN_WAITS

STEPS = 8


class Numbers(torch.utils.data.Dataset):
    """Batches; the one at ``stuck`` never comes, that at ``slow`` takes so many seconds of reading."""

    def __init__(
        self, stuck: int | None, slow: int | None = None, seconds: float = 0.0, steps: int = STEPS, late: float = 0.0
    ) -> None:
        self.stuck, self.slow, self.seconds, self.steps, self.late = stuck, slow, seconds, steps, late

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.stuck:
            says_when()
            time.sleep(3600)
        if index == self.slow:
            says_when()
            read_slowly(self.seconds)
        time.sleep(self.late)
        return torch.ones(WIDTH) * (index + 1)


def read_slowly(seconds: float) -> None:
    """As from a file system far away: a part of a megabyte now and then, and no work to speak of."""
    until = time.monotonic() + seconds
    with Path("/dev/zero").open("rb", buffering=0) as file:
        while time.monotonic() < until:
            file.read(1 << 19)
            time.sleep(0.25)


def compute(seconds: float) -> None:
    time.sleep(seconds)


def says_when() -> None:
    os.write(1, f"AT {time.monotonic()}\n".encode())


def config(given: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": given.accumulate,
        "zero_optimization": {
            "stage": given.stage,
            "reduce_bucket_size": 4096,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
    }


class Experts(torch.nn.Module):
    """Two experts, of which the batch of a rank may need one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.both = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for expert in self.experts if self.both else self.experts[:1]:
            values = expert(values)
        return values


def train(given: argparse.Namespace) -> None:
    limit = {"timeout": timedelta(seconds=given.timeout)} if given.timeout else {}
    deepspeed.init_distributed("gloo", verbose=False, **limit)
    rank = dist.get_rank()
    here = rank == given.on
    torch.manual_seed(0)
    first = Experts() if given.kind == "experts" else torch.nn.Linear(WIDTH, WIDTH)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(given))
    stuck = given.at if here and given.kind in {"loader", "worker"} else None
    slow = given.at if here and given.kind == "slow_worker" else None
    late = given.seconds if here and given.kind == "late_data" else 0.0
    workers = 1 if "worker" in given.kind else 0
    loader = torch.utils.data.DataLoader(
        Numbers(stuck, slow, given.seconds, given.steps, late), batch_size=1, num_workers=workers
    )
    for step, batch in enumerate(loader):
        mistake = (MISTAKES | OWN_WAITS | MORE_WAITS).get(given.kind)
        if (given.kind == "late_compute" and here) or (given.kind == "turns" and step % dist.get_world_size() == rank):
            compute(given.seconds)
        planted = (
            step == given.at
            and mistake is not None
            and (here or given.kind in EVERYWHERE | OWN_EVERYWHERE | MORE_EVERYWHERE)
        )
        if planted and here:
            says_when()
        done = mistake(engine, here, given) if planted and mistake else None
        if done == "skip":
            continue
        if done == "end":
            break
        for _ in range(given.accumulate):
            if step == given.at and given.kind == "long_accumulation":
                time.sleep(given.seconds)
            loss = engine(batch).sum()
            engine.backward(loss)
            engine.step()
    total = torch.cat([parameter.detach().flatten() for parameter in engine.parameters()]).double().sum().item()
    os.write(1, f"SUM {rank} {total!r}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="none")
    parser.add_argument("--on", type=int, default=-1)
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", default="")
    parser.add_argument("--timeout", type=float, default=0.0, help="of torch's collectives, in seconds")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    return parser.parse_args(words)


if __name__ == "__main__":
    train(arguments())
