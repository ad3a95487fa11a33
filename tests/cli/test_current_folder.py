"""``python -m dsdoctor``, as it is printed for the next step, in a folder where somebody put modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN = Path(__file__).parents[2]
BEFORE_OURS = {"runpy", "pkgutil", "dsdoctor"}
"""What Python itself imports for -m, before any line of ours."""


def imported() -> set[str]:
    """The modules that a command imports from outside of dsdoctor, by their first names."""
    code = "import sys, runpy; sys.argv[1:] = ['explain', 'gpu-oom']; runpy.run_module('dsdoctor', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        env={**os.environ, "PYTHONPATH": str(OWN)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    return {name for name in names if name.isidentifier() and name not in BEFORE_OURS}


def ran(folder: Path, *words: str, **more: str) -> set[str]:
    """The planted modules that ran in a command."""
    (folder / "ran").unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": str(OWN), **more}
    subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, check=False)
    return set((folder / "ran").read_text().split()) if (folder / "ran").exists() else set()


@pytest.mark.slow
def test_no_module_of_the_current_folder_is_run_for_python_m(tmp_path: Path) -> None:
    names = imported()
    assert {"cyclopts", "textwrap"} <= names
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n")

    plain = ran(tmp_path, "-c", "import textwrap")
    printed = ran(tmp_path, "-m", "dsdoctor", "explain", "gpu-oom")
    ranks = ran(tmp_path, "-m", "dsdoctor.comm", "--help")
    for name in names - {"textwrap"}:
        (tmp_path / f"{name}.py").unlink()
    named = ran(tmp_path, "-m", "dsdoctor", "explain", "gpu-oom", PYTHONPATH=f"{tmp_path}{os.pathsep}{OWN}")

    assert "textwrap" in plain, "else nothing was planted"
    assert printed == set()
    assert ranks == set()
    assert named == {"textwrap"}, "what PYTHONPATH names is the user's own"
