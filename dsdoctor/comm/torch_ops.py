"""What several rooms of comm ask of torch: the rounds in which all pairs meet, waiting for the device, its newest record."""

from collections.abc import Callable
from typing import Any

from dsdoctor.comm.models import RankGroup

Pair = tuple[int, int]
ALL_PAIRS = 64
"""The largest world in which every pair is tried."""
SAMPLED = 16
"""Rounds, so partners of each rank, in a larger world."""


def rounds(world: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs in which everybody meets everybody once: the circle method of round-robin tournaments.

    n - 1 rounds for an even n, n for an odd one, where each rank waits once. The lower rank of a pair comes first.

    >>> rounds(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    >>> rounds(3)
    (((1, 2),), ((0, 2),), ((0, 1),))
    """
    seats = world + world % 2
    return tuple(_round(world, seats, turn) for turn in range(seats - 1)) if world > 1 else ()


def _round(world: int, seats: int, turn: int) -> tuple[Pair, ...]:
    """Rank 0's seat is fixed, the others move on by one place each round; opposite seats meet."""
    circle = [0, *((place - turn) % (seats - 1) + 1 for place in range(seats - 1))]
    pairs = (sorted((circle[place], circle[-1 - place])) for place in range(seats // 2))
    return tuple((low, high) for low, high in pairs if high < world)


def spread_rounds(world: int) -> tuple[tuple[Pair, ...], ...]:
    """All rounds, or some spread evenly where there are too many ranks for all."""
    if world <= ALL_PAIRS:
        return rounds(world)
    seats = world + world % 2
    return tuple(_round(world, seats, turn * (seats - 1) // SAMPLED) for turn in range(SAMPLED))


def agreed(group: RankGroup, value: float) -> float:
    """Rank 0's number on every rank, after all have come here: nobody goes on by its own clock."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    number = torch.tensor([float(value)], dtype=torch.float64, device=group.device)
    dist.broadcast(number, 0)
    return float(number.item())


def wait_for_device(group: RankGroup) -> None:
    """Until the GPU has done what it was given; nothing to wait for on a CPU."""
    if group.device != "cpu":
        import torch

        torch.cuda.synchronize()


def newest(*names: str) -> Callable[..., Any]:
    """The first of these functions that this torch.distributed has: 2.13 renamed two, and warns on every rank of the old names."""
    import torch.distributed as dist

    for name in names:
        if (found := getattr(dist, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    raise NotImplementedError(f"torch.distributed has no {names[-1]}")
