"""A training script that knows nothing of dsdoctor, with one mistake planted: a DeepSpeed engine, gloo, a few steps.

`--kind KIND --on RANK --at STEP --stage N`: what goes wrong, on which rank, in which step, under which ZeRO stage.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

STEPS = 8
WIDTH = 16


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


def train(given: argparse.Namespace) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    here = rank == given.on
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
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
        mistake = MISTAKES.get(given.kind)
        if (given.kind == "late_compute" and here) or (given.kind == "turns" and step % dist.get_world_size() == rank):
            compute(given.seconds)
        planted = step == given.at and mistake is not None and (here or given.kind in EVERYWHERE)
        if planted and here:
            says_when()
        if planted and mistake(engine, here, given) == "skip":
            continue
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


def skipped_step(engine, here, given):
    return "skip"


def save_alone(engine, here, given):
    engine.save_checkpoint(given.folder)


def other_collective(engine, here, given):
    values = torch.ones(64)
    if here:
        dist.all_gather([torch.empty(64) for _ in range(dist.get_world_size())], values)
    else:
        dist.all_reduce(values)


def other_shape(engine, here, given):
    dist.all_reduce(torch.ones(10 if here else 1000))


def swallowed(engine, here, given):
    try:
        raise ValueError("a bad sample")
    except ValueError:
        return "skip"


def exit_0(engine, here, given):
    sys.exit(0)


def exit_early(engine, here, given):
    os._exit(0)


def stopped(engine, here, given):
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(engine, here, given):
    os.kill(os.getpid(), signal.SIGKILL)


def interpreter(engine, here, given):
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def lock(engine, here, given):
    held = threading.Lock()
    held.acquire()
    thread = threading.Thread(target=held.acquire, daemon=True)
    thread.start()
    held.acquire()


def sleeps(engine, here, given):
    time.sleep(3600)


def pipe(engine, here, given):
    reading, _ = os.pipe()
    os.read(reading, 1)


def stale_lock(engine, here, given):
    """As torch does when a launch that was killed while it compiled has left its lock."""
    if here:
        path = Path(given.folder, "fused_adam", "lock")
        path.parent.mkdir()
        path.touch()
        FileBaton(str(path)).wait()
    dist.barrier()


def full_disk(engine, here, given):
    engine.save_checkpoint(given.folder)


def full_disk_swallowed(engine, here, given):
    try:
        if here:
            with Path(given.folder, "model.bin").open("wb") as file:
                file.write(b"x" * (64 << 20))
        dist.barrier()
    except OSError:
        return "skip"


def evaluate_on_one(engine, here, given):
    if here:
        model, until = torch.nn.Linear(WIDTH, 1), time.monotonic() + given.seconds
        while time.monotonic() < until:
            for number in range(50):
                model(torch.ones(1, WIDTH) * number)
            len(sorted(str(number) for number in range(1000)))
    dist.barrier()


def slow_step(engine, here, given):
    time.sleep(given.seconds)


def slow_save(engine, here, given):
    if here:
        until = time.monotonic() + given.seconds
        with Path(given.folder, "slow.bin").open("wb") as file:
            while time.monotonic() < until:
                file.write(os.urandom(1 << 20))
                file.flush()
                time.sleep(0.3)
                file.seek(0)
    dist.barrier()


def long_first_step(engine, here, given):
    """As torch.compile at first: each rank for itself, one for longer."""
    until = time.monotonic() + given.seconds / (1 if here else 2)
    while time.monotonic() < until:
        compile("\n".join(f"a{number} = {number}" for number in range(3000)), "x", "exec")


def compiler(engine, here, given):
    """One rank builds an extension, and only its compiler works."""
    if here:
        subprocess.run(["timeout", str(given.seconds), "sh", "-c", "while :; do :; done"], check=False)
    dist.barrier()


def long_compilation(engine, here, given):
    until = time.monotonic() + given.seconds
    while time.monotonic() < until:
        compile("\n".join(f"a{number} = {number}" for number in range(3000)), "x", "exec")


MISTAKES = {
    "skipped_step": skipped_step,
    "save_alone": save_alone,
    "other_collective": other_collective,
    "other_shape": other_shape,
    "swallowed": swallowed,
    "exit_0": exit_0,
    "exit_early": exit_early,
    "stopped": stopped,
    "killed": killed,
    "interpreter": interpreter,
    "lock": lock,
    "sleeps": sleeps,
    "pipe": pipe,
    "stale_lock": stale_lock,
    "full_disk": full_disk,
    "full_disk_swallowed": full_disk_swallowed,
    "evaluate_on_one": evaluate_on_one,
    "slow_step": slow_step,
    "slow_save": slow_save,
    "long_compilation": long_compilation,
    "long_first_step": long_first_step,
    "compiler": compiler,
}
EVERYWHERE = {
    "other_collective",
    "other_shape",
    "stale_lock",
    "full_disk",
    "full_disk_swallowed",
    "evaluate_on_one",
    "slow_step",
    "slow_save",
    "long_compilation",
    "long_first_step",
    "compiler",
}
"""What every rank calls; the planted rank does another thing in it."""


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
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    return parser.parse_args(words)


if __name__ == "__main__":
    train(arguments())
