"""A bad value of a replayed batch -> where it came from: back through the operations to the first whose inputs were finite, why
that made it, which rows of the batch have it, and which of the model's tensors held it before.

Says only what the figures prove: nan out of a division whose divisor holds zeros is 0/0, and nothing else can be. A mask's -inf
or lowest number is no bad value, and where it was made no cause. Nothing here is read or asked of a healthy step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from dsdoctor.overflow.frames.first_bad import BadKind, Cure, FirstBad, Held, Origin
from dsdoctor.overflow.frames.frame import BUFFER, LIMITS, TensorStats, is_mask, is_minus_inf_mask
from dsdoctor.overflow.measure.measure import flag
from dsdoctor.overflow.measure.readings import Meters, Readings, leaves, tensors_of
from dsdoctor.overflow.replay.operations import NO_FIGURES, Operation, Operations, Value, extent_of, origin

Operand = TensorStats | float | None
"""An argument of an operation: a tensor's figures, a number, or something else."""
DERIVATIVES = {"Sqrt": "the square root", "LinalgVectorNorm": "a norm", "Norm": "a norm", "Std": "a standard deviation"}
IGNORED = -100
"""What torch's losses leave out if they are not told otherwise."""
MAX_ROWS = 6
MAX_TENSORS = 8
"""Bad tensors that a report names."""
OUTSIDE = (BadKind.DATA, BadKind.WEIGHT, BadKind.GRADIENT)
"""Kinds whose place is known already, or is no call of a module's forward."""
FILLS = frozenset(
    f"aten.{name}"
    for name in (
        "fill", "fill_", "full", "full_like", "new_full", "scalar_tensor", "lift_fresh", "lift_fresh_copy", "masked_fill",
        "masked_fill_", "where", "constant_pad_nd", "index_fill", "index_fill_", "index_put", "index_put_", "_to_copy",
        "copy_", "clone", "zeros_like",
    )
)  # fmt: skip
"""Operations that put a number where they are told to: a -inf that they make of finite inputs is what somebody asked for."""


