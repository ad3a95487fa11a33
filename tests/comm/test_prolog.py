"""A node is tested before a job gets it: one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import run as run_inside
from tests.comm.test_command import AROUND


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prolog", "--hostfile", "hosts"], "--prolog tests only this node, within a minute, but --hostfile"),
        (["--prolog", "--full"], "but --full was given"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    done = run_inside("comm", *arguments)

    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.launch
def test_a_node_is_tested_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken/torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    argv = [sys.executable, "-m", "dsdoctor", "comm", "--prolog"]

    lines = []
    for more in ({"PYTHONPATH": str(broken.parent)}, {}):
        done = subprocess.run(
            argv, env={**AROUND, "SLURM_JOB_ID": "7", **more}, capture_output=True, text=True, timeout=70
        )
        (line,) = map(json.loads, done.stdout.splitlines())
        lines.append((done.returncode, line["state"], line["job"]))

    assert lines == [(1, "broken", "7"), (0, "ok", "7")]
