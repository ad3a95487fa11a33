"""A training without DeepSpeed that knows nothing of dsdoctor: torch's DistributedDataParallel on gloo.

`--steps` (ten) of `--seconds` (none) each, on one rank alone with `--slow RANK`. `--on RANK`: that rank sleeps for ever
before its fourth step, `--late RANK`: before it joins the others; without them the training ends.
Where the launcher says no RANK (mpirun, srun) the script asks the launcher's own variables, as such scripts do.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


def start() -> None:
    told = next((names for names in LAUNCHERS if "RANK" not in os.environ and names[0] in os.environ), None)
    if told is None:
        dist.init_process_group("gloo")
        return
    rank, world = (int(os.environ[name]) for name in told)
    place = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--late", default="")
    parser.add_argument("--slow", type=int, default=-1)
    given = parser.parse_args()
    if given.late and given.late == os.environ.get("RANK"):
        time.sleep(3600)
    start()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(given.steps):
        if given.slow in {-1, dist.get_rank()}:
            time.sleep(given.seconds)
        if step == 3:
            print("three steps", flush=True)
        if step == 3 and dist.get_rank() == given.on:
            time.sleep(3600)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
