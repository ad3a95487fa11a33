"""The command as a user runs it, and an environment with the CUDA build of torch."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.build_targets import targets_of
from dsdoctor.builder.source.fetch import NEWEST, fetch_sdist, newest_sdist
from dsdoctor.builder.targets import environment
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder, private_folder

CUDA_TORCH = "2.14.1"


def dsdoctor(*arguments: str, env: dict[str, str] | None = None, **more: str) -> tuple[int, dict[str, Any]]:
    """Run the command as a user would; the exit status and the one JSON document. ``env`` is the whole environment."""
    argv = [sys.executable, "-m", "dsdoctor", *arguments, "--json"]
    done = subprocess.run(argv, env={**(env or unpinned()), **more}, capture_output=True, text=True, timeout=3000)
    sys.stderr.write(done.stderr[-3000:])
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema"] == "dsdoctor/1"
    return done.returncode, document


@pytest.fixture(scope="session")
def cuda_python() -> str:
    """An environment with the CUDA build of torch, as a matrix makes and keeps it; no GPU, no toolkit of its own."""
    host = LocalHost(env=unpinned())
    (target,) = targets_of((), (CUDA_TORCH,), (), None)
    return environment(host, target, private_folder(cache_folder(host)), offline=False, say=print)


def unpinned() -> dict[str, str]:
    """This environment without CI's pin of torch: these tests choose theirs."""
    return {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}


def unpack_deepspeed(folder: Path) -> Path:
    """A source tree of the newest DeepSpeed in a folder of its own."""
    host = LocalHost()
    cache = private_folder(cache_folder(host))
    known = sorted((cache / "sdists").glob("deepspeed-*.tar.gz"))
    sdist = (
        newest_sdist(known) if known else fetch_sdist(host, NEWEST, cache=cache, python=sys.executable, offline=False)
    )
    folder.mkdir(parents=True)
    with tarfile.open(sdist) as archive:
        # Debian 12's own Python 3.11.2 has no filters
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(folder)
    return next(folder.iterdir())
