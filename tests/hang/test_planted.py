"""Real hangs on real ranks: a sample of `python -m benchmarks.hang`, whose whole table is in benchmarks/results.

Needs DeepSpeed. Two or three gloo ranks a case, forked from one process that has imported torch and DeepSpeed.
"""

import importlib.util

import pytest

from tests.hang.forked_ranks import freezable_disk
from tests.hang.planted import one_case, run_all

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed"),
]
HANGS = [
    ("save_alone", 1, 0, 2),
    ("handled", 2, 0, 2),
    ("interpreter", 0, 1, 3),
    ("killed", 3, 0, 3),
    ("stale_lock", 2, 1, 2),
]
WELL = [("long_accumulation", 2, 0, 2), ("evaluate_on_one", 3, 0, 2), ("slow_save", 0, 1, 2)]
"""Kinds with their stage, the rank of the mistake and how many there are. A loader that stands still, and a rank that is late, are
in test_launchers."""


def test_each_planted_hang_is_named_a_slow_run_is_left_alone_and_a_watched_one_computes_the_same() -> None:
    # those that take longest begin first
    hangs = [*HANGS, ("frozen_disk", 2, 1, 2)] if may_freeze() else HANGS
    sample = [*WELL, *hangs]
    cases = [one_case(kind, stage, ranks, 3, rank) for kind, stage, rank, ranks in sample]
    alike = [one_case("none", 2, 2, 3, 1), {**one_case("none", 2, 2, 3, 1), "unwatched": True}]
    results = list(run_all([*cases, *alike], show=True, at_once=8))

    judged = {result["kind"]: result["judged"] for result in results if result["kind"] != "none"}
    sums = {
        ("WATCHED True" in result["text"]): sums_of(result["text"]) for result in results if result["kind"] == "none"
    }
    assert judged == {kind: "ok" for kind, *_ in sample}
    assert len(sums[True]) == 2
    assert sums[True] == sums[False]


def may_freeze() -> bool:
    """Whether a process can be brought into disk sleep here: a user who may mount and freeze a file system."""
    with freezable_disk(True) as place:
        return bool(place)


def sums_of(text: str) -> list[str]:
    """What each rank computed."""
    return sorted(line for line in text.splitlines() if line.startswith("SUM"))
