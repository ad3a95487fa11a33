"""nccl-tests' bandwidths of a collective: bytes and seconds -> algbw and busbw; all ranks' times -> one figure. Pure.

Source of the definitions: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md and the ``GetBw`` function of each
test in its ``src``. n ranks, S bytes, t seconds; everything in bytes a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dsdoctor.comm.results import Speed, Speeds, Timing

BUSY = 250e6
"""Bytes a second that gloo reaches even on busy processors: only below that a path is slow."""
CHUNK, ALL = 1, 0
"""A buffer of one rank's chunk, and of all ranks' chunks."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A collective that is timed, and what nccl-tests makes of its time: busbw = S/t * (times * (n - 1) / n), or S/t alone where
    ``times`` is None. torch's function (the first of ``names`` that is there) takes ``buffers``, and then ``more``. ``zero``: ZeRO
    uses it, so it is timed by default."""

    op: str
    names: tuple[str, ...]
    buffers: tuple[int, ...]
    times: int | None
    more: tuple[int, ...] = ()
    zero: bool = False

    @property
    def total(self) -> bool:
        """Whether S counts the bytes of all ranks' chunks, not those of one rank."""
        return ALL in self.buffers

    @property
    def formula(self) -> str:
        """In words.

        >>> print(TIMED["all_reduce"].formula)
        busbw = S/t x 2(n-1)/n, S = one rank's bytes
        >>> print(TIMED["all_gather"].formula)
        busbw = S/t x (n-1)/n, S = all ranks' bytes
        """
        factor = {None: "", 1: " x (n-1)/n", 2: " x 2(n-1)/n"}[self.times]
        whose = "all ranks'" if self.total else "one rank's"
        return f"busbw = S/t{factor}, S = {whose} bytes"


def algbw(size: int, seconds: float) -> float:
    """S/t: how fast the collective looks from outside.

    >>> algbw(1_000_000, 0.001)
    1000000000.0
    """
    return size / seconds if seconds > 0 else 0.0


def busbw(op: str, size: int, seconds: float, world: int) -> float:
    """How fast the slowest link was used, whatever the number of ranks: comparable with the speed of hardware.

    >>> [busbw(op, 1_000_000, 0.001, 4) / 1e9 for op in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    times = TIMED[op].times
    factor = 1.0 if times is None else times * (world - 1) / world
    return algbw(size, seconds) * factor


def merge(speeds: Sequence[Speeds]) -> tuple[Speed, ...]:
    """The times of all ranks, one figure for each collective and size: the slowest rank's median decides.

    p50 is the median of the ranks' medians and p99 the largest of theirs. What not every rank timed is left out.
    """
    ranks = sorted(speeds, key=lambda rank: rank.rank)
    tables = [{(timing.op, timing.size): timing for timing in rank.timings} for rank in ranks]
    keys = [(timing.op, timing.size) for timing in ranks[0].timings] if ranks else []
    return tuple(
        _over_ranks([table[key] for table in tables], [rank.rank for rank in ranks])
        for key in keys
        if all(key in table for table in tables)
    )


def _over_ranks(timings: Sequence[Timing], ranks: Sequence[int]) -> Speed:
    op, size = timings[0].op, timings[0].size
    medians = tuple(timing.median for timing in timings)
    seconds = max(medians)
    return Speed(
        op=op,
        size=size,
        seconds=seconds,
        p50=median(medians),
        p99=max(timing.p99 for timing in timings),
        algbw=algbw(size, seconds),
        busbw=busbw(op, size, seconds, len(timings)),
        slowest=ranks[medians.index(seconds)],
        medians=medians,
    )


_TIMED = (
    Timed(op="all_reduce", names=("all_reduce",), buffers=(CHUNK,), times=2, zero=True),
    Timed(
        op="all_gather",
        names=("all_gather_single", "all_gather_into_tensor"),
        buffers=(ALL, CHUNK),
        times=1,
        zero=True,
    ),
    Timed(
        op="reduce_scatter",
        names=("reduce_scatter_single", "reduce_scatter_tensor"),
        buffers=(CHUNK, ALL),
        times=1,
        zero=True,
    ),
    Timed(op="all_to_all", names=("all_to_all_single",), buffers=(ALL, ALL), times=1),
    Timed(op="broadcast", names=("broadcast",), buffers=(CHUNK,), times=None, more=(0,)),
)
TIMED = {timed.op: timed for timed in _TIMED}
"""By name."""
