"""Real hangs on real ranks: a sample of `python -m benchmarks.hang`, whose whole table is in benchmarks/results.

Needs DeepSpeed. Three gloo ranks a case, forked from one process that has imported torch and DeepSpeed.
"""

import importlib.util

import pytest

from tests.hang.planted import all_cases, run_all

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed"),
]
SAMPLE = [
    ("loader", 3, 1),
    ("save_alone", 1, 0),
    ("stopped", 0, 2),
    ("interpreter", 0, 1),
    ("killed", 3, 0),
    ("none", 3, 1),
]


def test_each_planted_hang_is_named_with_its_rank_and_a_run_without_one_is_left_alone() -> None:
    cases = [case for kind, stage, rank in SAMPLE for case in all_cases([kind], [stage], [3], [3], [rank])]
    results = list(run_all(cases, show=False))

    assert [(result["kind"], result["judged"]) for result in results] == [(kind, "ok") for kind, _, _ in SAMPLE]
