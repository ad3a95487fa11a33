"""Inert data of a pickle -> its tensors, each with the way to it; and single values by their way. Shared parts are walked once."""

from collections.abc import Iterator
from typing import Any

from dsdoctor.checkpoint.inert import Call, Tensor

Way = tuple[Any, ...]
DEEPEST = 40
"""Levels. What DeepSpeed writes has seven."""


def tensors(content: Any) -> Iterator[tuple[Way, Tensor]]:
    """Every tensor with the keys that lead to it, in the order of the file."""
    waiting: list[tuple[Way, Any]] = [((), content)]
    seen: set[int] = set()
    while waiting:
        way, value = waiting.pop()
        if isinstance(value, Tensor):
            yield way, value
        elif isinstance(value, dict | list | tuple | Call):
            if id(value) in seen or len(way) > DEEPEST:
                continue
            seen.add(id(value))
            waiting.extend((way + (key,), inner) for key, inner in reversed(list(_parts(value))))


def values(content: Any) -> Iterator[Any]:
    """Every value, whatever it is, once."""
    waiting, seen = [(0, content)], set()
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, dict | list | tuple | Call):
            if id(value) in seen or depth > DEEPEST:
                continue
            seen.add(id(value))
            waiting.extend((depth + 1, inner) for _, inner in _parts(value))
        yield value


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, Call):
        yield from enumerate((value.arguments, value.state, value.items, value.values))
    else:
        yield from enumerate(value)


def at(content: Any, *way: Any) -> Any:
    """The value at a way, None where there is none.

    >>> at({"a": [{"b": 1}]}, "a", 0, "b"), at({"a": None}, "a", "b")
    (1, None)
    """
    for key in way:
        if isinstance(content, Call):
            content = content.items
        if isinstance(content, dict):
            content = content.get(key)
        elif isinstance(content, list | tuple) and isinstance(key, int) and 0 <= key < len(content):
            content = content[key]
        else:
            return None
    return content
