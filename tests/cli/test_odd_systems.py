"""The main commands on systems that lack what others have: each ends with an answer, and none in a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.written import Kind, write

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
HIDDEN = "mount --bind {empty} {place} && "
SYSTEMS = {
    "no /proc": HIDDEN.format(empty="{empty}", place="/proc"),
    "no room in /dev/shm": HIDDEN.format(empty="{empty}", place="/dev/shm") + "mount -o remount,bind,ro /dev/shm && ",
    "32 open files": "ulimit -n 32 && ",
}
COMMANDS = {
    "machine look": ({0}, ("machine", "look")),
    "check": ({0, 1}, ("check", "--offline")),
    "diagnose": ({1}, ("diagnose", "LOG")),
    "checkpoint": ({0, 1, 6}, ("checkpoint", "CHECKPOINT")),
    "config": ({0, 1, 3}, ("config", "CONFIG")),
    "comm": ({0}, ("comm", "--nproc", "2", "--quick")),
}
REFUSED = {("no /proc", "comm"): 3}
"""What cannot be done there, and is told."""


@root
@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.launch) if name == "comm" else name for name in COMMANDS]
)
def test_a_command_ends_with_an_answer_where_the_system_lacks_something(system: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "log").write_text("step 3\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    (tmp_path / "config").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    write(tmp_path / "saved", Kind(stage=2))
    places = {"LOG": "log", "CONFIG": "config", "CHECKPOINT": "saved"}
    statuses, words = COMMANDS[name]
    argv = [
        sys.executable,
        "-m",
        "dsdoctor",
        *(str(tmp_path / places[word]) if word in places else word for word in words),
    ]
    inside = SYSTEMS[system].format(empty=tmp_path / "empty") + 'exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside, "sh", *argv, "--json"],
        env={**os.environ, "DSDOCTOR_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")

    wanted = {REFUSED[system, name]} if (system, name) in REFUSED else statuses
    assert done.returncode in wanted, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert json.loads(done.stdout)["command"] == name
