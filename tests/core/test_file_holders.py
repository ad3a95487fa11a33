"""Who has a file open, and when nobody can be sure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.core.processes import FIRST_NAMESPACE, FileHolder, doubt_of, file_system_of, holder_of, namespace


def test_who_has_a_file_open_is_found_and_afterwards_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w"):
        held = holder_of(str(path))
    free = holder_of(str(path))
    path.unlink()

    assert held == FileHolder(pid=os.getpid(), doubt="")
    assert free is not None
    assert free.pid is None
    assert holder_of(str(path)) is None


def test_another_process_that_has_it_open_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = f"import os; os.open({str(path)!r}, os.O_CREAT | os.O_EXCL); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        held = holder_of(str(path))
        process.kill()

    assert held is not None
    assert held.pid == process.pid


@pytest.mark.skipif(namespace() != FIRST_NAMESPACE, reason="in a container nobody is sure")
def test_on_a_disk_of_this_machine_a_file_of_ours_is_sure(tmp_path: Path) -> None:
    assert doubt_of(str(tmp_path), os.geteuid()) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root sees every process")
def test_of_another_users_file_nobody_is_sure(tmp_path: Path) -> None:
    assert "another user's" in doubt_of(str(tmp_path), os.geteuid() + 1)


def test_the_kind_of_file_system_is_that_of_the_innermost_mount() -> None:
    assert (file_system_of("/proc/self/stat"), file_system_of("/sys/kernel")) == ("proc", "sysfs")
