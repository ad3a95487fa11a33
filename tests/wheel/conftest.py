"""The command as a user runs it, and an environment with the CUDA build of torch."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from typing import Any

import pytest

CUDA_TORCH = "torch==2.14.1"


def dsdoctor(*arguments: str, env: dict[str, str] | None = None, **more: str) -> tuple[int, dict[str, Any]]:
    """Run the command as a user would; the exit status and the one JSON document. ``env`` is the whole environment."""
    argv = [sys.executable, "-m", "dsdoctor", *arguments, "--json"]
    done = subprocess.run(argv, env={**(env or os.environ), **more}, capture_output=True, text=True, timeout=3000)
    sys.stderr.write(done.stderr[-3000:])
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema"] == "dsdoctor/1"
    return done.returncode, document


@pytest.fixture(scope="session")
def cuda_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An environment with the CUDA build of torch and what a build needs; no GPU, no toolkit of its own."""
    folder = tmp_path_factory.mktemp("cuda") / "venv"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    wanted = [CUDA_TORCH, "setuptools", "wheel", "ninja>=1.13"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], env=env, check=True)
    yield python
