"""The frames of a failure -> what of the script's own keeps tensors: with their autograd graphs, or many bytes. Runs nothing."""

import math
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
    """What the script has a name for, and where: a container, and how many of its tensors keep a graph and how many bytes its
    tensors are; or one tensor that is the sum of ``count`` tensors with their graphs (``is_sum``)."""

    name: str
    place: str
    count: int
    size: int = 0
    is_sum: bool = False


def kept_graphs(
    traceback: TracebackType | None, packages: Iterable[str], *, fewest: float = FEWEST, least: float = math.inf
) -> tuple[Kept, ...]:
    """What frames outside ``packages`` (parts of paths) can name, the most graphs first, each once.

    ``fewest``: tensors with graphs from which on a container or a sum is told: one step has some in hand itself, the hidden
    states of its layers for one. ``least``: bytes of tensors from which on a container is told that keeps no graph.
    """
    found: dict[int, Kept] = {}
    for frame in _frames(traceback, tuple(packages)):
        place = Path(frame.f_code.co_filename).name
        names = {**frame.f_globals, **frame.f_locals}
        for name, value in list(names.items()):
            for called, held in _held(name, value):
                if id(held) not in found and not name.startswith("__"):
                    kept = _sum(called, place, held) if _is_tensor(held) else _container(called, place, held)
                    if kept.count >= max(fewest, FEWEST) or kept.size >= least:
                        found[id(held)] = kept
    return tuple(sorted(found.values(), key=lambda kept: (-kept.count, -kept.size)))


def _sum(name: str, place: str, tensor: Any) -> Kept:
    """A running sum of numbers, as losses are: one addition over the other. Sums of larger tensors are residual connections."""
    node, count = getattr(tensor, "grad_fn", None) if tensor.numel() == 1 else None, 0
    while node is not None and node.name().startswith("AddBackward") and count < MOST:
        count += 1
        below = [part for part, _ in node.next_functions if part is not None]
        node = next((part for part in below if part.name().startswith("AddBackward")), None)
    return Kept(name=name, place=place, count=count, is_sum=True)


def _container(name: str, place: str, container: Any) -> Kept:
    """How many of its tensors, also in pairs and dictionaries, have a ``grad_fn``, and the bytes of all."""
    values = container.values() if isinstance(container, Mapping) else container
    try:
        entries = list(islice(values, MOST))
    except RuntimeError:  # another thread changes it
        entries = []
    inner = (part for entry in entries for part in (_parts(entry) if _is_container(entry) else (entry,)))
    tensors = [part for part in inner if _is_tensor(part)]
    graphs = sum(getattr(part, "grad_fn", None) is not None for part in tensors)
    size = sum(part.numel() * part.element_size() for part in tensors)
    return Kept(name=name, place=place, count=graphs if graphs >= FEWEST else 0, size=size)


def _frames(traceback: TracebackType | None, packages: tuple[str, ...]) -> Iterator[FrameType]:
    while traceback is not None:
        frame = traceback.tb_frame
        if not any(part in frame.f_code.co_filename for part in packages):
            yield frame
        traceback = traceback.tb_next


def _held(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value itself, or what an object of the script's own has as attributes."""
    if _is_container(value) or _is_tensor(value):
        yield name, value
    elif not isinstance(value, type) and type(value).__module__.partition(".")[0] not in {
        "torch",
        "deepspeed",
        "builtins",
    }:
        for inner, part in list(_attributes(value).items()):
            if _is_container(part) or _is_tensor(part):
                yield f"{name}.{inner}", part


def _attributes(value: Any) -> dict[str, Any]:
    """What is in an object, without asking it: a proxy would answer for another."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_container(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray, range)) and _plain(value)


def _plain(value: Any) -> bool:
    """Python's own containers alone: another's may compute what it is asked for."""
    return type(value).__module__ in {"builtins", "collections"}


def _parts(entry: Any) -> list[Any]:
    return list(islice(entry.values() if isinstance(entry, Mapping) else entry, 16))


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)
