"""One pool of compile jobs for all ops: a GNU make job server over a fifo, which ninja >= 1.13 is a client of.

Each op's process holds one token while it runs (the job every client may run for free); ninja takes further ones for
further objects. So the number of compilers is the number of tokens, whatever the number of ops.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Pool:
    """The tokens. Use as a context manager; ``folder`` holds the fifo."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._path = folder / "jobserver"
        self._jobs = jobs
        self._fd = -1

    def __enter__(self) -> "Pool":
        os.mkfifo(self._path, mode=0o600)
        self._fd = os.open(self._path, os.O_RDWR)
        os.write(self._fd, b"+" * self._jobs)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    @contextmanager
    def token(self) -> Iterator[None]:
        """Wait for a token, hold it, give it back."""
        held = os.read(self._fd, 1)
        try:
            yield
        finally:
            os.write(self._fd, held)

    def variables(self) -> dict[str, str]:
        """What makes a child a client."""
        return {"MAKEFLAGS": f" -j{self._jobs} --jobserver-auth=fifo:{self._path}"}
