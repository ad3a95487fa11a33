"""The guide's class on engines: ZeRO-3 is borne, one bad rank stops both, and evaluating on one rank hangs nobody."""

from pathlib import Path

import pytest

from tests.overflow.launch.conftest import launch

pytestmark = pytest.mark.launch


def test_the_class_on_an_engines_module(tmp_path: Path) -> None:
    cases = {
        "zero 3, one rank": {"stage": 3, "dtype": "bf16", "plant": "activation", "only": 1},
        "zero 3, checkpointed": {"stage": 3, "dtype": "bf16", "plant": "activation", "checkpointing": "non"},
        "zero 1, healthy, evaluated": {"stage": 1, "dtype": "bf16", "plant": "none", "evaluate": True},
    }
    ranks = launch("class_worker.py", cases, tmp_path)

    messages = {rank["zero 3, one rank"]["raised"] for rank in ranks}
    assert len(messages) == 1
    assert "batch_number=2: blocks.1.gain (Gain) made" in (said := messages.pop())
    assert "on rank 1 of 2 only" in said
    assert all("on all 2 ranks" in rank["zero 3, checkpointed"]["raised"] for rank in ranks)
    assert [rank["zero 1, healthy, evaluated"] for rank in ranks] == [
        {"raised": "", "batches": 6},
        {"raised": "", "batches": 3},
    ]
