"""What dsdoctor.run says of locks that were left behind, before a script starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.core.processes import doubt_of
from dsdoctor.run.op_compile import lock_files, stale_locks, waits_for_files

TAG = f"py{sys.version_info.major}{sys.version_info.minor}"


def left_behind(folder: Path) -> Path:
    lock = folder / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_locks_are_looked_for_where_torch_compiles(tmp_path: Path) -> None:
    mine = left_behind(tmp_path / ".cache" / "torch_extensions" / f"{TAG}_cu128")
    left_behind(tmp_path / ".cache" / "torch_extensions" / "py27_cpu")
    named = left_behind(tmp_path / "named")

    assert lock_files({"HOME": str(tmp_path)}) == [mine]
    assert lock_files({"XDG_CACHE_HOME": str(tmp_path / ".cache")}) == [mine]
    assert lock_files({"HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "named")}) == [named]
    assert lock_files({}) == []


@pytest.mark.skipif(not waits_for_files(), reason="needs a torch before 2.14")
def test_a_lock_that_nobody_holds_is_told_with_the_command_that_removes_it(tmp_path: Path) -> None:
    if doubt_of(str(tmp_path), tmp_path.stat().st_uid):
        pytest.skip("nobody can be sure here")
    lock = left_behind(tmp_path / "a folder")
    env = {"TORCH_EXTENSIONS_DIR": str(lock.parents[1])}
    with lock.open():
        held = list(stale_locks(env))
    (line,) = stale_locks(env)
    subprocess.run(["sh", "-c", line.rpartition("Remove it: ")[2]], check=True)

    assert held == []
    assert (lock.exists(), list(stale_locks(env))) == (False, [])