@dataclass(frozen=True, kw_only=True)
class OverflowCause:
    """Why an operation made a bad value, and what to do about that. Both are empty where the figures do not decide."""

    how: str = ""
    cure: Cure | None = None
    by_zero: bool = False
    """Whether it divided by a zero."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTensor:
    """A model's tensor, with its place in its memory before the replay: a forward may put other data into it."""

    kind: str
    name: str
    tensor: Tensor
    extent: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a bad value began: by an operation of this rank (``made``), in another rank's (``received``, the operation that
    brought it), or, if both are None, before the batch: a weight, an input, a gradient that was handed in. ``minus_inf``:
    what made the -inf that the operation was given. ``held``, the tensor ``value``: what was bad before the batch, and the
    bad value came out of it, or the -inf."""

    made: Origin | None = None
    received: Origin | None = None
    minus_inf: Origin | None = None
    held: Held | None = None
    value: Value | None = None


Explain = Callable[[list[Operand], TensorStats], OverflowCause]
Names = dict[int, list[NamedTensor]]
"""By the number of their memory: DeepSpeed lays all weights of a group into one."""


def cause_of(name: str, node: str, operands: list[Operand], outputs: list[TensorStats]) -> OverflowCause:
    """``name``: such as ``aten.div_``; ``node``: the autograd node whose backward it is part of, or empty."""
    bad = next((output for output in outputs if output.is_bad), None)
    explain = EXPLAINED.get(name.removeprefix("aten.").removesuffix("_"))
    given = [operand for operand in operands if isinstance(operand, TensorStats)]
    masked = any(operand.is_bad for operand in given)
    if bad is None or explain is None or (masked and explain is not _softmax):
        return OverflowCause()
    for number in operands:
        if explain in (_beyond, _division) and isinstance(number, float) and not math.isfinite(number):
            return OverflowCause(how=f"it was given the number {number:g}", cure=Cure("number"))
    return _of_derivative(node, explain(operands, bad))


def _of_derivative(node: str, found: OverflowCause) -> OverflowCause:
    """In a backward it is the derivative that has no value there."""
    function = DERIVATIVES.get(node.removesuffix("0").removesuffix("Backward"))
    if function is None or not found.by_zero:
        return found
    return OverflowCause(
        how=f"the derivative of {function} at 0 is not finite",
        cure=Cure("derivative-at-zero", function),
    )


def _zeros(operand: Operand) -> int:
    """How many zeros an operand holds; a number that is 0 counts as one."""
    if isinstance(operand, TensorStats):
        return operand.zeros
    return int(operand == 0) if isinstance(operand, float) else 0


def _largest(operands: list[Operand]) -> float:
    values = [operand.absmax if isinstance(operand, TensorStats) else operand for operand in operands]
    return max((abs(value) for value in values if value is not None), default=0.0)


def _count(zeros: int) -> str:
    return "1 zero" if zeros == 1 else f"{zeros} zeros"


def _beyond(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    """A result beyond the largest number of its format, out of finite values."""
    limit = LIMITS.get(bad.dtype)
    if limit is None or bad.nan:
        return OverflowCause()
    return OverflowCause(
        how=f"a result beyond {limit:.3g}, where {bad.dtype} ends, of values up to {_largest(operands):.3g}"
    )


def _division(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    divisor = operands[1] if len(operands) > 1 else None
    zeros = _zeros(divisor)
    if not zeros:
        return OverflowCause() if bad.nan else _beyond(operands, bad)
    what = f"its divisor holds {_count(zeros)}" if isinstance(divisor, TensorStats) else "its divisor is 0"
    how = f"0 / 0: {what}" if bad.nan else f"a division by 0: {what}"
    return OverflowCause(how=how, cure=Cure("divisor"), by_zero=True)


def _reciprocal(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    zeros = _zeros(operands[0] if operands else None)
    if zeros and not bad.nan:
        return OverflowCause(how=f"1 / 0: it was given {_count(zeros)}", cure=Cure("operand-zero"), by_zero=True)
    return _of_negative(bad, "the inverse root of a negative number") if bad.nan and not zeros else OverflowCause()


def _of_negative(bad: TensorStats, how: str) -> OverflowCause:
    return OverflowCause(how=how, cure=Cure("domain")) if bad.nan else OverflowCause()


def _logarithm(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    zeros = _zeros(operands[0] if operands else None)
    if zeros and bad.neginf and not bad.nan:
        return OverflowCause(how=f"the logarithm of 0: it was given {_count(zeros)}", cure=Cure("logarithm"))
    return _of_negative(bad, "the logarithm of a negative number")


def _root(_: list[Operand], bad: TensorStats) -> OverflowCause:
    return _of_negative(bad, "the root of a negative number")


def _exponential(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    limit = LIMITS.get(bad.dtype)
    if limit is None or bad.nan:
        return OverflowCause()
    return OverflowCause(
        how=f"an exponential beyond {limit:.3g}, where {bad.dtype} ends: it was given values up to "
        f"{_largest(operands[:1]):.3g}, and {math.log(limit):.3g} is the last that fits",
        cure=Cure("exponential"),
    )


def _power(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    exponent = operands[1] if len(operands) > 1 else None
    if isinstance(exponent, float) and exponent < 0 and _zeros(operands[0]) and not bad.nan:
        how = f"0 to the power of {exponent:g}: it was given {_count(_zeros(operands[0]))}"
        return OverflowCause(how=how, cure=Cure("operand-zero"))
    return _of_negative(bad, "a negative number to a fractional power") if bad.nan else _beyond(operands[:1], bad)


def _norm(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    return OverflowCause() if bad.nan else _beyond(operands[:1], bad)


def _softmax(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    given = operands[0] if operands else None
    if bad.nan and isinstance(given, TensorStats) and given.only_minus_inf:
        return OverflowCause(how="a softmax over a row that is masked entirely", cure=Cure("masked-row"))
    return OverflowCause()


def _mean_of_targets(operands: list[Operand], bad: TensorStats) -> OverflowCause:
    """The mean over the targets that count is nan of finite values only where no target does."""
    if not bad.nan or bad.count != 1 or any(isinstance(each, TensorStats) and each.is_bad for each in operands):
        return OverflowCause()
    return OverflowCause(
        how="a mean over no target: every label is ignored, or its class has no weight",
        cure=Cure("no-target"),
    )


EXPLAINED: dict[str, Explain] = {
    **dict.fromkeys(("div", "true_divide", "divide"), _division),
    **dict.fromkeys(("reciprocal", "rsqrt"), _reciprocal),
    **dict.fromkeys(("log", "log2", "log10"), _logarithm),
    "sqrt": _root,
    "exp": _exponential,
    "pow": _power,
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _mean_of_targets),
    **dict.fromkeys(("mul", "add", "sub", "mm", "addmm", "bmm", "baddbmm", "sum", "convolution", "_to_copy"), _beyond),
}


def rows_text(where: str, tensors: Iterable[Tensor], rows: int) -> str:
    """Which rows hold nan or inf; empty where all do or none. ``rows``: the size of the first dimension that counts."""
    with torch.no_grad(), _disable_current_modes():
        bad: set[int] = set()
        for tensor in tensors:
            if tensor.dim() > 1 and tensor.shape[0] == rows and tensor.is_floating_point() and tensor.numel():
                # -inf alone may be a mask
                holds = (torch.isnan(tensor) | torch.isposinf(tensor)).reshape(rows, -1).any(1)
                bad.update(holds.nonzero().flatten().tolist())
    if not bad or len(bad) == rows:
        return ""
    named = ", ".join(map(str, sorted(bad)[:MAX_ROWS])) + (" and more" if len(bad) > MAX_ROWS else "")
    return f"{where}: only row{'s' if len(bad) > 1 else ''} {named} of {rows} (first dimension, from 0) not finite"


def rows_of(inputs: Any) -> int | None:
    """How many rows a batch has; None where its tensors do not agree."""
    sizes = {tensor.shape[0] for tensor in leaves(inputs) if tensor.dim() > 1}
    return sizes.pop() if len(sizes) == 1 else None


def ignored_labels(kwargs: dict[str, Any]) -> str:
    """Whether no label of a batch counts, with or without the shift by one of language models."""
    for name, tensor in _labels(kwargs):
        if bool((tensor == IGNORED).all()):
            return f"all {tensor.numel()} elements of {name} are {IGNORED}, which a loss leaves out"
        if tensor.dim() > 1 and bool((tensor[..., 1:] == IGNORED).all()):
            return f"all elements of {name} but the first of each row are {IGNORED}, and a shift by one leaves out the first"
    return ""


def _labels(kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in kwargs.items():
        for name, tensor in tensors_of(key, value):
            if "label" in key.lower() and tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
                yield name, tensor


def names_of(model: nn.Module, operations: Operations) -> Names:
    """Before a replay: whose memory is whose. A forward may replace a buffer by another tensor."""
    found: Names = {}
    for kind, name, tensor in _tensors_of(model):
        memory = operations.memory_of(tensor)
        if memory is not None:
            named = NamedTensor(kind=kind, name=name, tensor=tensor, extent=extent_of(tensor))
            found.setdefault(memory, []).append(named)
    return found


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("weight", name, tensor) for name, tensor in model.named_parameters())
    yield from (("buffer", name, tensor) for name, tensor in model.named_buffers())
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield "attribute", f"{place}.{name}".lstrip("."), value


def of_the_model(found: FirstBad, held: Held, value: Value | None, names: Names) -> tuple[FirstBad, Held]:
    """The first bad value came out of ``held``: if that is the model's, it is what was bad first."""
    kind, name = _which(names.get(value.memory, []), value.extent) if value is not None else ("", "")
    held = msgspec.structs.replace(held, kind=kind, name=name)
    if not kind or found.kind in OUTSIDE:
        return found, held
    stats = msgspec.structs.replace(held.tensor, name=f"{kind} {name}")
    return dataclasses.replace(found, kind=BadKind.WEIGHT, frame=_with(found, (stats,)).frame, tensor=stats), held


def _which(together: list[NamedTensor], extent: tuple[int, int]) -> tuple[str, str]:
    """Which of the tensors in one memory is meant: the only one that lies there, or the only bad one. Of two, none is named."""
    met = [named for named in together if named.extent[0] < extent[1] and extent[0] < named.extent[1]]
    if len({named.extent for named in met}) > 1:
        met = [named for named in met if named.extent == extent] or [named for named in met if bool(flag(named.tensor))]
    return (met[0].kind, met[0].name) if len({named.extent for named in met}) == 1 else ("", "")


def bad_tensors(model: nn.Module) -> tuple[TensorStats, ...]:
    """What a model holds that is nan or inf now, on this rank: whether a forward reads it is not known."""
    readings = Readings(Meters())
    seen = [
        (f"{kind} {name}", readings.look(getattr(each, "ds_tensor", each))) for kind, name, each in _tensors_of(model)
    ]
    readings.settle()
    stats = [readings.stats(number, name) for name, number in seen if isinstance(number, int)]
    return tuple(tensor for tensor in stats if tensor.is_bad and not is_minus_inf_mask(tensor))[:MAX_TENSORS]


def with_buffers(model: nn.Module, found: FirstBad) -> FirstBad:
    """The first bad call with the buffers of its module that hold nan or inf now. Whether they did before is not known."""
    module = dict(model.named_modules()).get(found.frame.module)
    if found.kind in OUTSIDE or module is None:
        return found
    readings = Readings(Meters())
    seen = [(name, readings.look(tensor)) for name, tensor in module.named_buffers(recurse=False)]
    readings.settle()
    stats = [readings.stats(number, f"{BUFFER}{name}") for name, number in seen if isinstance(number, int)]
    return _with(found, tuple(tensor for tensor in stats if tensor.is_bad and not is_minus_inf_mask(tensor)))


