"""Classes of a script's own, which run code wherever they are asked for anything: none of it may run in a thread that watches.

What it would run imports, and then raises; what is counted is each call of a function of this file.
"""

import threading
import types
from typing import Any, NoReturn


def loud(*_: object) -> NoReturn:
    """What a property, a method or a descriptor of a script may be."""
    import colorsys  # noqa: F401

    raise RuntimeError("code of the script ran")


class LoudMeta(type):
    """The class of a class may be the script's, too."""

    __eq__ = loud  # type: ignore[assignment]
    __hash__ = type.__hash__
    __instancecheck__ = __subclasscheck__ = loud  # type: ignore[assignment]
    __getattribute__ = loud


class Number(int):
    """A step that is no plain number."""

    __repr__ = __str__ = __format__ = __eq__ = __int__ = __index__ = loud  # type: ignore[assignment]
    __hash__ = int.__hash__


class Fields:
    """What holds an engine's fields."""


class Engine(Fields, metaclass=LoudMeta):
    """An engine whose counters are properties, or fields of a class of its own."""

    global_steps = property(loud)
    __class__ = property(loud)  # type: ignore[assignment]
    __dict__ = property(loud)  # type: ignore[assignment]
    __getattribute__ = __getattr__ = __repr__ = __bool__ = __len__ = __eq__ = __hash__ = loud  # type: ignore[assignment]


def engine() -> Engine:
    """One that has counted."""
    made = object.__new__(Engine)
    object.__setattr__(made, "micro_steps", Number(7))
    return made


class Worker(threading.Thread):
    """A thread that names itself."""

    name = property(loud, lambda _self, _name: None)  # type: ignore[assignment]
    native_id = property(loud)
    __bool__ = __len__ = __repr__ = loud  # type: ignore[assignment]


class Failure(OSError):
    """An exception that tells of itself in its own way."""

    __traceback__ = property(loud)  # type: ignore[assignment]
    __class__ = property(loud)  # type: ignore[assignment]
    filename = errno = property(loud)  # type: ignore[assignment]
    __str__ = __repr__ = loud  # type: ignore[assignment]


class Message(OSError):
    """An exception with a part that tells of itself in its own way."""

    filename2 = property(loud)  # type: ignore[assignment]


class PythonGroup:
    """A process group in Python."""

    _get_sequence_number_for_group = loud
    __eq__ = loud  # type: ignore[assignment]
    __hash__ = object.__hash__


class Baton:
    """What waits for a lock."""

    lock_file_path = property(loud)
    __getattr__ = loud


class Iterator:
    """A loader's iterator, whose workers are asked for each time."""

    _workers = property(loud)
    _worker_init_fn = property(loud)
    __getattr__ = loud


class Process:
    """A worker of a loader."""

    pid = property(loud)
    __getattr__ = loud

    def __init__(self) -> None:
        self._popen = types.SimpleNamespace(pid=Number(11), method="fork")


def lazy_module() -> types.ModuleType:
    """A module that looks for what it has not: in no file."""
    made = types.ModuleType("lazy")
    vars(made)["__getattr__"] = loud
    return made


def values() -> dict[str, Any]:
    """What a collective may be called with."""
    return {"src": Number(1), "group": PythonGroup()}
