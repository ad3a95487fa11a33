"""The script that runs everything on a GPU, unattended: no end of a part is taken for a good one."""

import sys
from pathlib import Path

import pytest

from benchmarks.gpu import parts, problem_of

PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("pass", ""),
        ("raise SystemExit(3)", "ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import time; time.sleep(60)", "did not end within 0.2 s"),
    ],
)
def test_every_end_is_told_for_what_it_is(code: str, problem: str) -> None:
    assert problem_of([*PYTHON, code], 0.2 if "sleep" in code else 30) == problem


def test_what_a_part_prints_is_in_its_file_and_comm_prints_a_document_there(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    comm = parts(tmp_path)["comm"]

    assert problem_of([*PYTHON, "print('{}')"], 30, output=written) == ""
    assert written.read_text() == "{}\n"
    assert comm.output is not None
    assert comm.output.parent == tmp_path
    assert "--json" in comm.command
