"""A bad value of a replayed batch -> where it came from: back through the operations to the first whose inputs were finite.

Pure: operations and figures go in. A mask's -inf or lowest number is no bad value, and where it was made no cause.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dsdoctor.overflow.frames.first_bad import Held, Origin
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.frames.masks import is_mask, is_minus_inf_mask
from dsdoctor.overflow.replay.arithmetic import Operand, Why, why
from dsdoctor.overflow.replay.lines import origin
from dsdoctor.overflow.replay.operations import NO_FIGURES, Operation, Value

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
        return self._told(first) if first is not None else self._of_before(seen)

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

    def _told(self, number: int) -> Provenance:
        operation = self._done[number]
        name = operation.name if operation.line is not None else operation.node or operation.name
        place = origin(name, operation.line, operation.made)
        if operation.communicates:
            return Provenance(received=place or Origin(op=operation.name, line=""))
        masks = [value for value in operation.inputs if self._state(value, number) == "mask"]
        if place is not None:
            reason = self._why(operation)
            place = msgspec.structs.replace(place, how=reason.how, cure=reason.cure)
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

    def _why(self, operation: Operation) -> Why:
        operands: list[Operand] = [self._of_operand(each) for each in operation.operands]
        outputs = [self._of(value.reading) for value in operation.outputs if value.reading != NO_FIGURES]
        return why(operation.name, operation.node, operands, outputs)

    def _of_operand(self, operand: Value | float | None) -> Operand:
        if isinstance(operand, Value):
            return None if operand.reading == NO_FIGURES else self._of(operand.reading)
        return operand

    def _maker(self, mask: Value, before: int) -> Origin | None:
        """What made the -inf of a mask."""
        for number in self._writers.get(mask.memory, ()):
            operation = self._done[number]
            if number < before and any(self._is_minus_inf(value) for value in operation.outputs):
                return origin(operation.name, operation.line, operation.made)
        return None

    def _is_minus_inf(self, value: Value) -> bool:
        return value.reading != NO_FIGURES and self._of(value.reading).only_minus_inf

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
