"""What made run today: gloo's process group, one all_reduce, one large one, a line a rank. No import of ours.

``plain.py [TIMEOUT]``, and whatever DeepSpeed's launcher adds.
"""

import os
import socket
import sys
import time
from datetime import timedelta

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def first_of(names: tuple[str, ...]) -> int:
    return int(next(os.environ[name] for name in names if name in os.environ))


def main() -> None:
    timeout = next((float(word) for word in sys.argv[1:] if word[0].isdigit()), 15.0)
    rank, world = first_of(RANKS), first_of(WORLDS)
    import torch
    import torch.distributed as dist

    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = {"init_method": "env://"} if "TORCHELASTIC_RUN_ID" in os.environ else {"init_method": where}
    begun = time.monotonic()
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout), **store)
    for elements in (1, 1 << 20):
        tensor = torch.ones(elements)
        dist.all_reduce(tensor)
    dist.barrier()
    print(
        f"[{socket.gethostname()}-{rank}] is OK, sum {tensor[0].item():g}, {time.monotonic() - begun:.2f} s", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
