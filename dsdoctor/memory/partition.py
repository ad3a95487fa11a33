"""How ZeRO-1 and -2 lay trained parameters out: one flat buffer, a part of it for each rank. Elements, not bytes."""

from dataclasses import dataclass

ALIGNMENT = 2
"""``nccl_start_alignment_factor`` of DeepSpeedZeroOptimizer and BF16_Optimizer."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The flat buffer's length, a rank's part, and which parameters (by place in the order) begin or reach into it.

    ``pieces``: for each parameter of the part its elements inside of it.
    """

    flat: int
    part: int
    pieces: dict[int, int]


def divide(counts: list[int], world: int, rank: int) -> Partition:
    """The part of a rank (DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned, get_data_parallel_partitions).

    >>> divide([5, 4], 2, 1)
    Partition(flat=12, part=6, pieces={1: 3})
    """
    unit = ALIGNMENT * world
    flat = -(-sum(counts) // unit) * unit
    part = flat // world
    begin, end = part * rank, part * (rank + 1)
    pieces, offset = {}, 0
    for place, count in enumerate(counts):
        inside = min(offset + count, end) - max(offset, begin)
        if inside > 0:
            pieces[place] = inside
        offset += count
    return Partition(flat=flat, part=part, pieces=pieces)
