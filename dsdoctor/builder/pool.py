"""One pool for all compilers of all ops: tokens for the processors, and bytes for the memory.

The tokens are a GNU make job server over a fifo. Each compiler holds one while it runs; nvcc >= 13 takes further ones for
further architectures. So the number of busy processors is the number of tokens, whatever the number of ops and builds.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Pool:
    """Tokens and memory. Use as a context manager; ``folder`` holds the fifo, ``memory`` is in bytes, None for no limit."""

    def __init__(self, folder: Path, jobs: int, memory: int | None = None) -> None:
        self._path = folder / "jobserver"
        self.jobs = jobs
        self._limit = memory
        self._fd = -1
        self._taken = 0
        self._room = threading.Condition()

    def __enter__(self) -> "Pool":
        os.mkfifo(self._path, mode=0o600)
        self._fd = os.open(self._path, os.O_RDWR)
        os.write(self._fd, b"+" * self.jobs)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    @contextmanager
    def share(self, memory: int = 0) -> Iterator[None]:
        """Wait for memory and a token, hold them, give them back. What needs more than there is runs alone."""
        with self._room:
            self._room.wait_for(lambda: self._fits(memory))
            self._taken += memory
        try:
            held = os.read(self._fd, 1)
            try:
                yield
            finally:
                os.write(self._fd, held)
        finally:
            with self._room:
                self._taken -= memory
                self._room.notify_all()

    def variables(self) -> dict[str, str]:
        """What makes a child a client."""
        return {"MAKEFLAGS": f" -j{self.jobs} --jobserver-auth=fifo:{self._path}"}

    def _fits(self, memory: int) -> bool:
        return self._limit is None or self._taken == 0 or self._taken + memory <= self._limit
