"""The script that runs everything on a GPU, unattended: no end of a part is taken for a good one."""

import sys

import pytest

from benchmarks.gpu import problem_of

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
