"""A remedy is tried before it is advised: done for real on the same batch, it helps; where none helps, none is advised."""

from pathlib import Path

import pytest

from tests.overflow.launch.conftest import launch
from tests.overflow.launch.remedy_cases import CASES, HELPS

pytestmark = pytest.mark.launch


def test_what_is_advised_helps_and_stands_as_far_inside_as_it_can(tmp_path: Path) -> None:
    ranks = launch("remedy_worker.py", CASES, tmp_path)

    for name, case in CASES.items():
        seen = ranks[0][name]
        assert seen["module"] == HELPS[case["plant"]], f"{name}: {seen['fix']}\n{seen['report']}"
        if seen["module"] is None:
            assert "Float32 does not help (checked in blocks.1.squares, in 1 module around" in seen["fix"]
        else:
            assert "(checked: with float32 in " in seen["fix"]
            assert [rank[name]["finite"] for rank in ranks] == [True, True], name
