"""The calls of a running engine: the sizes of the last, and whether each leaves more memory held."""

import contextlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.core.files import open_file

PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_READINGS = 64
"""Readings that are kept: when there are as many, every second goes, and the next are twice as far apart."""
MIN_READINGS = 12
PARTS, ALIKE = 4, 3.0
"""The later readings are cut into so many parts, and all of them grow at the same rate within this factor."""
MIN_GROWTH_BYTES, MIN_GROWTH_SHARE = 64 << 20, 0.1
"""Bytes, and share of what is held at the end, below which nothing is said."""


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
                with unseen():
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


@dataclass(frozen=True, kw_only=True)
class Grown:
    """From one call to a later one the bytes rose from ``first`` to ``last``, and did so all the time."""

    first_call: int
    last_call: int
    first: int
    last: int

    @property
    def each(self) -> float:
        """Bytes a call."""
        return (self.last - self.first) / (self.last_call - self.first_call)


class Growth:
    """Readings of ``read`` (bytes) at the calls of an engine, never more than MAX_READINGS."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.read = read
        self.calls = 0
        self.interval, self.due = 1, 1
        self.readings: list[tuple[int, int]] = []

    def note(self) -> None:
        """Another call. Most cost two comparisons; those that are read, a small file."""
        self.calls += 1
        if self.calls < self.due:
            return
        self.readings.append((self.calls, self.read()))
        if len(self.readings) >= MAX_READINGS:
            self.readings = self.readings[1::2]
            self.interval *= 2
        self.due = self.calls + self.interval

    def grown(self) -> Grown | None:
        """How it grew, where the readings show that it never stopped."""
        return steady((*self.readings, (self.calls, self.read())))


def unseen() -> Any:
    """Without the script's TorchFunctionModes: they see no attribute of a tensor that is read inside."""
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "DisableTorchFunction", contextlib.nullcontext)()


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


def steady(readings: tuple[tuple[int, int], ...]) -> Grown | None:
    """Whether the later three quarters of (call, bytes) rise in every part at about the same rate: no start-up, and no plateau.

    >>> steady(tuple((call, 1000 << 20) for call in range(40)))
    >>> steady(tuple((call, (1000 + 10 * call) << 20) for call in range(40))).each / (1 << 20)
    10.0
    """
    if len(readings) < MIN_READINGS:
        return None
    later = readings[len(readings) // 4 :]
    marks = [later[index * (len(later) - 1) // PARTS] for index in range(PARTS + 1)]
    rates = [(b - a) / (call_b - call_a) for (call_a, a), (call_b, b) in itertools.pairwise(marks) if call_b > call_a]
    (first_call, first), (last_call, last) = marks[0], marks[-1]
    if len(rates) < PARTS or min(rates) <= 0 or max(rates) > ALIKE * min(rates):
        return None
    if last - first < max(MIN_GROWTH_BYTES, MIN_GROWTH_SHARE * last):
        return None
    return Grown(first_call=first_call, last_call=last_call, first=first, last=last)


def resident(pid: str = "self") -> int:
    """Resident bytes that are a process's own, mapped files and shared memory not (proc(5), statm); 0 where there is no /proc."""
    try:
        with open_file(f"/proc/{pid}/statm", "rb") as statm:
            _, whole, shared, *_ = statm.read().split()
        return (int(whole) - int(shared)) * PAGE
    except (OSError, IndexError, ValueError):
        return 0
