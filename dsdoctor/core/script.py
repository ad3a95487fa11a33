"""The user's script in whose process dsdoctor runs: whose code a file is, its stderr, threads that it does not see, stand-ins.

A stand-in is a function of ours in the place of a library's: what a script sees of it is the library's name, signature, file and
line. Only its stack shows us: what is called in the library's place has its own frame, in our file.

Imports nothing when it is asked: threads that watch a script must not.
"""

import _thread
import ast
import functools
import inspect
import os
import re
import sys
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any

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


OURS = f"{Path(__file__).parents[1]}/"
TEMPLATE = """
def stand_in(*args, **kwargs):
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        # a bare raise adds no entry for this frame (from Python 3.11 on)
        error.__traceback__ = without_ours(error.__traceback__)
        raise
"""
HOOKS = "_dsdoctor_hooks"
"""The attribute of a method that stands in for a class's own."""


def standing_for(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does as ``call``, and looks like ``original``. What it raises has the library's traceback, without ours."""
    of_original = getattr(original, "__code__", None)
    file, line = (of_original.co_filename, of_original.co_firstlineno) if of_original else (__file__, 1)
    made = FunctionType(_code(file, line), {"call": call})
    made.__globals__["without_ours"] = functools.partial(_without_ours, made.__code__)
    functools.update_wrapper(made, original)
    try:
        # without it inspect.getfullargspec would show `*args`
        made.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # of a function in C that has none
        return made
    return made


def _code(file: str, line: int) -> CodeType:
    tree = ast.parse(TEMPLATE)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            vars(node).update(lineno=line, end_lineno=line, col_offset=0, end_col_offset=0)
    codes = compile(tree, file, "exec").co_consts
    return next(each for each in codes if isinstance(each, CodeType))


def _without_ours(code: CodeType, trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the entries of ours that it begins with; whole where there is nothing else."""
    inner = trace
    while inner is not None and (inner.tb_frame.f_code is code or inner.tb_frame.f_code.co_filename.startswith(OURS)):
        inner = inner.tb_next
    return inner or trace


def hook_method(instance: Any, name: str, around: Callable[..., Any]) -> Callable[[], None] | None:
    """Have ``around`` called in place of a method of one instance, with the method itself and its arguments, until what this
    returns is called. None where that cannot be done: the method is not a plain one of the instance's class.

    The instance has no new attribute, and a method that a script puts into the class later on is called as it would be without us.
    ``around`` is a bound method, and is held weakly: who owns it must live as long as it is to be called.
    """
    owner = next((each for each in type(instance).__mro__ if name in vars(each)), None)
    if owner is None or name in vars(instance) or not isinstance(vars(owner)[name], FunctionType):
        return None
    hooked: _Hooked = getattr(vars(owner)[name], HOOKS, None) or _Hooked(owner, name)
    hook = weakref.WeakMethod(around)
    try:
        hooked.hooks.setdefault(instance, []).append(hook)
    except TypeError:  # neither a key nor weakly held
        return None

    def undo() -> None:
        hooked.remove(instance, hook)

    return undo


class _Hooked:
    """A method of a class, and which instances have what called around it."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name, self.method = owner, name, vars(owner)[name]
        self.hooks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self.made = standing_for(self.method, self.call)
        setattr(self.made, HOOKS, self)
        setattr(owner, name, self.made)

    def call(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the method."""
        call: Callable[..., Any] = functools.partial(self.method, instance)
        for hook in tuple(self.hooks.get(instance, ())):
            if (around := hook()) is not None:
                call = functools.partial(around, call)
        return call(*args, **kwargs)

    def remove(self, instance: Any, hook: Any) -> None:
        """Without one of the hooks; after the last one the class is as it was."""
        mine = self.hooks.get(instance, [])
        if hook in mine:
            mine.remove(hook)
        if not mine:
            self.hooks.pop(instance, None)
        # what the script has put in its place meanwhile stays
        if not self.hooks and vars(self.owner).get(self.name) is self.made:
            setattr(self.owner, self.name, self.method)
