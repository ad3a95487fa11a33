"""Two jobs on one MASTER_ADDR and MASTER_PORT: the second is told, and the first keeps its ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsdoctor.comm.launch.start import free_port

pytestmark = pytest.mark.launch
LIMIT = 200


class Job:
    """Two ranks of this machine that were started by hand."""

    def __init__(self, folder: Path, port: int, *options: str, deadline: int = 60) -> None:
        folder.mkdir()
        self.folder = folder
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        shared = {**os.environ, **place}
        self.ranks = [
            self._start(
                rank, {**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, ["--deadline", f"{deadline}", *options]
            )
            for rank in range(2)
        ]

    def _start(self, rank: int, environment: dict[str, str], options: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{rank}.txt").open("w") as out:
            argv = [sys.executable, "-m", "dsdoctor.comm", *options]
            return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def said(self) -> str:
        return "".join((self.folder / f"{rank}.txt").read_text() for rank in range(2))

    def ends(self) -> list[int]:
        return [rank.wait(LIMIT) for rank in self.ranks]


def test_a_job_that_comes_to_the_port_of_one_that_has_begun_is_turned_away(tmp_path: Path) -> None:
    port = free_port()
    first = Job(tmp_path / "first", port, "--full", deadline=150)
    until = time.monotonic() + LIMIT
    while "rendezvous" not in first.said() and time.monotonic() < until:
        time.sleep(0.05)
    second = Job(tmp_path / "second", port, "--quick")

    assert second.ends() == [1, 1], second.said()
    assert (
        f"rank 0 ({os.uname().nodename}): another job is using 127.0.0.1:{port}: rank 0 is pid {first.ranks[0].pid}"
        in (" ".join(second.said().split()))
    )
    assert [status in {0, 6} for status in first.ends()] == [True, True], first.said()


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.5, 3.0])
def test_no_job_says_that_it_is_well_with_a_rank_of_the_other_and_without_its_own(delay: float, tmp_path: Path) -> None:
    port = free_port()
    first = Job(tmp_path / "first", port, "--quick")
    time.sleep(delay)
    second = Job(tmp_path / "second", port, "--quick")

    ends = [job.ends() for job in (first, second)]
    said = first.said() + second.said()
    for job, statuses in zip((first, second), ends, strict=True):
        if "2 of 2 ranks reach each other" in job.said():
            assert statuses == [0, 0], said
    if ends != [[0, 0], [0, 0]]:
        # of a store that ends while they join, the second knows no more than that
        told = (
            "another job is using",
            "processes claim rank",
            "has most likely exited",
            "ended before rank 0 of this job",
        )
        assert any(words in " ".join(said.split()) for words in told), said
