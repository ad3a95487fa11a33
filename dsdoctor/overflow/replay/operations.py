"""Every operation of a replayed batch, with what went in and what came out of it, measured, and the line that called it.

Expensive, so only for a replay: what each operation reads and writes is read once more. A line is a model's or the user's, never
torch's, DeepSpeed's runtime's or ours. provenance.py follows bad values back through them.
"""

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsdoctor.core.script import is_machinery
from dsdoctor.overflow.frames.first_bad import Origin
from dsdoctor.overflow.measure.readings import Meters, Readings, version_of

CodeLine = tuple[str, int, str]
"""File, line and function."""
OURS = f"{Path(__file__).parents[1]}/"
BACKWARD = "_engine_run_backward"
"""torch's function around a backward: who called that did not call the operation."""
HERE = (f"{Path(__file__).parent / 'operations.py'}", __file__)
COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of the operations in which other ranks' values arrive."""
FOREIGN = ("prim", "profiler", "dsdoctor")
"""Namespaces of operations that compute nothing of the model."""
UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Operations whose result holds whatever the memory held."""
OVERWRITES = frozenset(
    f"{name}_"
    for name in (
        "copy", "_foreach_copy", "fill", "zero", "_foreach_zero", "normal", "uniform", "random", "bernoulli", "exponential",
        "log_normal", "cauchy", "geometric",
    )
)  # fmt: skip
"""Operations that write the whole of their first argument, whatever it held."""
NO_FIGURES = -1


@dataclass(slots=True, frozen=True)
class Value:
    """A tensor as an operation met it: the number of its memory, and its reading (``NO_FIGURES``: whole numbers, or what
    other ranks send, which arrives later). ``extent``: the first of its bytes in that memory, and the one after the last.
    ``chosen``: the reading of those of its values alone that the operation took (``where``); ``NO_FIGURES``: it took all."""

    memory: int
    reading: int
    extent: tuple[int, int] = (0, 0)
    chosen: int = NO_FIGURES


@dataclass(slots=True, frozen=True)
class Operation:
    """One call. ``line``: the model's line that called it; ``node`` and ``made``: the autograd node whose backward it is part
    of, and where that was made. ``communicates``: other ranks' values arrive in its outputs. ``operands``: its positional
    arguments, tensors and numbers; None for anything else."""

    name: str
    line: CodeLine | None
    node: str
    made: list[str] | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    communicates: bool
    operands: tuple[Value | float | None, ...] = ()


def caller() -> CodeLine | None:
    """The innermost line that is a model's. None: nothing but machinery stands between the operation and the replay, or the
    backward that it is part of; activations that a backward computes again have their lines."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_machinery(file):
            return file, frame.f_lineno, frame.f_code.co_name
        if (file.startswith(OURS) and file not in HERE) or frame.f_code.co_name == BACKWARD:
            return None
        frame = frame.f_back
    return None


def origin(op: str, line: CodeLine | None, made: list[str] | None) -> Origin | None:
    """An operation with its line: the one that called it, or for a backward the one that made its node. None: not known."""
    if line is None:
        text = made_at(made or [])
        return None if text is None else Origin(op=op, line=text)
    file, number, function = line
    return Origin(op=op, line=f"{Path(file).name}:{number} in {function}: {linecache.getline(file, number).strip()}")


def made_at(traceback: list[str]) -> str | None:
    """The innermost model's line of a traceback, as autograd kept it.

    >>> made_at(['  File "/m/model.py", line 12, in forward\\n    h = x.sqrt()\\n'])
    'model.py:12 in forward: h = x.sqrt()'
    >>> made_at([])
    """
    for entry in reversed(traceback):
        head, _, code = entry.strip().partition("\n")
        parts = head.split('"')
        if len(parts) == 3 and not is_machinery(parts[1]):
            number, _, function = parts[2].removeprefix(", line ").partition(", in ")
            return f"{Path(parts[1]).name}:{number} in {function}: {code.strip().splitlines()[0] if code else ''}"
        if len(parts) == 3 and parts[1].startswith(OURS) and parts[1] not in HERE:
            return None
    return None


