"""The frames of a failure -> the user's containers whose tensors keep autograd graphs alive. Runs nothing."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

FEWEST = 8
"""Tensors in one container from which on it is told: fewer are what a step itself has in hand."""
MOST = 10_000
"""Entries of one container that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A container by the name that the script has for it, where, and how many of its tensors keep a graph."""

    name: str
    place: str
    count: int


def kept_graphs(traceback: TracebackType | None, packages: Iterable[str]) -> tuple[Kept, ...]:
    """The containers that frames outside ``packages`` (parts of paths) can name, the largest first, each once."""
    found: dict[int, Kept] = {}
    for frame in _frames(traceback, tuple(packages)):
        place = Path(frame.f_code.co_filename).name
        names = {**frame.f_globals, **frame.f_locals}
        for name, value in list(names.items()):
            for called, container in _containers(name, value):
                if id(container) in found or name.startswith("__"):
                    continue
                count = _with_graph(container)
                if count >= FEWEST:
                    found[id(container)] = Kept(name=called, place=place, count=count)
    return tuple(sorted(found.values(), key=lambda kept: -kept.count))


def _frames(traceback: TracebackType | None, packages: tuple[str, ...]) -> Iterator[FrameType]:
    while traceback is not None:
        frame = traceback.tb_frame
        if not any(part in frame.f_code.co_filename for part in packages):
            yield frame
        traceback = traceback.tb_next


def _containers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value itself, or what an object of the script's own has as attributes."""
    if _is_container(value):
        yield name, value
    elif not isinstance(value, type) and type(value).__module__.partition(".")[0] not in {
        "torch",
        "deepspeed",
        "builtins",
    }:
        for inner, part in list((getattr(value, "__dict__", None) or {}).items()):
            if _is_container(part):
                yield f"{name}.{inner}", part


def _is_container(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray, range)) and _plain(value)


def _plain(value: Any) -> bool:
    """Python's own containers alone: another's may compute what it is asked for."""
    return type(value).__module__ in {"builtins", "collections"}


def _with_graph(container: Any) -> int:
    """How many of its tensors, also in pairs and dictionaries, have a ``grad_fn``."""
    values = container.values() if isinstance(container, Mapping) else container
    try:
        entries = list(islice(values, MOST))
    except RuntimeError:  # another thread changes it
        return 0
    inner = (part for entry in entries for part in (_parts(entry) if _is_container(entry) else (entry,)))
    return sum(getattr(part, "grad_fn", None) is not None for part in inner if _is_tensor(part))


def _parts(entry: Any) -> list[Any]:
    return list(islice(entry.values() if isinstance(entry, Mapping) else entry, 16))


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)
