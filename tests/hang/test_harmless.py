"""The watching thread in a rank: it imports nothing and takes no lock that the script may hold, on each of its ways."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.hang import inspection, sampler
from dsdoctor.ranks import flight_recorder

SCRIPT = Path(__file__).with_name("audited.py")
OF_THE_SCRIPT = {
    "start",
    "close",
    "failed",
    "thread_ended",
    "__init__",
    "recorder_variables",
    "flight_file",
    "read_recorded",
    "last_begun",
}
"""What the script's own threads call, and other processes."""


def audited(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False, timeout=300
    )


def functions() -> set[str]:
    """All functions that the watching thread may run."""
    found: set[str] = set()
    for module in (sampler, inspection, flight_recorder):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return found - OF_THE_SCRIPT


@pytest.mark.slow
def test_the_watching_thread_imports_nothing_on_any_way_and_waits_for_no_lock_of_the_script(tmp_path: Path) -> None:
    ran: set[str] = set()
    for way, status, said in (
        ("planted", 0, "dsdoctor: planted words"),
        ("stop", 1, "in stopped\n    time.sleep(LIMIT)\n"),
    ):
        done = audited(str(tmp_path), way)
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["imports"] == []
        assert found["of_script"] == [], "a property, a method or a descriptor of the script's was run"
        ran |= set(found["ran"])

    assert functions() - ran == set()


@pytest.mark.slow
def test_a_script_that_imports_torchs_compiler_while_nothing_moves_goes_on(tmp_path: Path) -> None:
    done = audited(str(tmp_path), "torch")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["imports"] == []
