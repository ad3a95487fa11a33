"""The command line without a process of its own, which is most of its time."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

from dsdoctor.cli.app import run as run_command_line


def run(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    """What stood on stdout and stderr, and the exit status. Variables of this shell that steer a build do not count."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "CUDA_"))}
    with patch.dict(os.environ, {**clean, **env}, clear=True), _streams(stdin) as (out, err), _young():
        try:
            status = run_command_line(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
    return subprocess.CompletedProcess(arguments, status, out.getvalue().decode(), err.getvalue().decode())


@contextlib.contextmanager
def _young() -> Iterator[None]:
    """As in a process that has read no index yet: where pydantic is imported, cyclopts makes a model of every option anew."""
    if loaded := sys.modules.get("pydantic"):
        with patch.object(loaded, "__version__", "1"):
            yield
    else:
        yield


@contextlib.contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Standard streams of bytes, as a process has them."""
    out, err = io.BytesIO(), io.BytesIO()
    names = {"stdin": io.BytesIO(stdin), "stdout": out, "stderr": err}
    streams = {name: io.TextIOWrapper(raw, encoding="utf-8", errors="replace") for name, raw in names.items()}
    try:
        with patch.multiple(sys, **streams):
            yield out, err
            streams["stdout"].flush()
            streams["stderr"].flush()
    finally:
        for stream in streams.values():
            stream.detach()
