"""Loader workers by fork and by spawn, with a worker_init_fn, and what they see."""

import random

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i, random.random(), numpy.random.rand(), torch.rand(1).item()


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(torch.utils.data.get_worker_info().id, 6, 2)


def start(worker):
    random.seed(worker)
    numpy.random.seed(worker)


if __name__ == "__main__":
    for context in ("fork", "spawn"):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            Rows(),
            2,
            shuffle=True,
            num_workers=2,
            worker_init_fn=start,
            generator=generator,
            multiprocessing_context=context,
        )
        for batch in loader:
            print(context, [each.tolist() for each in batch])
    print(sorted(DataLoader(Stream(), None, num_workers=2, persistent_workers=True)))
