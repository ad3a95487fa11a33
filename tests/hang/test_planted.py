"""Real hangs on real ranks: a sample of `python -m benchmarks.hang`, whose whole table is in benchmarks/results.

Needs DeepSpeed. Two or three gloo ranks a case, forked from one process that has imported torch and DeepSpeed.
"""

import importlib.util

import pytest

from tests.hang.planted import one_case, run_all

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed"),
]
HANGS = [
    ("loader", 3, 1),
    ("save_alone", 1, 0),
    ("handled", 2, 0),
    ("interpreter", 0, 1),
    ("killed", 3, 0),
    ("stale_lock", 2, 1),
]
WELL = [("evaluate_on_one", 3, 0), ("slow_save", 0, 1), ("long_accumulation", 2, 0), ("late_data", 1, 1)]


def test_each_planted_hang_is_named_with_its_rank_and_a_run_that_is_slow_is_left_alone() -> None:
    sample = [(*each, 3) for each in HANGS] + [(*each, 2) for each in WELL]
    cases = [one_case(kind, stage, ranks, 3, rank) for kind, stage, rank, ranks in sample]
    results = {result["kind"]: result["judged"] for result in run_all(cases, show=True)}

    assert results == {kind: "ok" for kind, *_ in sample}
