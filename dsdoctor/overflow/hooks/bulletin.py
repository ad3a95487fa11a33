"""What a rank found by itself, written where the other ranks can read it. Waits for no rank and is no collective.

It lies in the key-value store through which torch's ranks found each other.
"""

from typing import Any

import torch.distributed as dist

from dsdoctor.overflow.hooks import ranks

MOST = 64
"""Reports that a rank writes for one watch: the store keeps them to the end of the job."""


def _store() -> Any:
    """None: there is one rank, or its backend (MPI) has no store. Then each rank knows what it found itself."""
    try:
        return dist.distributed_c10d._get_default_store() if ranks.is_together() else None
    except ValueError:
        return None


class Bulletin:
    """The reports of all ranks about one engine. Engines are told apart by how many a rank had watched before."""

    def __init__(self) -> None:
        self._store = _store()
        self._written = 0
        self._read: dict[int, int] = {}
        number = 0 if self._store is None else self._store.add(f"dsdoctor/watches/{ranks.rank()}", 1)
        self._place = f"dsdoctor/found/{number}"

    def write(self, report: bytes) -> None:
        """Leave a report for the others. What cannot be written is lost, and the training goes on."""
        if self._store is None or self._written >= MOST:
            return
        mine = f"{self._place}/{ranks.rank()}"
        try:
            self._store.set(f"{mine}/{self._written}", report)
            self._store.add(mine, 1)
        except RuntimeError:  # the store's host, rank 0, is gone
            return
        self._written += 1

    def read(self) -> list[bytes]:
        """The other ranks' reports that were not read before."""
        found: list[bytes] = []
        if self._store is None:
            return found
        try:
            for rank in range(ranks.world()):
                theirs = f"{self._place}/{rank}"
                count = 0 if rank == ranks.rank() else self._store.add(theirs, 0)
                found += [self._store.get(f"{theirs}/{number}") for number in range(self._read.get(rank, 0), count)]
                self._read[rank] = count
        except RuntimeError:
            return found
        return found
