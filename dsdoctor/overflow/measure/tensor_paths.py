"""A value of any nesting -> the tensors in it, each with the name of its place: ``output[0][1]``, ``output.logits``."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
    """Add what ``value`` holds to ``items``: for each tensor what ``look`` returns, for anything else a word."""
    if isinstance(value, Tensor):
        items.append((name, look(value)))
    elif value is None:
        items.append((name, NOTHING))
    elif depth == DEEPEST or len(items) >= MOST:
        items.append((name, NO_TENSOR))
    elif parts := _parts(value):
        first = len(items)
        for key, part in parts:
            place = f".{key}" if isinstance(key, str) else f"[{key!r}]"
            note(items, f"{name}{place}", part, look, depth + 1)
        if not isinstance(value, tuple) and all(what in (NO_TENSOR, NOTHING) for _, what in items[first:]):
            items[first:] = [(name, NO_TENSOR)]
    else:
        items.append((name, NO_TENSOR))


def tensors_of(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a value with the names of their places."""
    found: list[Tensor] = []
    items: Items = []
    note(items, name, value, lambda tensor: found.append(tensor) or len(found) - 1)  # type: ignore[func-returns-value]
    return [(place, found[what]) for place, what in items if isinstance(what, int)]


def leaves(value: Any) -> list[Tensor]:
    """Every tensor of a value, without names and without a limit, always in the same order."""
    found: list[Tensor] = []
    _add_leaves(found, (value,))
    return found


def _add_leaves(found: list[Tensor], values: Iterable[Any]) -> None:
    # called in every step for a batch and what a model gave: tensors, tuples and dictionaries of them come first
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            if value:
                _add_leaves(found, value)
        elif isinstance(value, dict):
            if value:
                _add_leaves(found, value.values())
        elif value is not None:
            _add_leaves(found, [part for _, part in _parts(value)])


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """What a tuple, a list, a mapping or a dataclass holds, each part with its number, key or field name."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []
