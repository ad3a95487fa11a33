"""Where nothing can be written: the script runs, and a verdict is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANG = """
from dsdoctor.hang.local_rank import Node
from dsdoctor.hang.models import HangOptions
from dsdoctor.run.hang_report import tell
from pathlib import Path
from tests.hang.made import calling, elsewhere, incident, view

stuck = incident(view(0, calling("all_reduce"), 7), view(1, elsewhere(), 6), world=2, run="abc")
tell(stuck, Node(Path("/none"), "node1"), HangOptions(after=60.0, folder="/dsdoctor-hang"))
"""
REPOSITORY = Path(__file__).parents[2]


def on_a_read_only_root(script: str) -> "subprocess.CompletedProcess[str]":
    """Run Python where no file can be made, a temporary one neither."""
    inside = "mount -o remount,bind,ro / && for at in /tmp /var/tmp; do ! mountpoint -q $at || mount -o remount,bind,ro $at; done"
    command = ["unshare", "-m", "sh", "-c", f'{inside} && exec "$0" -c "$1"', sys.executable, script]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for name in ("TMPDIR", "TEMP", "TMP"):
        environment.pop(name, None)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"the root cannot be made read-only here: {done.stderr.strip()}")
    return done


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.slow
def test_a_verdict_is_said_where_no_file_can_be_written() -> None:
    probe = on_a_read_only_root("import tempfile; tempfile.gettempdir()")
    assert "No usable temporary directory" in probe.stderr

    done = on_a_read_only_root(HANG)

    assert "[hang-rank-behind]" in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1] == "dsdoctor: no files: /dsdoctor-hang: Read-only file system"
    assert done.returncode == 0


@pytest.mark.slow
def test_a_script_runs_from_a_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; print(sys.argv[1:])\n")
    (tmp_path / "gone").mkdir()
    ask = f"cd {tmp_path / 'gone'} && rmdir {tmp_path / 'gone'} && exec {sys.executable} -m dsdoctor.run"

    def ran(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["sh", "-c", f'{ask} "$@"', "sh", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    done, missing = ran("--report", "r.jsonl", str(tmp_path / "train.py"), "3"), ran("train.py")

    assert (done.stdout, done.returncode) == ("['3']\n", 0), done.stderr
    assert missing.returncode == 2, missing.stderr
