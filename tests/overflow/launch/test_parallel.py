"""Faults around layers that hand values to other ranks; a sample of ``python -m benchmarks.overflow_faults --parallel``."""

from pathlib import Path

import pytest

from tests.overflow.launch.conftest import launch
from tests.overflow.launch.parallel_cases import everything, judged

pytestmark = pytest.mark.launch
CASES = dict([*everything().items()][::5])


def test_the_rank_where_it_began_is_named_whatever_the_others_got_of_it(tmp_path: Path) -> None:
    ranks = launch("parallel_worker.py", CASES, tmp_path)

    for name, case in CASES.items():
        assert [rank[name]["problem"] for rank in ranks] == ["", ""], name
        verdict = judged(case, ranks[0][name]["findings"])
        said = verdict.pop("said")
        assert verdict == {"kind": "right", "module": "right", "line": "right", "rank": "right"}, f"{name}: {said}"
