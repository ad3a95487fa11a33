"""One reading of each distinct tensor of a batch, and where in a value of any nesting a tensor is: ``output[0][1]``,
``output.logits``.

The figures stay on the tensor's device until the batch is settled.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsdoctor.overflow.frames.frame import NOT_MEASURED, TensorStats, decode
from dsdoctor.overflow.measure.measure import Meter

NO_TENSOR = "not a tensor"
NOTHING = "None"
MAX_DEPTH = 6
"""Levels of nesting that are looked into: a structure that holds itself has no end."""
MAX_TENSORS = 128
"""Tensors of one value that are looked at: a list of ten thousand is no activation."""
Items = list[tuple[str, int | str]]
Look = Callable[[Tensor], int | str]
MIN_STORAGE_BYTES = 65536
"""From which a tensor is also known by its storage: DeepSpeed's ZeRO-3 passes another view of the same data."""
BAD_COLUMNS = 3
"""The first columns of a row count nan, inf and -inf."""


def note(items: Items, name: str, value: Any, look: Look, depth: int = 0) -> None:
    """Add what ``value`` holds to ``items``: for each tensor what ``look`` returns, for anything else a word."""
    if isinstance(value, Tensor):
        items.append((name, look(value)))
    elif value is None:
        items.append((name, NOTHING))
    elif depth == MAX_DEPTH or len(items) >= MAX_TENSORS:
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


class Meters:
    """Meters that are free, per device: a batch borrows one and gives it back when its figures were read."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Meter]] = {}

    def take(self, device: torch.device) -> Meter:
        """A meter of the device with no rows in use."""
        free = self._free.setdefault(device, [])
        return free.pop() if free else Meter(device)

    def give_back(self, meter: Meter) -> None:
        """Make a meter free again; its rows will be overwritten."""
        meter.rewind()
        self._free.setdefault(meter.device, []).append(meter)


class Readings:
    """What was read during one batch. A tensor that was read is not read again while it is unchanged.

    A tensor is known by the object, as long as that lives, and its version; big ones also by storage, place in it and
    version, as long as the storage lives. An address alone is not enough, because freed memory is used again.
    """

    def __init__(self, meters: Meters, *, integers: bool = False) -> None:
        self._meters = meters
        self._mine: dict[torch.device, Meter] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._storages: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        self._integers = integers
        self._figures: dict[torch.device, Tensor] = {}
        self.is_settled = False
        self._extremes: dict[int, Tensor] = {}
        self.taken: list[tuple[torch.device, int, torch.dtype, torch.Size]] = []

    def look(self, tensor: Tensor) -> int | str:
        """The number of the tensor's reading; its dtype's name for one that has no figures."""
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
            return known[2]
        return self._new(tensor)

    def _new(self, tensor: Tensor) -> int | str:
        try:
            version = version_of(tensor)
            key = _storage_key(tensor, version)
            same = None if key is None else self._storages.get(key)
            number = None if same is None or same[0].expired() else same[1]
            if number is None:
                number = self._read(tensor)
                if number is None:
                    return str(tensor.dtype).removeprefix("torch.")
                if key is not None:
                    self._storages[key] = (StorageWeakRef(tensor.untyped_storage()), number)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            # wrapped by torch.func, traced, nested, quantised: what cannot be measured is left out, and never raises
            return NOT_MEASURED
        self._seen[id(tensor)] = (weakref.ref(tensor), version, number)
        return number

    def _read(self, tensor: Tensor) -> int | None:
        """Measure; None: it has no figures."""
        graded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            device = tensor.device
            meter = self._mine.get(device)
            if meter is None:
                meter = self._mine[device] = self._meters.take(device)
            row = meter.scan(tensor)
            if row < 0:
                if not (self._integers and _is_integer(tensor)):
                    return None
                self._extremes[len(self.taken)] = torch.stack(tensor.abs().aminmax())
        finally:
            torch._C._set_grad_enabled(graded)
        self.taken.append((device, row, tensor.dtype, tensor.shape))
        return len(self.taken) - 1

    def read(self, tensor: Tensor) -> int:
        """The number of a reading taken now, whatever was read before; -1 for what has no figures."""
        try:
            number = self._read(tensor)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # as in ``look``
            return -1
        return -1 if number is None else number

    def peek(self) -> None:
        """Bring the figures here, one copy per device, and read on."""
        self._figures = {device: meter.read() for device, meter in self._mine.items()}

    def settle(self) -> None:
        """Bring the figures here and give the meters back: nothing more is read."""
        if self.is_settled:
            return
        self.peek()
        self.is_settled = True
        for meter in self._mine.values():
            self._meters.give_back(meter)
        self._mine, self._seen, self._storages = {}, {}, {}

    @property
    def any_bad(self) -> bool:
        """Whether any reading shows a nan or an inf, as far as the figures are here."""
        return any(bool(rows[:, :BAD_COLUMNS].any()) for rows in self._figures.values())

    def stats(self, number: int, name: str) -> TensorStats:
        """The figures of a reading, under the name of a place. Only after ``peek`` or ``settle``."""
        device, row, dtype, shape = self.taken[number]
        kind = str(dtype).removeprefix("torch.")
        if number in self._extremes:
            least, most = (float(value) for value in self._extremes[number])
            return TensorStats(
                name=name,
                dtype=kind,
                shape=tuple(shape),
                device=str(device),
                count=shape.numel(),
                absmin=least,
                absmax=most,
            )
        return stats_of(
            self._figures[device][row].tolist(), name=name, dtype=kind, shape=tuple(shape), device=str(device)
        )


def stats_of(row: Any, *, name: str, dtype: str, shape: tuple[int, ...], device: str) -> TensorStats:
    """A row of a meter (8 whole numbers, see ``rows``) as figures."""
    nan, posinf, neginf, zeros, subnormal, most, least, nonzero = (int(value) for value in row)
    real = dtype.replace("complex", "float") if dtype.startswith("complex") else dtype
    real = {"float128": "float64", "float64": "float32", "float32": "float16"}[real] if real is not dtype else real
    return TensorStats(
        name=name,
        dtype=dtype,
        shape=shape,
        device=device,
        count=math.prod(shape),
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        zeros=zeros,
        subnormal=subnormal,
        absmax=None if most < 0 else decode(most, real),
        absmin=None if least < 0 else decode(least, real),
        absmin_nonzero=None if nonzero < 0 else decode(nonzero, real),
    )


def stats_of_tensor(tensor: Tensor, name: str) -> TensorStats | None:
    """The figures of one tensor; None: it has none."""
    readings = Readings(Meters())
    number = readings.look(tensor)
    if isinstance(number, str):
        return None
    readings.settle()
    return readings.stats(number, name)


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written in place; -1 for one of inference mode, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _storage_key(tensor: Tensor, version: int) -> tuple[Any, ...] | None:
    """A key that identifies data across tensor objects; None: too small to be worth it, or no plain storage."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or version < 0:
        return None
    if tensor.numel() * tensor.itemsize < MIN_STORAGE_BYTES:
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func has no storage
        return None
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version


def _is_integer(tensor: Tensor) -> bool:
    return (
        not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.dtype is not torch.bool
        and tensor.numel() > 0
    )
