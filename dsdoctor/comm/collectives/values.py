"""The values that ranks send: a call of a collective -> its input, and the reduced result of all ranks.

They depend on rank and position, and are exact in their dtype even when added up over all ranks. Deterministic; never talks to
another rank.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsdoctor.comm.models import RankGroup

if TYPE_CHECKING:
    import torch

EXACT = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8, "int64": 1 << 20}
"""The largest number up to which a dtype holds every integer. int64's own is larger: see ``BOTH_WORDS``."""

BOTH_WORDS = (1 << 32) + 1
"""int64 values are multiples of this, so that the upper half of each word carries them too; 2^20 of them stay below 2^53."""

CODES, RUN = 1021, 61
"""Two primes: the position code runs up by one an element for 61 elements, then starts one higher; all repeats after 62,281."""

UNTOUCHED = -77
"""The value of a result before a collective writes it; no rank sends this value."""


class Reduction(enum.Enum):
    """How the ranks' values become one; the value is the name of torch's ReduceOp."""

    SUM = "SUM"
    MAX = "MAX"
    MIN = "MIN"
    AVG = "AVG"


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective to be done: ``elements`` a rank (a chunk, where a collective has one for each rank), from or to ``root``.

    ``inverted`` are the ranks that send the inverse of their values: how the error then changes shows which rank is wrong.
    """

    group: RankGroup
    dtype: str
    elements: int
    root: int = 0
    reduction: Reduction | None = None
    inverted: frozenset[int] = frozenset()

    def sent(self, rank: int, start: int, stop: int) -> "torch.Tensor":
        """What ``rank`` sends in the positions from ``start`` to ``stop``, on this rank's device."""
        return _spread(_column(self, rank), self, start, stop)

    def mine(self, length: int) -> "torch.Tensor":
        """This rank's own input."""
        return self.sent(self.group.rank, 0, length)

    def reduced(self, start: int, stop: int) -> "torch.Tensor":
        """What all ranks' inputs become in the positions from ``start`` to ``stop``."""
        return _spread(_all_columns(self), self, start, stop)

    def blank(self, length: int) -> "torch.Tensor":
        """A buffer for a result, in which nothing has been written yet."""
        import torch

        return torch.full((length,), UNTOUCHED, dtype=getattr(torch, self.dtype), device=self.group.device)

    @property
    def tolerance(self) -> float:
        """The relative error that a right result may have: NCCL multiplies by 1/n before it adds, which is exact for powers
        of two only."""
        world = self.group.world
        if self.reduction is not Reduction.AVG or world & (world - 1) == 0:
            return 0.0
        return (world + 1) / EXACT[self.dtype]


def largest(dtype: str, world: int, reduction: Reduction | None) -> tuple[int, int]:
    """The largest value, and the step between ranks that send one (the others send 0), so that the sum over all ranks is exact.

    >>> largest("float32", 2, Reduction.SUM), largest("bfloat16", 64, Reduction.SUM), largest("bfloat16", 1000, Reduction.SUM)
    ((1021, 1), (4, 1), (2, 8))
    >>> largest("bfloat16", 1000, None)
    (251, 1)
    """
    exact = EXACT[dtype]
    if reduction not in (Reduction.SUM, Reduction.AVG):
        return min(CODES, exact - 5), 1
    every = 1 if 2 * world <= exact else -(-2 * world // exact)
    return min(CODES, exact // -(-world // every)), every


def _column(call: CollectiveCall, rank: int) -> "torch.Tensor":
    """A rank's value for each of the position codes, in int64."""
    import torch

    most, every = largest(call.dtype, call.group.world, call.reduction)
    code = torch.arange(CODES, dtype=torch.int64)
    if call.reduction in (Reduction.SUM, Reduction.AVG):
        mixed = code * 7919 + rank * 104729 + code * rank * 31
        value = 1 + (mixed ^ (mixed >> 7)) % most
        value = torch.where((code + rank) % every == 0, value, torch.zeros_like(value))
    else:
        value = 1 + (code + 7 * rank) % most
    value = value * BOTH_WORDS if call.dtype == "int64" else value
    if (call.reduction is Reduction.MIN) != (rank in call.inverted):
        # -x has the same low bits as x, ~x none of them
        return ~value if call.dtype == "int64" else -value
    return value


def _all_columns(call: CollectiveCall) -> "torch.Tensor":
    """The reduced value for each of the position codes; AVG in float64."""
    import torch

    total = _column(call, 0)
    for rank in range(1, call.group.world):
        column = _column(call, rank)
        if call.reduction is Reduction.MAX:
            total = torch.maximum(total, column)
        elif call.reduction is Reduction.MIN:
            total = torch.minimum(total, column)
        else:
            total = total + column
    return total.to(torch.float64) / call.group.world if call.reduction is Reduction.AVG else total


def _spread(column: "torch.Tensor", call: CollectiveCall, start: int, stop: int) -> "torch.Tensor":
    """The values of the codes at the positions from ``start`` to ``stop``."""
    import torch

    period = RUN * CODES
    position = torch.arange(start % period, start % period + min(stop - start, period), dtype=torch.int64)
    values = column[(position % RUN + position // RUN) % CODES]
    values = values.to(dtype=getattr(torch, call.dtype), device=call.group.device)
    return values if stop - start <= period else values.repeat(-(-(stop - start) // period))[: stop - start]


def inverse_sets(world: int) -> Collection[tuple[frozenset[int], frozenset[int]]]:
    """For each binary digit of a rank's number: the ranks that have it set, and the others.

    >>> [(sorted(ones), sorted(zeros)) for ones, zeros in inverse_sets(4)]
    [([1, 3], [0, 2]), ([2, 3], [0, 1])]
    """
    ranks = frozenset(range(world))
    digits = range(max(world - 1, 1).bit_length())
    ones = [frozenset(rank for rank in ranks if rank >> digit & 1) for digit in digits]
    return [(some, ranks - some) for some in ones]
