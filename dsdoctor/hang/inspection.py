"""In a rank: torch's groups, stacks, exceptions, and the workers of its data loader.

All of it is asked by a thread that watches: it imports nothing, runs no code of the script's and takes no lock that the script
may hold. So nothing here has an import within a function, asks sysconfig, linecache or a codec that is not in C, or calls an
object's own methods. What an object holds is read by ``stored``: a property, a ``__getattr__`` or a ``__repr__`` is the script's
code, and so is what ``isinstance``, ``==`` and ``hash`` ask of an object. Standard library; torch is taken from sys.modules.

Whether a loader's worker still has the fault handler that it was forked with cannot be read from outside: the kernel tells only
that there is one. So it counts as ours only where no code that runs in it can have set another: the script has no
``worker_init_fn``, and none of its own files names signals at all.
"""

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from dsdoctor.core.script import is_user_file
from dsdoctor.hang.stacks import COLLECTIVES, NO_CALLS
from dsdoctor.ranks.failure import MAX_LINE_CHARACTERS

MAX_GROUPS = 64
Counters = tuple[dict[str, int], tuple[int | None, int | None]]
"""How far a rank is: the sequence numbers of its groups, and its engine's steps and micro steps."""
ROOT_ARGUMENTS = ("src", "dst", "group_src", "group_dst")
_kinds_of: Any = vars(type)["__mro__"].__get__
_values_of: Any = vars(type)["__dict__"].__get__
_name_of: Any = vars(type)["__name__"].__get__
"""What a class is, past its own class: that may be the script's as well."""
PLAIN = (str, bytes, int, float, bool, type(None))
ARGUMENTS: Any = vars(BaseException)["args"]
TRACEBACK: Any = vars(BaseException)["__traceback__"]
MESSAGES = tuple(vars(kind)["__str__"] for kind in (BaseException, KeyError, OSError))
"""How Python itself makes an exception's message."""
SYSTEM_FIELDS: Any = [vars(OSError)[name] for name in ("errno", "strerror", "filename", "filename2")]
LOADER_FILE = "/torch/utils/data/dataloader.py"
MAX_SOURCE_FILES, MAX_SOURCE_BYTES = 1000, 16 << 20
IN_SOURCE = re.compile(
    rb"\bimport\b[^\n]*\bsignal\b|\bfrom\s+signal\b|[\"']signal[\"']|SIGUSR2|valid_signals|sigaction|add_signal_handler|faulthandler"
)
IN_BINARY = re.compile(rb"sigaction|signal\0")


def stored(thing: Any, name: str) -> Any:
    """What an object, or its class, holds under a name; None where it holds nothing. No code of either is run.

    >>> class Engine:
    ...     steps = 3
    ...     def __getattribute__(self, name): raise SystemExit
    ...     micro_steps = property(lambda self: sys.exit())
    >>> [type(stored(Engine(), name)).__name__ for name in ("steps", "micro_steps", "others")]
    ['int', 'property', 'NoneType']
    """
    of_class = _of_class(type(thing), name)
    if _is_slot(of_class):
        try:
            return of_class.__get__(thing)
        except AttributeError:  # it holds nothing yet
            return None
    for kind in _kinds_of(type(thing)):
        if _is_slot(place := _values_of(kind).get("__dict__")):
            values = place.__get__(thing)
            return dict.get(values, name, of_class) if issubclass(type(values), dict) else of_class
    return of_class


def _of_class(kind: type, name: str) -> Any:
    return next((held[name] for each in _kinds_of(kind) if name in (held := _values_of(each))), None)


def _is_slot(found: object) -> bool:
    """Whether a class holds a field that C code reads: not a property, and not a descriptor of somebody's."""
    return type(found) is MemberDescriptorType or type(found) is GetSetDescriptorType


def plain_number(value: Any) -> int | None:
    """A number as it is, also of a class of the script's that is one; None for anything else."""
    return int.__index__(value) if issubclass(type(value), int) else None


def plain_text(value: Any) -> str:
    """The same for a text; "" for anything else."""
    return str.__str__(value) if issubclass(type(value), str) else ""


