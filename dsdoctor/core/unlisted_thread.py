"""A thread of ours in the script's process, which Python's ``threading`` does not know.

It is in no list of threads that the script may join or count, and the hooks of ``threading.setprofile`` and ``threading.settrace``
do not run in it. Nobody waits for it at the end of the process. What it runs must not call ``threading.current_thread``: that
would list it.
"""

import _thread
import os
import sys
from collections.abc import Callable

_start, _allocate_lock, _ident = _thread.start_new_thread, _thread.allocate_lock, _thread.get_ident
"""As they are before the script runs: it may put others in their place."""
_RUNNING: set[int] = set()
# a child has none of its parent's threads, and its own may have their identifiers
os.register_at_fork(after_in_child=_RUNNING.clear)


def unlisted_idents() -> frozenset[int]:
    """The identifiers of all such threads of this process that run."""
    return frozenset(_RUNNING.copy())


class UnlistedThread:
    """Calls ``target`` once. An exception of it ends it without a word."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._running = _allocate_lock()

    def start(self) -> None:
        """Begin. Raises RuntimeError where no more threads are allowed."""
        self._running.acquire()
        try:
            _start(self._run, ())
        except BaseException:
            self._running.release()
            raise

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so many seconds."""
        if self._running.acquire(timeout=timeout):
            self._running.release()

    def _run(self) -> None:
        ident = _ident()
        _RUNNING.add(ident)
        try:
            self._target()
        except Exception:  # the script has no use for it
            return
        finally:
            _RUNNING.discard(ident)
            self._running.release()


def without_hooks() -> None:
    """Take off the calling thread what the script has put on all threads (``threading.setprofile_all_threads``, Python 3.12)."""
    if sys.getprofile() is not None:
        sys.setprofile(None)
    if sys.gettrace() is not None:
        sys.settrace(None)
