"""Two streams of frames -> where they diverge: the first tensor whose figures differ by more than rounding. Pure.

Frames are matched by phase, module, call and the tensor's name, and judged in the order in which A ran them. What rounding
may do: see ``difference.allowed``. A change of shape or dtype is reported and is no divergence by itself: users choose
padding and precision.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dsdoctor.overflow.frames.dtypes import LIMITS, UNIT_ROUNDOFF
from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats, unscaled
from dsdoctor.overflow.trace.difference import (
    Allowed,
    Comparison,
    DifferenceKind,
    FormChange,
    Pair,
    TensorDifference,
    TensorPlace,
    allowed,
    is_bad,
    is_negligible,
    judge,
)

MOST_SHOWN = 20
PHASES = (CallPhase.FORWARD, CallPhase.BACKWARD)


class Judged(NamedTuple):
    """A difference whose place is not written out: there are millions, and few are kept."""

    what: DifferenceKind
    ratio: float
    tolerance: float
    diverges: bool
    a: TensorStats
    b: TensorStats


@dataclass
class _Tally:
    """What was seen so far."""

    asked: float | None
    pairs: int = 0
    tensors: int = 0
    agreed: int = 0
    diverging: int = 0
    bad_in_both: int = 0
    first: TensorDifference | None = None
    first_bad: TensorDifference | None = None
    best: dict[tuple[bool, str], TensorDifference] = field(default_factory=dict)
    shapes: dict[tuple[str, str], FormChange] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], FormChange] = field(default_factory=dict)
    only_a: dict[str, None] = field(default_factory=dict)
    only_b: dict[str, None] = field(default_factory=dict)


def compare(pairs: Iterable[Pair], *, tolerance: float | None = None) -> Comparison:
    """Compare batch after batch, in flat memory. ``tolerance``: a ratio of abs maxima instead of the rule's."""
    tally = _Tally(asked=tolerance)
    for pair in pairs:
        tally.pairs += 1
        _compare_pair(tally, pair)
    largest = heapq.nlargest(
        MOST_SHOWN, tally.best.values(), key=lambda difference: (difference.diverges, difference.ratio)
    )
    return Comparison(
        pairs=tally.pairs,
        tensors=tally.tensors,
        agreed=tally.agreed,
        diverging=tally.diverging,
        bad_in_both=tally.bad_in_both,
        first=tally.first,
        first_bad=tally.first_bad,
        largest=tuple(difference for difference in largest if difference.ratio > 1),
        shapes=tuple(tally.shapes.values()),
        dtypes=tuple(tally.dtypes.values()),
        only_a=tuple(tally.only_a),
        only_b=tuple(tally.only_b),
    )


Key = tuple[bool, str, int, str, int]
"""Backward, module, call, tensor, and how often that was there before: a gradient may come in several frames."""
Found = tuple[Frame, TensorStats]


def _keyed(frames: Iterable[Frame]) -> dict[Key, Found]:
    """The floating-point tensors by their place, in the order of execution: within a frame weights, inputs, outputs.
    Gradients without the loss scale that is in them."""
    found: dict[Key, Found] = {}
    for frame in frames:
        backward = frame.phase is CallPhase.BACKWARD  # hashing an enum takes as long as all the rest
        for tensor in frame.tensors:
            if isinstance(tensor, TensorStats) and tensor.dtype in LIMITS:
                times = 0
                while (key := (backward, frame.module, frame.call, tensor.name, times)) in found:
                    times += 1
                found[key] = frame, unscaled(tensor, frame.loss_scale) if frame.loss_scale else tensor
    return found


def _compare_pair(tally: _Tally, pair: Pair) -> None:
    on_a, on_b = _keyed(pair.frames_a), _keyed(pair.frames_b)
    _note_modules(tally, pair)
    coarsest, limits = 0.0, [Allowed(ratio=1.0, zeros=0.0)] * 2
    for key, a in on_a.items():
        b = on_b.get(key)
        if b is None:
            continue
        roundoff = max(UNIT_ROUNDOFF[a[1].dtype], UNIT_ROUNDOFF[b[1].dtype])
        if roundoff > coarsest:
            coarsest = roundoff
            limits = [allowed(coarsest, phase, same_data=pair.a == pair.b, asked=tally.asked) for phase in PHASES]
        _note(tally, pair, a, b, limits[a[0].phase is CallPhase.BACKWARD])


def _note_modules(tally: _Tally, pair: Pair) -> None:
    """Which modules, by phase, only one side has."""
    on_a, on_b = ({(frame.phase, frame.module): None for frame in frames} for frames in (pair.frames_a, pair.frames_b))
    tally.only_a |= {_named(*place): None for place in on_a if place not in on_b}
    tally.only_b |= {_named(*place): None for place in on_b if place not in on_a}


def _named(phase: CallPhase, module: str) -> str:
    name = module or "(the whole model)"
    return name if phase is CallPhase.FORWARD else f"{name} (backward)"


def _note(tally: _Tally, pair: Pair, found_a: Found, found_b: Found, limits: Allowed) -> None:
    """Judge two tensors, and keep what is first and what is largest."""
    (frame, a), (other, b) = found_a, found_b
    tally.tensors += 1
    if is_bad(a) and is_bad(b):
        tally.bad_in_both += 1
    elif a == b:
        tally.agreed += tally.first is None
    else:
        what, ratio, diverges = judge(a, b, limits)
        if diverges and what is not DifferenceKind.NOT_FINITE and is_negligible(a, b, frame, other):
            ratio, diverges = 1.0, False
        _keep(tally, pair, frame, Judged(what, ratio, limits.ratio, diverges, a, b))
    if a.shape != b.shape:
        _count(tally.shapes, str(list(a.shape)), str(list(b.shape)), pair, frame, a)
    if a.dtype != b.dtype:
        _count(tally.dtypes, a.dtype, b.dtype, pair, frame, a)


def _count(
    changes: dict[tuple[str, str], FormChange], a: str, b: str, pair: Pair, frame: Frame, tensor: TensorStats
) -> None:
    found = changes.get((a, b))
    if found is None:
        found = changes[a, b] = FormChange(a=a, b=b, count=0, first=_place(pair, frame, tensor))
    found.count += 1


def _keep(tally: _Tally, pair: Pair, frame: Frame, judged: Judged) -> None:
    """Keep a judgement that is the first of its kind, or the largest of its module."""
    tally.diverging += judged.diverges
    first_bad = tally.first_bad is None and judged.what is DifferenceKind.NOT_FINITE
    first = tally.first is None and judged.diverges
    tally.agreed += tally.first is None and not first
    place = (frame.phase is CallPhase.BACKWARD, frame.module)
    before = tally.best.get(place)
    largest = before is None or (judged.diverges, judged.ratio) > (before.diverges, before.ratio)
    if not (first or first_bad or largest):
        return
    found = TensorDifference(place=_place(pair, frame, judged.a), **judged._asdict())
    tally.first = found if first else tally.first
    tally.first_bad = found if first_bad else tally.first_bad
    if largest:
        tally.best[place] = found


def _place(pair: Pair, frame: Frame, tensor: TensorStats) -> TensorPlace:
    return TensorPlace(
        a=pair.a,
        b=pair.b,
        phase=frame.phase,
        module=frame.module,
        kind=frame.kind,
        call=frame.call,
        tensor=tensor.name,
    )