def group_states() -> Iterator[dict[str, Any]]:
    """The process groups of this process with their sequence numbers; those that do not count are left out."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None:
        return
    members = list(world.pg_group_ranks.items())
    for group, name in list(world.pg_names.items())[:MAX_GROUPS]:
        counts = _of_class(type(group), "_get_sequence_number_for_group")
        if counts is None or type(counts) is FunctionType:  # a group of the script's own, in Python
            continue
        try:
            sequence = int(counts.__get__(group)())
        except RuntimeError:  # a backend that counts nothing
            continue
        ranks = sorted(next((ranks for each, ranks in members if each is group), ()))
        yield {"name": str(name), "ranks": ranks, "sequence": sequence}


def training_thread(
    frames: Mapping[int, FrameType], threads: Mapping[int, Any], calls: Mapping[int, int], maker: int
) -> int:
    """The thread that calls the collectives, which need not be the one that made the groups: Ray Train trains in another one than
    that of its event loop. ``calls``: how many each thread has been seen to make, of those that still run. A thread that autograd
    made acts for another."""
    known = {ident: count for ident, count in calls.items() if ident in frames and is_python_thread(threads.get(ident))}
    if known:
        return max(known, key=lambda ident: (known[ident], ident == maker))
    if maker in frames:
        file = frames[maker].f_code.co_filename
        is_event_loop = file.endswith("/selectors.py") or "/asyncio/" in file
        if not is_event_loop:
            return maker
    own = [
        ident for ident in frames if ident != maker and is_python_thread(threads.get(ident)) and _has_own(frames[ident])
    ]
    return own[0] if len(own) == 1 else maker


def calling_threads(frames: Mapping[int, FrameType]) -> Iterator[int]:
    """The threads that stand in a collective."""
    for ident, innermost in frames.items():
        frame: FrameType | None = innermost
        while frame is not None:
            if is_of_collectives(frame.f_code.co_filename) and frame.f_code.co_name not in NO_CALLS:
                yield ident
                break
            frame = frame.f_back


@functools.cache
def is_of_collectives(file: str) -> bool:
    """Whether torch's collectives are in a file. Asked once for each file: a thread that watches does so for each frame."""
    return COLLECTIVES.search(file) is not None


def is_python_thread(thread: Any) -> bool:
    """Whether a thread was made by Python's threading: one that C++ made may be known there, too."""
    return thread is not None and _name_of(type(thread)) != "_DummyThread"


