"""A value of any nesting -> the tensors in it, each with the name of its place: ``output[0][1]``, ``output.logits``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

NO_TENSOR = "not a tensor"
NOTHING = "None"
DEEPEST = 6
"""Levels of nesting that are looked into: a structure that holds itself has no end."""
MOST = 128
"""Tensors of one value that are looked at: a list of ten thousand is no activation."""

Items = list[tuple[str, int | str]]
Look = Callable[[Tensor], int | str]


def note(items: Items, name: str, value: Any, look: Look, depth: int = 0) -> None:
    """Add what ``value`` holds to ``items``: each tensor as ``look`` answers for it, each other thing as a word."""
    if isinstance(value, Tensor):
        items.append((name, look(value)))
    elif value is None:
        items.append((name, NOTHING))
    elif depth == DEEPEST or len(items) >= MOST:
        items.append((name, NO_TENSOR))
    elif isinstance(value, tuple) and value:
        for number, part in enumerate(value):
            note(items, f"{name}[{number}]", part, look, depth + 1)
    elif parts := _parts(value):
        first = len(items)
        for place, part in parts:
            note(items, f"{name}{place}", part, look, depth + 1)
        if all(what in (NO_TENSOR, NOTHING) for _, what in items[first:]):
            items[first:] = [(name, NO_TENSOR)]
    else:
        items.append((name, NO_TENSOR))


def tensors_of(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a value with the names of their places."""
    found: list[Tensor] = []
    items: Items = []
    note(items, name, value, lambda tensor: found.append(tensor) or len(found) - 1)  # type: ignore[func-returns-value]
    return [(place, found[what]) for place, what in items if isinstance(what, int)]


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a list, a mapping or a dataclass holds, with the end of each name."""
    if isinstance(value, list):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f".{key}" if isinstance(key, str) else f"[{key!r}]", part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []
