"""torch functions used by several parts of comm: rounds of pairs, a value agreed on by all ranks, waiting for the device."""

from collections.abc import Callable
from typing import Any

from dsdoctor.comm.models import RankGroup

Pair = tuple[int, int]
ALL_PAIRS = 64
"""The largest number of ranks of which every pair is tried."""
SAMPLED = 16
"""The number of rounds, so of partners of each rank, above that."""


def rounds(world: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs in which every rank meets every other once: the circle method of round-robin tournaments.

    n - 1 rounds for an even n, n for an odd one, where each rank waits once. The lower rank of a pair comes first.

    >>> rounds(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    >>> rounds(3)
    (((1, 2),), ((0, 2),), ((0, 1),))
    """
    seats = world + world % 2
    return tuple(one_round(world, turn) for turn in range(seats - 1)) if world > 1 else ()


def one_round(world: int, turn: int) -> tuple[Pair, ...]:
    """Rank 0's seat is fixed, the others move on by one place each round; opposite seats meet."""
    seats = world + world % 2
    circle = [0, *((place - turn) % (seats - 1) + 1 for place in range(seats - 1))]
    pairs = (sorted((circle[place], circle[-1 - place])) for place in range(seats // 2))
    return tuple((low, high) for low, high in pairs if high < world)


def spread_rounds(world: int) -> tuple[tuple[Pair, ...], ...]:
    """All rounds, or some spread evenly where there are too many ranks for all."""
    if world <= ALL_PAIRS:
        return rounds(world)
    seats = world + world % 2
    return tuple(one_round(world, turn * (seats - 1) // SAMPLED) for turn in range(SAMPLED))


def agreed(group: RankGroup, value: float) -> float:
    """Rank 0's number on every rank, after all ranks have come here, so that no rank decides by its own clock."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    number = torch.tensor([float(value)], dtype=torch.float64, device=group.device)
    dist.broadcast(number, 0)
    return float(number.item())


def wait_for_device(group: RankGroup) -> None:
    """Wait until the GPU has done its work; on a CPU there is nothing to wait for."""
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
