"""Times collectives on the ranks of torch.distributed's default group: the mode of the test -> seconds per call on this rank.

Rank 0 decides how often a call is made, and whether there is time for it. Checks no values.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from dsdoctor.comm.collectives.calls import agreed, newest, wait_for_device
from dsdoctor.comm.models import Mode, RankGroup
from dsdoctor.comm.results import Speed, Speeds, Timing

# nccl-tests' bandwidths of a collective: bytes and seconds -> algbw and busbw; all ranks' times -> one figure. Pure.
#
# Source of the definitions: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md and the ``GetBw`` function of each
# test in its ``src``. n ranks, S bytes, t seconds; everything in bytes a second.


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


Tell = Callable[[int, str], None]
Act = Callable[[], Any]
Keep = Callable[[tuple[Timing, ...]], None]

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    ("cpu", Mode.DEFAULT): (8, MIB, 16 * MIB),
    ("cpu", Mode.FULL): (8, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    ("cuda", Mode.DEFAULT): (8, MIB, 32 * MIB, 256 * MIB),
    ("cuda", Mode.FULL): (8, KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
}
"""Bytes (nccl-tests' S). NVLink reaches its full speed from some hundred MiB on."""

GROUP_SIZE = {"cpu": MIB, "cuda": 128 * MIB}
"""Bytes of the all_reduce of a group of nodes."""

SECONDS_PER_SIZE = 0.06
"""Seconds for which a collective of one size is called."""

SLOWEST = 100e6
"""Bytes a second that are assumed before anything large was sent."""

MIN_CALLS, MAX_CALLS = 5, 2000
WARM_UP = 3
BATCH, MAX_BATCH_SECONDS = 100, 1.0
"""Calls after which it is looked whether there is time for more, and seconds that are enough: where packets are lost one call may
take a thousand times as long as another."""


class _Progress:
    """Tells where this rank is; every rank counts the same steps."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._step, self._at = tell, 0, ""

    def on(self, at: str = "") -> None:
        self._step, self._at = self._step + 1, at or self._at
        self._tell(self._step, self._at)


def time_collectives(
    group: RankGroup, mode: Mode, tell: Tell, budget: float, rate: float | None = None, keep: Keep | None = None
) -> tuple[Timing, ...]:
    """Time each collective at each size, small ones first, within about ``budget`` seconds; nothing for the quick test.
    ``rate``: bytes a second that messages of this rank reached. ``keep`` gets what is timed so far, each time.

    On a GPU each call lies between two CUDA events, on a CPU between two looks at the clock.
    """
    if group.world < 2 or mode is Mode.QUICK:
        return ()
    until = time.monotonic() + budget
    ops = [timed for timed in TIMED.values() if timed.zero or mode is Mode.FULL]
    found: list[Timing] = []
    spent: dict[str, Timing] = {}
    progress = _Progress(tell)
    for size, timed in ((size, timed) for size in _sizes(group, mode) for timed in ops):
        progress.on(f"{timed.op} of {size} bytes")
        # a call to get warm, and one that counts
        if agreed(group, time.monotonic() + 2 * _foreseen(size, spent.get(timed.op), rate or SLOWEST) < until):
            timing = _time(group, timed, size, until, progress)
            spent[timed.op] = timing
            found.append(timing)
            if keep is not None:
                keep(tuple(found))
    return tuple(found)


def time_group(group: RankGroup, tell: Tell, budget: float) -> tuple[Timing, ...]:
    """One collective of this group: an all_reduce of a few bytes, and one large enough that a link that is slow shows. On a slow
    way it is called less often, within about ``budget`` seconds, but once in any case."""
    large = GROUP_SIZE["cpu" if group.device == "cpu" else "cuda"]
    until, progress = time.monotonic() + budget, _Progress(tell)
    progress.on("timing a group")
    return tuple(_time(group, TIMED["all_reduce"], size, until, progress) for size in (8, large))


def _foreseen(size: int, last: Timing | None, rate: float = SLOWEST) -> float:
    """The seconds a call may take, by the last size: in proportion, but what is small takes its time whatever its size.

    >>> _foreseen(2_000_000, Timing(op="all_reduce", size=1_000_000, calls=9, least=0.01, median=0.01, p99=0.01))
    0.02
    >>> _foreseen(1_000_000, Timing(op="all_reduce", size=8, calls=9, least=0.01, median=0.01, p99=0.01))
    0.02
    """
    if last is None:
        return 0.0
    proportional = last.median * size / last.size
    return proportional if last.size >= 64 * KIB else min(proportional, last.median + size / min(rate, SLOWEST))


def _sizes(group: RankGroup, mode: Mode) -> Sequence[int]:
    """The sizes for a device, none that takes more than a tenth of the free memory of rank 0's GPU."""
    if group.device == "cpu":
        return SIZES["cpu", mode]
    import torch

    most = agreed(group, torch.cuda.mem_get_info()[0] / 10)
    return [size for size in SIZES["cuda", mode] if size <= most]


def _time(group: RankGroup, timed: Timed, size: int, until: float, progress: _Progress) -> Timing:
    """As often as the clock of rank 0 leaves time for; at least the first call counts."""
    ranks = group.world if timed.total else 1
    elements = max(size // 4 // ranks, 1)
    act = _prepared(group, timed, elements)
    seconds = _seconds(group, act, 1, progress)
    fits = agreed(group, (until - time.monotonic()) / max(seconds[0], 1e-7))
    if fits >= WARM_UP + MIN_CALLS:
        warm = _seconds(group, act, WARM_UP, progress)
        calls = int(agreed(group, min(max(SECONDS_PER_SIZE / max(min(warm), 1e-7), MIN_CALLS), MAX_CALLS)))
        seconds = _in_batches(group, act, calls, until, progress)
    elif fits >= 1:
        seconds = _seconds(group, act, int(fits), progress)
    return Timing(
        op=timed.op,
        size=elements * 4 * ranks,
        calls=len(seconds),
        least=min(seconds),
        median=median(seconds),
        p99=quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0],
    )


def _in_batches(group: RankGroup, act: Act, calls: int, until: float, progress: _Progress) -> list[float]:
    """The time of each call, of fewer where they take much longer than foreseen."""
    seconds: list[float] = []
    while len(seconds) < calls:
        seconds += _seconds(group, act, min(calls - len(seconds), BATCH), progress)
        progress.on()
        if len(seconds) < calls and agreed(group, sum(seconds) > MAX_BATCH_SECONDS or time.monotonic() > until):
            break
    return seconds


def _prepared(group: RankGroup, timed: Timed, elements: int) -> Act:
    """The call, with buffers of so many elements a chunk."""
    import torch

    sizes = [elements * (kind or group.world) for kind in timed.buffers]
    buffers = [torch.zeros(size, dtype=torch.float32, device=group.device) for size in sizes]
    act = newest(*timed.names)
    return lambda: act(*buffers, *timed.more)


def _seconds(group: RankGroup, act: Act, calls: int, progress: _Progress) -> list[float]:
    """The time of each of some calls, after all ranks have come here."""
    agreed(group, 0)
    wait_for_device(group)
    return _by_clock(act, calls, progress) if group.device == "cpu" else _by_events(act, calls)


def _by_clock(act: Act, calls: int, progress: _Progress) -> list[float]:
    found: list[float] = []
    for _ in range(calls):
        begun = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun)
        if calls <= MIN_CALLS:
            # long ones: else a slow network looks like a hang
            progress.on()
    return found


def _by_events(act: Act, calls: int) -> list[float]:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        act()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]
