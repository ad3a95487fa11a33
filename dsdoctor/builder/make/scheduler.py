"""Jobs, some of which wait for others -> each run once, the longest first, as many at a time as a pool allows."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass


# why this is not a client of a GNU make job server (nvcc has been one since 13): nvcc then takes every token there is for as
# long as it runs, and an nvcc that is killed never gives them back (tried with nvcc 13.0)
class Pool:
    """The slots (``jobs``) and the memory in bytes (None: no limit) that all jobs share; several builds may share one pool."""

    def __init__(self, jobs: int, memory: int | None = None) -> None:
        self.jobs = jobs
        self._limit = memory
        self._busy = self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def share(self, slots: int = 1, memory: int = 0) -> Iterator[None]:
        """Wait for slots and memory, and hold them. A job that needs more than the whole pool runs alone."""
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


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One command of a ``group``. The highest ``cost`` begins first; ``slots`` and ``memory`` (bytes) are taken from the pool.

    It begins once the jobs named in ``after`` have succeeded, and never after another of its group has failed.
    """

    name: str
    group: str
    cost: float
    slots: int = 1
    memory: int = 0
    after: frozenset[str] = frozenset()


class _Board:
    """Which jobs are waiting, done and failed."""

    def __init__(self, jobs: Sequence[CompileJob]) -> None:
        self._waiting = sorted(jobs, key=lambda job: job.cost, reverse=True)
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._changed = threading.Condition()
        self.stopped = False

    def take(self) -> CompileJob | None:
        """The job of the highest cost that may begin; waits until there is one. None when no job is left."""
        with self._changed:
            while not self.stopped:
                self._waiting = [job for job in self._waiting if job.group not in self._failed]
                if not self._waiting:
                    return None
                ready = next((job for job in self._waiting if job.after <= self._done), None)
                if ready is not None:
                    self._waiting.remove(ready)
                    return ready
                self._changed.wait()
            return None

    def end(self, job: CompileJob, *, succeeded: bool) -> None:
        """A job has ended."""
        with self._changed:
            self._done |= {job.name} if succeeded else set()
            self._failed |= set() if succeeded else {job.group}
            self._changed.notify_all()

    def stop(self) -> None:
        """No further job begins."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


def carry_out(
    jobs: Sequence[CompileJob], pool: Pool, run: Callable[[CompileJob], bool], stop: Callable[[], None]
) -> None:
    """Run every job. ``run`` returns whether the job succeeded; on any interruption ``stop`` ends what is running."""
    board = _Board(jobs)

    def work() -> None:
        while (job := board.take()) is not None:
            succeeded = False
            try:
                with pool.share(job.slots, job.memory):
                    succeeded = not board.stopped and run(job)
            finally:
                board.end(job, succeeded=succeeded)

    with ThreadPoolExecutor(max_workers=pool.jobs) as workers:
        futures = [workers.submit(work) for _ in range(min(pool.jobs, len(jobs)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            board.stop()
            stop()
            raise