def _has_own(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def group_name(group: Any) -> str:
    """The name of a process group, as torch calls it; None stands for that of all ranks. "" where it is not known."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    asked = getattr(world, "default_pg", None) if group is None else group
    if world is None or asked is None:
        return ""
    return next((str(name) for each, name in list(world.pg_names.items()) if each is asked), "")


def handled_exception(thread: int) -> str:
    """The exception that a thread's code handles just now, and where it was raised; "" for none."""
    handled: dict[int, Any] = sys._current_exceptions()
    error = handled.get(thread)
    # before Python 3.12 an entry is what sys.exc_info gives
    error = error[1] if isinstance(error, tuple) else error
    if error is None or issubclass(type(error), StopIteration):
        return ""
    raised = TRACEBACK.__get__(error)
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    place = f" (raised at {raised.tb_frame.f_code.co_filename}:{raised.tb_lineno})" if raised is not None else ""
    return f"{plain_words_of(error)}{place}"


def plain_words_of(error: BaseException) -> str:
    """An exception in a line, without running its own code: a message that somebody's class makes is left out.

    >>> class Loud(ValueError):
    ...     def __str__(self): raise SystemExit
    >>> [plain_words_of(error) for error in (KeyError("label"), OSError("disk"), Loud("seven", 7, Loud))]
    ["KeyError: 'label'", 'OSError: disk', 'Loud: seven, 7']
    """
    kind = type(error)
    given = ARGUMENTS.__get__(error)
    plain = [each for each in given if _is_plain(each)]
    makes = _of_class(kind, "__str__")
    is_pythons = any(makes is known for known in MESSAGES)
    if issubclass(kind, OSError):
        is_pythons = is_pythons and all(_is_plain(field.__get__(error)) for field in SYSTEM_FIELDS)
    message = str(error) if is_pythons and len(plain) == len(given) else ", ".join(map(str, plain))
    return f"{_name_of(kind)}: {message}"[:MAX_LINE_CHARACTERS].removesuffix(": ")


def _is_plain(value: object) -> bool:
    return any(type(value) is kind for kind in PLAIN)


def frames_of(frame: FrameType | None, outer: int, inner: int) -> list[dict[str, Any]]:
    """A stack, outermost first, of a very deep one the two ends."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append({"file": code.co_filename, "line": frame.f_lineno or 0, "function": code.co_name})
        frame = frame.f_back
    found.reverse()
    return found if len(found) <= outer + inner else found[:outer] + found[-inner:]


def waited_lock(frame: FrameType | None) -> str:
    """The file whose removal torch's FileBaton waits for in a stack; "" where it does not."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("/torch/utils/file_baton.py") and frame.f_code.co_name == "wait":
            return plain_text(stored(frame.f_locals.get("self"), "lock_file_path"))
        frame = frame.f_back
    return ""


def root_of(frame: FrameType | None) -> str:
    """The rank that a collective in a stack is given as its sender or receiver, with the group; "" where there is none."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
            values = frame.f_locals
            given = [
                f"{name}={root}" for name in ROOT_ARGUMENTS if (root := plain_number(values.get(name))) is not None
            ]
            group = group_name(values.get("group"))
            if given and group:
                return f"{given[0]} in group {group}"
        frame = frame.f_back
    return ""


def rendezvous_of(frame: FrameType | None) -> str:
    """The address of the store at which a stack waits for the other ranks to come, as host:port; "" where it does not."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("/torch/distributed/rendezvous.py"):
            values = frame.f_locals
            host, port = plain_text(values.get("hostname")), plain_number(values.get("port"))
            if host and port:
                return f"{host}:{port}"
        frame = frame.f_back
    return ""


def last_failure() -> str:
    """The exception that ended the main thread, in a line, where the script has an excepthook of its own; "" for none."""
    error: Any = getattr(sys, "last_value", None)
    return plain_words_of(error) if issubclass(type(error), BaseException) else ""


def made_progress(before: Counters, now: Counters) -> bool:
    """Whether a rank has trained or communicated between two looks: that groups are taken down is neither.

    >>> looks = ({"0": 5, "1": 2}, (1, 4)), ({"0": 5}, (1, 4)), ({"0": 6}, (1, 4)), ({}, (1, 5))
    >>> [made_progress(looks[0], look) for look in looks]
    [False, False, True, True]
    """
    return before[1] != now[1] or any(now[0].get(name, number) > number for name, number in before[0].items())


def loader_workers(frame: FrameType | None, modules: Mapping[str, Any]) -> tuple[list[int], bool]:
    """The processes of the loader that a stack stands in; whether each of them was forked and has its rank's fault handler.
    ``modules``: those of this process."""
    files: set[str] = set()
    iterator: Any = None
    while frame is not None:
        files.add(frame.f_code.co_filename)
        if iterator is None and frame.f_code.co_filename.endswith(LOADER_FILE):
            found = frame.f_locals.get("self")
            iterator = found if type(stored(found, "_workers")) is list else None
        frame = frame.f_back
    if iterator is None:
        return [], False
    processes = [stored(each, "_popen") for each in stored(iterator, "_workers")]
    workers = [(pid, each) for each in processes if (pid := plain_number(stored(each, "pid"))) is not None]
    forked = all(plain_text(stored(each, "method")) == "fork" for _, each in workers)
    untouched = forked and stored(iterator, "_worker_init_fn") is None
    return [pid for pid, _ in workers], untouched and none_names_signals(own_files(modules, files))


def none_names_signals(files: Iterable[str]) -> bool:
    """Whether all of some files can be read, and none of them has a word of signals; False for more than can be read soon."""
    asked = sorted(set(files))
    return len(asked) <= MAX_SOURCE_FILES and not any(map(_may_name_signals, asked))


def own_files(modules: Mapping[str, Any], more: Iterable[str]) -> Iterator[str]:
    """The files of modules that are the user's own; of ``more`` likewise, and what is in no file, which may be."""
    # torch.ops and its like are in no file
    known = [stored(made, "__file__") for name, made in list(modules.items()) if name.partition(".")[0] != "torch"]
    for file in (*known, *more):
        in_no_file = type(file) is str and file.startswith("<") and not file.startswith("<frozen ")
        if type(file) is str and (in_no_file or is_user_file(file)):
            yield file


@functools.cache
def _may_name_signals(file: str) -> bool:
    try:
        path = Path(file)
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return True
        return (IN_BINARY if file.endswith(".so") else IN_SOURCE).search(path.read_bytes()) is not None
    except (OSError, ValueError):  # code that was never in a file
        return True
