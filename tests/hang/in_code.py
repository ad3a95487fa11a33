"""A script that asks for the hang watch itself: two engines after each other, of ZeRO 0 and 3, each in a
`with dsdoctor.watch(engine, hang=...)`.

In each of the two, rank 1 stands still until the hang has been told; between them, where nothing asks for the watch, it keeps
the other rank waiting for longer than the watch is to wait. Prints what is told where, and ends well."""

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.comm import torch as transport

import dsdoctor

AFTER = 4.0
FOLDER = Path("told")
LONGEST = 60.0


def engine_of(stage: int) -> deepspeed.DeepSpeedEngine:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine: deepspeed.DeepSpeedEngine, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(1, 16)).sum())
        engine.step()


def stand_still() -> None:
    """Until it has been told: as something that never comes, but this test goes on."""
    began, last = time.time(), time.monotonic() + LONGEST
    while time.monotonic() < last and not any(path.stat().st_mtime >= began for path in FOLDER.glob("*")):
        time.sleep(0.5)


def main() -> None:
    # DeepSpeed's own transport on a CPU would be compiled first
    transport.build_shm_op = lambda: None
    # one import serves both ranks
    other = os.fork()
    rank = 0 if other else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    deepspeed.init_distributed("gloo", verbose=False)
    for stage in (0, 3):
        engine = engine_of(stage)
        with dsdoctor.watch(engine, hang={"after": AFTER, "folder": str(FOLDER)}):
            steps(engine, 2)
            for ring in Path("/dev/shm").glob(f"dsdoctor-hang-*/*/rank-*-{os.getpid()}.ring"):
                os.write(2, f"ring {ring}\n".encode())
            if rank == 1:
                stand_still()
            steps(engine, 2)
            # the supervisor sees that it moves again
            time.sleep(2.5)
        os.write(2, f"stage {stage} ended on rank {rank}\n".encode())
        if rank == 1:
            time.sleep(AFTER + 4)
        dist.barrier()
    engine.destroy()
    dist.destroy_process_group()
    if other and (status := os.waitpid(other, 0)[1]):
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
