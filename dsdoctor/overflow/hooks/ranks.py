"""The ranks of a training: a flag that is the same on all of them, a value from each, and what one rank found by itself.

``any_rank`` and ``gather`` are the only collectives of overflow/. A ``ReportStore`` waits for no rank: it lies in the key-value
store through which torch's ranks found each other.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")
MAX_REPORTS = 64
"""Reports that a rank writes for one watch: the store keeps them to the end of the job."""


class OverflowDetected(ValueError):
    """A nan or an inf was found, and the user asked to stop the training there. Raised on every rank alike."""


def is_together() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def this_rank() -> int:
    """This process's rank; 0 when it is alone."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is up on any rank: one all-reduce of one number. Every rank must call it."""
    if not is_together():
        return flag
    number = torch.tensor([int(flag)], dtype=torch.int32, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return bool(number.item())


def gather(value: Value) -> list[Value]:
    """Every rank's value, in rank order. Every rank must call it."""
    if not is_together():
        return [value]
    everyone: list[Value | None] = [None] * world()
    dist.all_gather_object(everyone, value)
    return [gathered for gathered in everyone if gathered is not None]


def _store() -> Any:
    """None: there is one rank, or its backend (MPI) has no store. Then each rank knows what it found itself."""
    try:
        return dist.distributed_c10d._get_default_store() if is_together() else None
    except ValueError:
        return None


class ReportStore:
    """The reports of all ranks about one engine. Engines are told apart by how many a rank had watched before."""

    def __init__(self) -> None:
        self._store = _store()
        self._written = 0
        self._read: dict[int, int] = {}
        number = 0 if self._store is None else self._store.add(f"dsdoctor/watches/{this_rank()}", 1)
        self._place = f"dsdoctor/found/{number}"

    def write(self, report: bytes) -> None:
        """Leave a report for the others. What cannot be written is lost, and the training goes on."""
        if self._store is None or self._written >= MAX_REPORTS:
            return
        mine = f"{self._place}/{this_rank()}"
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
            for rank in range(world()):
                theirs = f"{self._place}/{rank}"
                count = 0 if rank == this_rank() else self._store.add(theirs, 0)
                found += [self._store.get(f"{theirs}/{number}") for number in range(self._read.get(rank, 0), count)]
                self._read[rank] = count
        except RuntimeError:
            return found
        return found
