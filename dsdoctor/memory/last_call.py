"""A running engine -> the sizes of its last call. They are noted at each call, and nothing is kept alive. Imports nothing heavy."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """The sizes of what a model was called with: ``sequence`` is None for what is no text."""

    batch: int
    sequence: int | None


class LastCall:
    """Notes the sizes of an engine's last call."""

    def __init__(self, engine: Any) -> None:
        self.call: Call | None = None
        this = weakref.ref(self)

        def note(_engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (here := this()) is not None:
                here.call = call_of((*args, *kwargs.values())) or here.call

        if hasattr(engine, "register_forward_pre_hook"):
            engine.register_forward_pre_hook(note, with_kwargs=True)


def call_of(values: Iterable[Any]) -> Call | None:
    """The sizes of the first tensor that has some: whole numbers are tokens."""
    for value in values:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) >= 2:
            is_text = len(shape) == 2 and not value.is_floating_point()
            return Call(batch=int(shape[0]), sequence=int(shape[1]) if is_text else None)
        if isinstance(value, Mapping) and (found := call_of(value.values())):
            return found
    return None
