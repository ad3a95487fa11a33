"""Two ranks; one evaluates for a while, the first AdamW is made after that."""

import sys
import time

import torch
import torch.distributed as dist


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = None
for step in range(6):
    if step == 2:
        if dist.get_rank() == 1:
            time.sleep(9)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 4) * step).mean()
    loss.backward()
    if optimizer:
        optimizer.step()
    say(dist.get_rank(), step, loss.item().hex())
if dist.get_rank() == 0:
    time.sleep(12)
dist.barrier()
dist.destroy_process_group()
