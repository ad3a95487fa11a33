"""The definitions of nccl-tests, worked out by hand, and the slowest rank decides."""

import pytest

from dsdoctor.comm.results import Speeds, Timing
from dsdoctor.comm.speed.speed import busbw, merge


@pytest.mark.parametrize(
    "op, size, microseconds, world, algbw, bus",
    [
        # 128 MiB in 1 ms, by the factors of nccl-tests' doc/PERFORMANCE.md; GB/s
        ("all_reduce", 134217728, 1000.0, 8, 134.22, 234.88),
        ("all_gather", 134217728, 1000.0, 8, 134.22, 117.44),
        ("reduce_scatter", 134217728, 1000.0, 2, 134.22, 67.11),
        ("broadcast", 134217728, 1000.0, 8, 134.22, 134.22),
        ("all_to_all", 134217728, 1000.0, 4, 134.22, 100.66),
    ],
)
def test_the_bandwidths_are_those_of_nccl_tests(
    op: str, size: int, microseconds: float, world: int, algbw: float, bus: float
) -> None:
    seconds = microseconds / 1e6

    assert round(size / seconds / 1e9, 2) == algbw
    assert round(busbw(op, size, seconds, world) / 1e9, 2) == bus


def test_the_slowest_ranks_median_decides() -> None:
    medians = (0.001, 0.004, 0.002)
    speeds = [
        Speeds(
            rank=rank,
            timings=(Timing(op="all_reduce", size=3_000_000, calls=9, least=0.001, median=typical, p99=10 * typical),),
        )
        for rank, typical in enumerate(medians)
    ]

    (merged,) = merge(speeds[::-1])

    assert (merged.seconds, merged.slowest, merged.medians) == (0.004, 1, medians)
    assert (merged.p50, merged.p99) == (0.002, 0.04)
    assert (merged.algbw, merged.busbw) == (pytest.approx(0.75e9), pytest.approx(1e9))


def test_what_one_rank_did_not_time_has_no_figure() -> None:
    timing = Timing(op="broadcast", size=8, calls=9, least=0.001, median=0.001, p99=0.001)

    assert merge([Speeds(rank=0, timings=(timing,)), Speeds(rank=1)]) == merge([]) == ()
