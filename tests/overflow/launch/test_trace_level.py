"""The trace level on two ranks: a file for each, with both phases, that the commands read; a full disk ends no training."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.overflow.frames.frame import CallPhase, Frame, StepEnd
from dsdoctor.overflow.trace.trace_file import file_name, read
from tests.overflow.launch.conftest import launch

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("traces")
    cases = {
        "zero 2": {"stage": 2, "dtype": "fp16", "folder": str(folder / "two"), "last": 2},
        "zero 3": {"stage": 3, "dtype": "bf16", "folder": str(folder / "three"), "checkpointing": "reentrant"},
    }
    return folder, launch("trace_worker.py", cases, tmp_path_factory.mktemp("launch"))


@pytest.mark.parametrize(("name", "zero"), [("two", 2), ("three", 3)])
def test_each_rank_writes_both_phases_of_the_chosen_batches(traces: Any, name: str, zero: int) -> None:
    for rank in range(2):
        header, *lines = read(traces[0] / name / file_name(rank))
        frames = [line for line in lines if isinstance(line, Frame)]

        assert (header.rank, header.world, header.zero_stage) == (rank, 2, zero)  # type: ignore[union-attr]
        assert {(frame.batch, frame.phase) for frame in frames} == {(b, phase) for b in (1, 2) for phase in CallPhase}
        assert {frame.rank for frame in frames} == {rank}
        assert [line.step for line in lines if isinstance(line, StepEnd)] == [1, 2]
        assert any(frame.weights for frame in frames)


def test_all_ranks_stop_after_the_named_batch_with_the_same_words(traces: Any) -> None:
    assert {rank["zero 2"]["raised"] for rank in traces[1]} == {
        "dsdoctor: stopped after batch 2, as abort_after_batch_num asks"
    }
    assert {rank["zero 2"]["steps"] for rank in traces[1]} == {3}
    assert {rank["zero 3"]["raised"] for rank in traces[1]} == {""}


def test_the_commands_read_it(traces: Any) -> None:
    def said(*command: str) -> str:
        run = [sys.executable, "-m", "dsdoctor", "trace", *command]
        return subprocess.run(run, capture_output=True, text=True, check=False).stdout

    shown = said("show", str(traces[0] / "three"), "--batch", "2", "--rank", "1", "--module", "blocks.1.gain")
    compared = json.loads(said("compare", str(traces[0] / "three"), "--batch-a", "1", "--batch-b", "2", "--json"))

    assert "blocks.1.gain Gain" in shown
    assert compared["command"] == "trace compare"
    assert not [finding for finding in compared["findings"] if finding["severity"] == "error"]


def test_a_full_disk_is_told_once_and_ends_no_training(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        case = {"stage": 1, "dtype": "bf16", "folder": str(disk), "full": True}
        ranks = launch("trace_worker.py", {"full": case}, tmp_path)
        read_back = [list(read(disk / file_name(rank))) for rank in range(2)]
    finally:
        subprocess.run(["umount", str(disk)], check=True)

    assert [rank["full"] for rank in ranks] == [{"raised": "", "steps": 4}] * 2
    assert (tmp_path / "0.log").read_text().count("the trace ends; training continues") == 1
    assert all(lines for lines in read_back)
