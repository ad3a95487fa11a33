import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((8,), float(i)) / 32, torch.tensor([i % 2.0])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(Rows(), seed=1)
    loader = DataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "2")))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(rank, epoch, loss.item().hex())
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": rank})
    say(rank, gathered, [len(m._forward_hooks) for m in model.modules()])
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "ddp.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