class Operations(TorchDispatchMode):
    """Notes all operations while it is entered. ``readings``: for the hooks on the modules, so that the place of each tensor
    that they look at is known."""

    supports_higher_order_operators = True

    def __init__(self, readings: Readings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.readings = readings
        self.done: list[Operation] = []
        self._memories: dict[int, tuple[StorageWeakRef, int]] = {}
        self._count = 0
        self._changes: dict[int, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note what it read and wrote."""
        kwargs = kwargs or {}
        namespace, name = _name_of(func)
        if namespace in FOREIGN or name in UNWRITTEN:
            return func(*args, **kwargs)
        communicates = namespace in COMMUNICATION
        if not communicates and _is_view(func):
            return func(*args, **kwargs)
        given = list(_tensors((args, tuple(kwargs.values()))))
        read = list(_tensors(_sent(func, name, args, kwargs))) if communicates else given
        unread = _running_statistics(func, name, args, kwargs)
        overwritten = [*unread, *_tensors(_overwritten(func, name, args, kwargs))]
        read = [tensor for tensor in read if all(tensor is not each for each in overwritten)]
        inputs = tuple(value for tensor in read if (value := self.value_of(tensor)) is not None)
        if name == "where" and len(args) == 3:
            inputs = (*self._alternatives(*args),)
        operands = () if communicates else tuple(map(self._operand, args))
        result = func(*args, **kwargs)
        changed = given if communicates else [*_tensors(_written(func, args, kwargs)), *unread]
        for tensor in changed:
            self._count_change(tensor)
        results = {id(tensor): tensor for tensor in (*changed, *_tensors(result))}
        self._note(f"{namespace}.{name}", inputs, operands, [*results.values()], communicates=communicates)
        return result

    def _alternatives(self, condition: Tensor, *alternatives: Any) -> Iterator[Value]:
        """What ``where`` may choose from, each with what it does choose."""
        for number, tensor in enumerate(alternatives):
            value = self.value_of(tensor) if isinstance(tensor, Tensor) else None
            if value is None:
                continue
            try:
                taken = torch.where(condition, 0, tensor) if number else torch.where(condition, tensor, 0)
                chosen = self.readings.read(taken)
            except (RuntimeError, TypeError):  # no memory left for another one
                chosen = NO_FIGURES
            yield replace(value, chosen=chosen)

    def _operand(self, argument: Any) -> Value | float | None:
        if isinstance(argument, Tensor):
            return self.value_of(argument)
        return float(argument) if isinstance(argument, int | float) and not isinstance(argument, bool) else None

    def value_of(self, tensor: Tensor) -> Value | None:
        """A tensor's memory and its reading now. None for one without memory."""
        memory = self.memory_of(tensor)
        if memory is None:
            return None
        version = version_of(tensor)
        place = (tensor.storage_offset(), *_span(tensor), tensor.dtype)
        key = (memory, self._changes.get(memory, 0), version, *place)
        known = self._known.get(key)
        if known is None or version < 0:
            known = self._known[key] = self.readings.read(tensor)
        return Value(memory, known, extent_of(tensor))

    def _note(
        self,
        name: str,
        inputs: tuple[Value, ...],
        operands: tuple[Value | float | None, ...],
        results: list[Tensor],
        *,
        communicates: bool,
    ) -> None:
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        look = self._arriving if communicates else self.value_of
        outputs = tuple(value for tensor in results if (value := look(tensor)) is not None)
        if outputs:
            made = None if node is None else node.metadata.get("traceback_")  # type: ignore[attr-defined]
            title = "" if node is None else str(node.name())
            self.done.append(Operation(name, caller(), title, made, inputs, outputs, communicates, operands))

    def _arriving(self, tensor: Tensor) -> Value | None:
        """What other ranks write into: it is not there yet."""
        memory = self.memory_of(tensor)
        return None if memory is None else Value(memory, NO_FIGURES)

    def _count_change(self, tensor: Tensor) -> None:
        """Count a change of a memory: the tensors' versions count it later, or, where other ranks write, not at all."""
        memory = self.memory_of(tensor)
        if memory is not None:
            self._changes[memory] = self._changes.get(memory, 0) + 1

    def memory_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory, its own as long as that lives. None for a tensor without memory."""
        try:
            storage = tensor.untyped_storage()
            address = storage._cdata
        except (RuntimeError, NotImplementedError, AttributeError):
            return None
        known = self._memories.get(address)
        if known is None or known[0].expired():
            self._count += 1
            known = self._memories[address] = StorageWeakRef(storage), self._count
        return known[1]


class PlacedReadings(Readings):
    """Readings that also remember where each tensor was, and after how many operations: where a walk back may begin."""

    def __init__(self, meters: Meters) -> None:
        super().__init__(meters)
        self.operations: Operations | None = None
        self.places: dict[int, tuple[int, int]] = {}

    def look(self, tensor: Tensor) -> int | str:
        """As ``Readings.look``; the operations that measure are not noted."""
        with torch.utils._python_dispatch._disable_current_modes():
            number = super().look(tensor)
            if isinstance(number, int) and number not in self.places and self.operations is not None:
                memory = self.operations.memory_of(tensor)
                if memory is not None:
                    self.places[number] = memory, len(self.operations.done)
        return number


def _name_of(func: Any) -> tuple[str, str]:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator, such as flex attention
        return "higher_order", str(getattr(func, "_name", func))
    namespace, _, name = str(schema.name).partition("::")
    return namespace, name


def _is_view(func: Any) -> bool:
    """Whether the results are other views of the arguments: nothing is written."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes into."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
    return [value for key, value in _by_name(func, args, kwargs).items() if key in written]


def _overwritten(func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
    """The arguments whose values an operation does not look at: it puts others in their place."""
    if name in OVERWRITES:
        return list(args[:1])
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return [kwargs[each.name] for each in arguments if each.is_out and each.name in kwargs]


def _running_statistics(func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """A batch norm's averages over the batches where they are written and not read, of which its schema says nothing."""
    if "batch_norm" not in name:
        return []
    given = _by_name(func, args, kwargs)
    reads = "no_training" in name or "no_update" in name
    trains = given.get("training", given.get("train", given.get("update", not reads)))
    return [*_tensors([given.get("running_mean"), given.get("running_var")])] if trains else []


def _sent(func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a rank gives to the others: not the memory into which theirs comes, which may hold anything."""
    if name.startswith("recv"):
        return []
    given = _by_name(func, args, kwargs)
    if name == "broadcast_" and not _is_root(given):
        return []
    return [value for key, value in given.items() if not key.startswith("output")]


def _is_root(given: dict[str, Any]) -> bool:
    try:
        group = torch.distributed.ProcessGroup.unbox(given["process_group"])
        return bool(group.rank() == given["root_rank"])
    except (AttributeError, KeyError, RuntimeError):  # other releases of torch name these otherwise
        return True


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in getattr(getattr(func, "_schema", None), "arguments", ())]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its memory that a tensor covers, and the one after the last."""
    start = int(tensor.storage_offset())
    steps = (int(stride) * (int(size) - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    end = start + 1 + sum(steps) if tensor.numel() else start
    return start * tensor.element_size(), end * tensor.element_size()


def _span(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of its memory a tensor covers, the same for all views of the whole of it."""
    pairs = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    dense, expected = True, 1
    for stride, size in pairs:
        dense = dense and stride == expected
        expected *= size
    return (tensor.numel(),) if dense else tuple(pairs)
