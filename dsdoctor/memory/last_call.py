"""A running engine -> the sizes of its last call and of the largest before, noted at each call. Imports nothing heavy."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """The sizes of what a model was called with: ``sequence`` is None for what is no text."""

    batch: int
    sequence: int | None

    @property
    def size(self) -> int:
        """Samples, or tokens of a text."""
        return self.batch * (self.sequence or 1)

    def __str__(self) -> str:
        return f"{self.batch} x {self.sequence}" if self.sequence is not None else str(self.batch)


class LastCall:
    """Notes the sizes of an engine's last call, and of the largest before it. ``each``: called at each call, before it.

    Keeps nothing of the engine alive.
    """

    def __init__(self, engine: Any, each: Callable[[], None] = lambda: None) -> None:
        self.call: Call | None = None
        self.largest_before: Call | None = None
        self.count = 0
        this = weakref.ref(self)

        def note(_engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (here := this()) is not None:
                here.note(call_of((*args, *kwargs.values())))
                each()

        if hasattr(engine, "register_forward_pre_hook"):
            engine.register_forward_pre_hook(note, with_kwargs=True)

    def note(self, call: Call | None) -> None:
        """A call of these sizes begins; None for one without a tensor."""
        self.count += 1
        if call is None:
            return
        if self.call is not None and (self.largest_before is None or self.call.size > self.largest_before.size):
            self.largest_before = self.call
        self.call = call


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
