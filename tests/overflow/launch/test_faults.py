"""A sample of the generated faults in tiny transformers models; all of them: ``python -m benchmarks.overflow_faults``."""

from pathlib import Path

import pytest

from tests.overflow.launch.conftest import launch
from tests.overflow.launch.fault_cases import judged, sample

pytestmark = pytest.mark.launch
CASES = sample(25, seed=7)


def test_module_line_rank_and_kind_are_named_right_and_nothing_else_is_said(tmp_path: Path) -> None:
    ranks = launch("fault_worker.py", CASES, tmp_path)

    for name, case in CASES.items():
        verdict = judged(case, ranks[0][name]["findings"])
        said = verdict.pop("said")
        assert [rank[name]["problem"] for rank in ranks] == ["", ""], name
        assert [rank[name]["healthy"] for rank in ranks] == [[], []], name
        assert verdict == {"kind": "right", "module": "right", "line": verdict["line"], "rank": "right"}, (
            f"{name}: {said}"
        )
        assert verdict["line"] != "wrong", f"{name}: {said}"
