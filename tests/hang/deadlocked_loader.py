"""A training on gloo in which the data loader's worker of every rank waits for ever for a lock that it has itself."""

import threading

import torch
import torch.distributed as dist

LOCK = threading.Lock()


class Deadlocked(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 20:
            LOCK.acquire()
            LOCK.acquire()
        return torch.ones(4)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for batch in torch.utils.data.DataLoader(Deadlocked(), batch_size=2, num_workers=1):
        dist.all_reduce(batch)
