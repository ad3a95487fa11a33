"""One pool for all compilers of all ops and builds: slots for the processors, and bytes for the memory.

nvcc with N threads takes N slots. It could be a client of a GNU make job server instead (13 on), but then takes every token
there is for as long as it runs, and one that is killed never gives them back (tried, nvcc 13.0).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pool:
    """``jobs`` slots and ``memory`` in bytes, None for no limit."""

    def __init__(self, jobs: int, memory: int | None = None) -> None:
        self.jobs = jobs
        self._limit = memory
        self._busy = self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def share(self, slots: int = 1, memory: int = 0) -> Iterator[None]:
        """Wait for slots and memory, hold them, give them back. What needs more than there is runs alone."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(slots, memory))
            self._busy, self._taken = self._busy + slots, self._taken + memory
        try:
            yield
        finally:
            with self._changed:
                self._busy, self._taken = self._busy - slots, self._taken - memory
                self._changed.notify_all()

    def _fits(self, slots: int, memory: int) -> bool:
        if self._busy == 0:
            return True
        room = self._limit is None or self._taken + memory <= self._limit
        return room and self._busy + slots <= self.jobs
