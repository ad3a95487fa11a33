"""Which of the engines of a process one is, where there are several: a generator and its discriminator, an actor and its critic."""

import weakref
from typing import Any

_watched: list["weakref.ref[Any]"] = []


def note(engine: Any) -> None:
    """An engine is watched."""
    _watched[:] = [each for each in _watched if each() is not None and each() is not engine]
    _watched.append(weakref.ref(engine))


def told(engine: Any) -> str:
    """The engine's model and its first weight, by which a user knows it; empty where it is the only one."""
    alive = [each() for each in _watched if each() is not None]
    if len(alive) < 2 or not any(each is engine for each in alive):
        return ""
    number = next(number for number, each in enumerate(alive, start=1) if each is engine)
    name, weight = next(iter(engine.module.named_parameters()), ("", None))
    shape = tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))
    first = f", {name} {'x'.join(map(str, shape))}" if name else ""
    return f"{type(engine.module).__name__}{first}, {number} of {len(alive)} in this process"
