"""A disk that is full, read-only or broken at each single call that changes it: nothing is half-written, and it is told."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCENARIOS = ("keep", "prune", "record", "unpack")
WELL, USAGE, UNABLE, FAILED = 0, 2, 3, 4


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For LD_PRELOAD: makes one call fail, or all from one on."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("library") / "failing_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, HERE / "failing_disk.c", "-ldl"], check=True)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    ["ENOSPC", "EROFS", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("EIO", "EDQUOT", "EACCES"))],
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_disk_that_fails_at_any_call_leaves_nothing_half_written(
    scenario: str, error: str, library: Path, tmp_path: Path
) -> None:
    runs = runs_of(scenario, errno.__dict__[error], library, tmp_path)

    assert sum(run["reached"] for run in runs) > 4, "hardly a call was made to fail"
    assert [run for run in runs if run["wrong"]] == []
    assert [
        run for run in runs if run["status"] not in {WELL, USAGE, UNABLE, FAILED} or "Traceback" in run["said"]
    ] == []
    silent = [run for run in runs if run["status"] != WELL and not run["said"].strip() and scenario != "keep"]
    assert silent == []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_before_any_call_that_changes_the_disk_leaves_nothing_half_written(
    scenario: str, library: Path, tmp_path: Path
) -> None:
    runs = runs_of(scenario, -signal.SIGKILL, library, tmp_path)

    assert sum(run["status"] == -signal.SIGKILL for run in runs) > 2
    assert [run for run in runs if run["wrong"]] == []
    assert runs[-1]["status"] == WELL


def runs_of(scenario: str, error: int, library: Path, tmp_path: Path) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "tests.core.failing_disk", scenario, str(tmp_path / "runs"), str(int(error)), "1"]
    env = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