def _with(found: FirstBad, tensors: tuple[TensorStats, ...]) -> FirstBad:
    frame = msgspec.structs.replace(found.frame, tensors=(*tensors, *found.frame.tensors))
    return dataclasses.replace(found, frame=frame)


class History:
    """The operations of one micro-batch on this rank, in their order."""

    def __init__(self, done: list[Operation], stats: Callable[[int, str], TensorStats]) -> None:
        self._done = done
        self._stats = stats
        self._writers: dict[int, list[int]] = {}
        for number, operation in enumerate(done):
            for value in operation.outputs:
                self._writers.setdefault(value.memory, []).append(number)
        self._figures: dict[int, TensorStats] = {}
        self._states: dict[tuple[int, int, int], str] = {}

    def provenance(self, memory: int, before: int) -> Provenance:
        """Where the bad value came from that lay in a memory after so many operations."""
        start = self._writer(memory, before)
        if start is None:
            return Provenance()
        first, waiting, seen = None, [start], set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            before_it = self._bad_writers(number)
            if before_it is None:
                if first is None or number < first:
                    first = number
            else:
                waiting += before_it
        return self._made_by(first) if first is not None else self._of_before(seen)

    def _of_before(self, passed: set[int]) -> Provenance:
        """No operation made it: the earliest of those that passed it on was given something that was bad already."""
        for number in sorted(passed):
            for value in self._done[number].inputs:
                if self._state(value, number) == "bad" and self._writer(value.memory, number) is None:
                    return Provenance(held=self._held(value, number), value=value)
        return Provenance()

    def _held(self, value: Value, number: int) -> Held:
        met = self._done[number]
        writers = [self._done[each] for each in self._writers.get(value.memory, ())]
        lines = [origin(each.name, each.line, each.made) for each in writers]
        return Held(
            tensor=self._of(value.reading),
            met=origin(met.name, met.line, met.made),
            written=next((line for line in lines if line is not None), None),
        )

    def _made_by(self, number: int) -> Provenance:
        """An operation made it of values that were not bad."""
        operation = self._done[number]
        name = operation.name if operation.line is not None else operation.node or operation.name
        place = origin(name, operation.line, operation.made)
        if operation.communicates:
            return Provenance(received=place or Origin(op=operation.name, line=""))
        masks = [value for value in operation.inputs if self._state(value, number) == "mask"]
        if place is not None:
            operands = [self._figures_of(each) if isinstance(each, Value) else each for each in operation.operands]
            outputs = [stats for value in operation.outputs if (stats := self._figures_of(value)) is not None]
            cause = cause_of(operation.name, operation.node, operands, outputs)
            place = msgspec.structs.replace(place, how=cause.how, cure=cause.cure)
        maker = self._maker(masks[0], number) if masks else None
        was_there = self._was_there(masks[0], number) if masks else None
        if was_there is None:
            return Provenance(made=place, minus_inf=maker)
        return Provenance(made=place, minus_inf=maker, held=self._held(*was_there), value=was_there[0])

    def _was_there(self, mask: Value, before: int) -> tuple[Value, int] | None:
        """The mask, or the one that it came of, with the operation that met it, if it was there before the batch."""
        while (writer := self._writer(mask.memory, before)) is not None:
            given = [value for value in self._done[writer].inputs if self._state(value, writer) == "mask"]
            if not given:
                return None
            mask, before = given[0], writer
        return mask, before

    def _figures_of(self, value: Value) -> TensorStats | None:
        return None if value.reading == NO_FIGURES else self._of(value.reading)

    def _maker(self, mask: Value, before: int) -> Origin | None:
        """What made the -inf of a mask."""
        for number in self._writers.get(mask.memory, ()):
            operation = self._done[number]
            outputs = map(self._figures_of, operation.outputs)
            if number < before and any(stats is not None and stats.only_minus_inf for stats in outputs):
                return origin(operation.name, operation.line, operation.made)
        return None

    def _bad_writers(self, number: int) -> list[int] | None:
        """The operations that made the bad inputs of one; None if none of its inputs was bad: it began there."""
        bad = [value for value in self._done[number].inputs if self._state(value, number) == "bad"]
        if not bad:
            return None
        # a bad input that no operation made was there before: nothing to follow
        return [writer for value in bad if (writer := self._writer(value.memory, number)) is not None]

    def _writer(self, memory: int, before: int) -> int | None:
        """The last operation before that left something bad in a memory, or into which other ranks sent."""
        for number in reversed(self._writers.get(memory, ())):
            if number >= before:
                continue
            operation = self._done[number]
            if operation.communicates:
                return number
            mine = (value for value in operation.outputs if value.memory == memory and value.reading != NO_FIGURES)
            if any(self._of(value.reading).is_bad for value in mine):
                return number
        return None

    def _state(self, value: Value, before: int) -> str:
        """``fine``, ``mask`` or ``bad``: what an operation met in a value."""
        if value.reading == NO_FIGURES or (value.chosen != NO_FIGURES and not self._of(value.chosen).is_bad):
            return "fine"
        stats = self._of(value.reading)
        if not stats.is_bad:
            return "fine"
        if not stats.only_minus_inf:
            return "bad"
        key = (value.memory, value.reading, before)
        if key not in self._states:
            self._states[key] = "bad"  # while it is looked for: a loop of in-place writes
            self._states[key] = "mask" if self._is_made_as_mask(value, stats, before) else "bad"
        return self._states[key]

    def _is_made_as_mask(self, value: Value, stats: TensorStats, before: int) -> bool:
        """Whether a -inf was put there on purpose, or comes of adding a mask."""
        writer = self._writer(value.memory, before)
        if writer is None or self._done[writer].communicates:
            return stats.count == 1 or is_minus_inf_mask(stats)
        operation = self._done[writer]
        given = [each for each in operation.inputs if each.reading != NO_FIGURES]
        if any(self._state(each, writer) == "bad" for each in given):
            return False
        masked = any(self._state(each, writer) == "mask" or is_mask(self._of(each.reading)) for each in given)
        return masked or operation.name in FILLS

    def _of(self, reading: int) -> TensorStats:
        if reading not in self._figures:
            self._figures[reading] = self._stats(reading, "")
        return self._figures[reading]
