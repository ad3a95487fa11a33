"""All ranks together: a flag that is the same on every rank, and a value from each. The only collectives of overflow/."""

from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


class OverflowDetected(ValueError):
    """A nan or an inf was found, and the user asked to stop the training there. Raised on every rank alike."""


def is_together() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
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
