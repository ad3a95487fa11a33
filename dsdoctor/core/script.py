"""The user's script in whose process dsdoctor runs: whose code a file is, lines on its stderr, threads that it does not see.

Imports nothing when it is asked: threads that watch a script must not.
"""

import _thread
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable

PYTHON = re.compile(r"/lib(64)?/python3(\.\d+t?)?/(?!(site|dist)-packages/)|/python3\d+\.zip/")
INSTALLED = re.compile(r"/(site|dist)-packages/")
ROOMS = "checkpoint|checks|child_scripts|cli|comm|config|core|diagnosis|hang|hosts|memory|overflow|probe|ranks|run|ui"
TORCH = re.compile(
    r"/(site|dist)-packages/torch/"
    r"|/torch/((distributed|utils|nn|optim|autograd|amp|fx|func|compiler|cuda|jit|ao|_\w+)/|(functional|overrides|library|serialization|_\w+)\.py$)"
)
MACHINERY = re.compile(rf"/deepspeed/(runtime|utils|comm)/|/dsdoctor/({ROOMS})/")
"""Of DeepSpeed what calls a model, gathers its parameters or stands in for torch's functions."""
OF_DEEPSPEED = re.compile(r"/deepspeed/((ops|pipe|moe|sequence|accelerator|checkpoint)/|__init__\.py$)")
"""Layers and the like: a model's code, and not the user's own."""
STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
"""Where this Python's own library is, which need not look like one. Asked here: sysconfig imports when it is asked, and a thread
that watches must not."""
CHECKPOINT_WATCH = "_dsdoctor_checkpoint"
"""The attribute of an engine's load_checkpoint and save_checkpoint where dsdoctor.run watches them."""
TYPED = ("<stdin>", "<ipython-input-")


@functools.lru_cache(maxsize=4096)
def is_machinery(file: str) -> bool:
    """Whether code only runs a model, and is none: Python's own, torch's, DeepSpeed's engine, dsdoctor's.

    By its path alone: a stack may be of another machine. What is in no file (`<string>`) is nobody's, but for what a user typed.

    >>> files = "/home/me/train.py", "/v/lib/python3.11/site-packages/transformers/trainer.py", "<stdin>"
    >>> [is_machinery(file) for file in files]
    [False, False, False]
    >>> files = "/v/lib/python3.11/queue.py", "/x/deepspeed/runtime/zero/linear.py", "<frozen runpy>", "/src/torch/nn/functional.py"
    >>> [is_machinery(file) for file in files]
    [True, True, True, True]
    """
    if file.startswith("<"):
        return not file.startswith(TYPED)
    if file.startswith(STDLIB) and INSTALLED.search(file) is None:
        return True
    return any(pattern.search(file) is not None for pattern in (PYTHON, TORCH, MACHINERY))


def is_user_file(file: str) -> bool:
    """Whether code is the user's own: neither machinery nor an installed package.

    >>> files = "/home/me/train.py", "/v/lib/python3.11/site-packages/transformers/trainer.py", "/x/deepspeed/moe/layer.py"
    >>> [is_user_file(file) for file in files]
    [True, False, False]
    """
    return not is_machinery(file) and INSTALLED.search(file) is None and OF_DEEPSPEED.search(file) is None


def write_stderr(text: str) -> None:
    """Write to the script's stderr.

    A script may have set ``sys.stderr`` to None (then ``print`` would take stdout), closed it or put an object of its own there,
    whoever reads it may have gone, and the disk below it may be full.
    """
    stream, own = sys.stderr, sys.__stderr__
    if stream is None:
        return
    try:
        if own is not None and stream is own:
            # past its buffer: what stays there on a full disk would give the script Python's exit status 120
            own.flush()
            os.write(own.fileno(), text.encode(own.encoding, "backslashreplace"))
        else:
            stream.write(text)
            stream.flush()
    except Exception:  # the object is the script's: it may raise anything, and nothing of that is the training's matter
        return


_start, _allocate_lock, _ident = _thread.start_new_thread, _thread.allocate_lock, _thread.get_ident
"""As they are before the script runs: it may put others in their place."""
_RUNNING: set[int] = set()
# a child has none of its parent's threads, and its own may have their identifiers
os.register_at_fork(after_in_child=_RUNNING.clear)


def unlisted_idents() -> frozenset[int]:
    """The identifiers of all unlisted threads of this process that run."""
    return frozenset(_RUNNING.copy())


class UnlistedThread:
    """A thread of ours in the script's process, which Python's ``threading`` does not know: it calls ``target`` once.

    It is in no list of threads that the script may join or count, and the hooks of ``threading.setprofile`` and
    ``threading.settrace`` do not run in it. Nobody waits for it at the end of the process, and an exception ends it without a
    word. What it runs must not call ``threading.current_thread``: that would list it.
    """

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
