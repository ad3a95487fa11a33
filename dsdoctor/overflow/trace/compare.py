"""Two sets of traces -> where they diverge: the first tensor whose figures differ by more than rounding.

Batches are read in pairs, one after the other. Frames are matched by phase, module, call and the tensor's name, and judged in the
order in which A ran them. What rounding may do: see ``allowed``. A change of shape or dtype is reported and is no divergence by
itself: users choose padding and precision.
"""

import enum
import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.frames.frame import (
    LIMITS,
    SMALLEST_NORMAL,
    UNIT_ROUNDOFF,
    CallPhase,
    Frame,
    TensorStats,
    is_mask,
    is_minus_inf_mask,
    unscaled,
)
from dsdoctor.overflow.trace.trace_file import Batches, Selection, Traces, find_batches

ROUNDINGS = {CallPhase.FORWARD: 32, CallPhase.BACKWARD: 256}
"""Rounding errors of n operations grow like the root of n (Higham, section 2.8), and 32 is the root of a thousand. Gradients
are sums over all tokens in which much cancels: eight times as much."""
MIN_ALLOWED, MAX_ALLOWED = 1e-3, 1.0
OTHER_DATA = {CallPhase.FORWARD: 4.0, CallPhase.BACKWARD: 8.0}
ZEROS_SAME, ZEROS_OTHER = 0.05, 0.25
SIMILAR = 8
"""An abs min is judged where all values lie within a factor of 8; else the least of many values near zero is rounding."""
NEGLIGIBLE = 1e-3
"""A tensor that is less than this part of the largest of its call on both sides is not judged: it moves nothing there."""
MAX_SHOWN = 20
PHASES = (CallPhase.FORWARD, CallPhase.BACKWARD)
Key = tuple[bool, str, int, str, int]
"""Backward, module, call, tensor, and how often that was there before: a gradient may come in several frames."""
FramedTensor = tuple[Frame, TensorStats]


class DifferenceKind(enum.Enum):
    """In which figure two tensors differ most."""

    NOT_FINITE = "nan or inf"
    ABSMAX = "abs max"
    ABSMIN = "abs min"
    ZEROS = "zeros"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: which batch of which rank."""

    rank: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The frames of a batch on both sides."""

    a: Side
    b: Side
    frames_a: tuple[Frame, ...]
    frames_b: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """Which tensor of which call. ``kind``: the module's class."""

    a: Side
    b: Side
    phase: CallPhase
    module: str
    kind: str
    call: int
    tensor: str


@dataclass(kw_only=True)
class FormChange:
    """A shape or dtype that differs: how often, and where first."""

    a: str
    b: str
    count: int
    first: TensorPlace


@dataclass(frozen=True, kw_only=True)
class ChosenBatch:
    """A batch and a rank of one side; None: all that both sides have."""

    batch: int | None = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Two tensors of one place. ``ratio``: the larger figure over the smaller, 1 or more; ``tolerance``: what was allowed."""

    place: TensorPlace
    what: DifferenceKind
    ratio: float
    tolerance: float
    diverges: bool
    a: TensorStats
    b: TensorStats


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs, batches or ranks differ in. ``agreed``: tensors before ``first``; ``largest``: one a module."""

    pairs: int
    tensors: int
    agreed: int
    diverging: int
    bad_in_both: int
    first: TensorDifference | None
    first_bad: TensorDifference | None
    largest: tuple[TensorDifference, ...]
    shapes: tuple[FormChange, ...]
    dtypes: tuple[FormChange, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What is no difference: a ratio of two abs maxima, and a difference of two shares of zeros."""

    ratio: float
    zeros: float


def allowed(roundoff: float, phase: CallPhase, *, same_data: bool, tolerance: float | None = None) -> Allowed:
    """What is allowed at a place. ``roundoff``: of the coarsest dtype that was met on the way to it.

    The same batch of the same rank: 1 + 32 unit roundoffs (gradients: 256), at least 1.001 and at most 2. Other data: a factor
    of 4 (gradients: 8). ``tolerance``: that ratio instead.

    >>> [allowed(2.0**-bits, CallPhase.FORWARD, same_data=True).ratio for bits in (24, 11, 8, 4)]
    [1.001, 1.015625, 1.125, 2.0]
    >>> allowed(2.0**-24, CallPhase.BACKWARD, same_data=False).ratio
    8.0
    """
    zeros = ZEROS_SAME if same_data else ZEROS_OTHER
    if tolerance is not None:
        return Allowed(ratio=tolerance, zeros=zeros)
    if not same_data:
        return Allowed(ratio=OTHER_DATA[phase], zeros=zeros)
    return Allowed(ratio=1 + min(max(ROUNDINGS[phase] * roundoff, MIN_ALLOWED), MAX_ALLOWED), zeros=zeros)


def ratio(a: float | None, b: float | None) -> float:
    """The larger over the smaller; inf where one is zero, 1 where there is nothing to compare.

    >>> ratio(3.0, 6.0), ratio(0.0, 0.0), ratio(0.0, 1.0), ratio(None, 1.0)
    (2.0, 1.0, inf, 1.0)
    """
    if a is None or b is None or a == b:
        return 1.0
    least, most = (a, b) if a < b else (b, a)
    return most / least if least else math.inf


def judge(a: TensorStats, b: TensorStats, limits: Allowed) -> tuple[DifferenceKind, float, bool]:
    """What differs most, by which ratio, and whether that is more than allowed. At most one of the two is bad."""
    if is_bad(a) or is_bad(b):
        return DifferenceKind.NOT_FINITE, math.inf, True
    most = 1.0 if is_mask(a) and is_mask(b) else ratio(a.absmax, b.absmax)
    least = ratio(a.absmin, b.absmin) if _is_similar(a) and _is_similar(b) else 1.0
    if max(most, least) <= limits.ratio and _zeros_differ(a, b, limits.zeros):
        return DifferenceKind.ZEROS, most, True
    if least > most:
        return DifferenceKind.ABSMIN, least, least > limits.ratio
    return DifferenceKind.ABSMAX, most, most > limits.ratio


def is_bad(tensor: TensorStats) -> bool:
    """Whether it holds a nan or an inf that is no mask's."""
    return tensor.is_bad and not is_minus_inf_mask(tensor)


def is_negligible(a: TensorStats, b: TensorStats, frame_a: Frame, frame_b: Frame) -> bool:
    """Whether both tensors are too small to matter: beside the others of their call, or as subnormal numbers, which are
    coarse. What is zero on one side alone was flushed, and matters."""
    most, least = max(a.absmax or 0.0, b.absmax or 0.0), min(a.absmax or 0.0, b.absmax or 0.0)
    if least > 0 and most < max(SMALLEST_NORMAL.get(a.dtype, 0.0), SMALLEST_NORMAL.get(b.dtype, 0.0)):
        return True
    others = (tensor for tensor in frame_a.measured + frame_b.measured if not is_mask(tensor))
    return most < NEGLIGIBLE * max((tensor.absmax or 0.0 for tensor in others), default=0.0)


def _is_similar(tensor: TensorStats) -> bool:
    """Whether all its values are of about one size, so that the least of them says something."""
    return bool(tensor.absmin and tensor.absmax and tensor.absmax <= SIMILAR * tensor.absmin)


def _zeros_differ(a: TensorStats, b: TensorStats, limit: float) -> bool:
    """Whether one side has many more zeros. A weight's zeros are its start, and go away in time."""
    if not a.name.startswith(("input", "output", "grad")) or not a.count or not b.count:
        return False
    return abs(a.zeros / a.count - b.zeros / b.count) > limit


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

    tolerance: float | None
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
    tally = _Tally(tolerance=tolerance)
    for pair in pairs:
        tally.pairs += 1
        _compare_pair(tally, pair)
    largest = heapq.nlargest(
        MAX_SHOWN, tally.best.values(), key=lambda difference: (difference.diverges, difference.ratio)
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


def _keyed(frames: Iterable[Frame]) -> dict[Key, FramedTensor]:
    """The floating-point tensors by their place, in the order of execution: within a frame weights, inputs, outputs.
    Gradients without the loss scale that is in them."""
    found: dict[Key, FramedTensor] = {}
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
            limits = [
                allowed(coarsest, phase, same_data=pair.a == pair.b, tolerance=tally.tolerance) for phase in PHASES
            ]
        _note(tally, pair, a, b, limits[a[0].phase is CallPhase.BACKWARD])


def _note_modules(tally: _Tally, pair: Pair) -> None:
    """Which modules, by phase, only one side has."""
    on_a, on_b = ({(frame.phase, frame.module): None for frame in frames} for frames in (pair.frames_a, pair.frames_b))
    tally.only_a |= {_named(*place): None for place in on_a if place not in on_b}
    tally.only_b |= {_named(*place): None for place in on_b if place not in on_a}


def _named(phase: CallPhase, module: str) -> str:
    name = module or "(the whole model)"
    return name if phase is CallPhase.FORWARD else f"{name} (backward)"


def _note(tally: _Tally, pair: Pair, found_a: FramedTensor, found_b: FramedTensor, limits: Allowed) -> None:
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


def pairs(a: Traces, b: Traces, chosen_a: ChosenBatch, chosen_b: ChosenBatch, selection: Selection) -> Iterator[Pair]:
    """The pairs, batch by batch and within a batch rank by rank. Raises UsageError when there is nothing to pair.

    A batch or rank that only one side names is taken of the other side too.
    """
    rank_pairs = _pair_ranks(a, b, chosen_a.rank, chosen_b.rank)
    found_a = {rank: find_batches(a.of(rank).path) for rank, _ in rank_pairs}
    found_b = {rank: find_batches(b.of(rank).path) for _, rank in rank_pairs}
    batch_pairs = _pair_batches(found_a, found_b, chosen_a.batch, chosen_b.batch)
    for batch_a, batch_b in batch_pairs:
        for rank_a, rank_b in rank_pairs:
            frames_a = _wanted(found_a[rank_a], batch_a, selection)
            frames_b = _wanted(found_b[rank_b], batch_b, selection)
            if frames_a or frames_b:
                side_a, side_b = Side(rank=rank_a, batch=batch_a), Side(rank=rank_b, batch=batch_b)
                yield Pair(a=side_a, b=side_b, frames_a=frames_a, frames_b=frames_b)


def _wanted(batches: Batches, batch: int, selection: Selection) -> tuple[Frame, ...]:
    return tuple(frame for frame in batches.frames(batch) if selection.takes(frame))


def _pair_ranks(a: Traces, b: Traces, rank_a: int | None, rank_b: int | None) -> tuple[tuple[int, int], ...]:
    if rank_a is not None or rank_b is not None:
        first = rank_a if rank_a is not None else rank_b if rank_b in a.ranks else _only(a)
        second = rank_b if rank_b is not None else rank_a if rank_a in b.ranks else _only(b)
        return ((a.of(first).rank, b.of(second).rank),)
    if len(a.ranks) == len(b.ranks) == 1:
        return ((a.ranks[0], b.ranks[0]),)
    common = tuple((rank, rank) for rank in a.ranks if rank in b.ranks)
    if not common:
        raise UsageError(
            f"A has rank {_batch_named(a.ranks)}, B has rank {_batch_named(b.ranks)}",
            hint="name them: --rank-a 0 --rank-b 3",
        )
    return common


def _only(traces: Traces) -> int:
    """The one rank there is. Raises UsageError where there are several."""
    if len(traces.ranks) > 1:
        raise UsageError(
            f"one side has rank {_batch_named(traces.ranks)}: which one?", hint="name both: --rank-a 0 --rank-b 3"
        )
    return traces.ranks[0]


def _pair_batches(
    a: dict[int, Batches], b: dict[int, Batches], batch_a: int | None, batch_b: int | None
) -> tuple[tuple[int, int], ...]:
    on_a = sorted({batch for batches in a.values() for batch in batches.spans})
    on_b = sorted({batch for batches in b.values() for batch in batches.spans})
    if batch_a is not None or batch_b is not None:
        first = batch_a if batch_a is not None else batch_b
        second = batch_b if batch_b is not None else batch_a
        return ((_known("A", on_a, first), _known("B", on_b, second)),)
    common = tuple((batch, batch) for batch in sorted(set(on_a) & set(on_b)))
    if not common:
        raise UsageError(
            f"A has batches {_batch_named(on_a)}, B has batches {_batch_named(on_b)}",
            hint="name one of each: --batch-a 149 --batch-b 150",
        )
    return common


def _known(side: str, batches: list[int], batch: int | None) -> int:
    if batch not in batches:
        raise UsageError(f"{side} has no batch {batch}", hint=f"it has {_batch_named(batches)}")
    return batch


def _batch_named(numbers: list[int] | tuple[int, ...]) -> str:
    """Numbers in words: few are all named.

    >>> _batch_named([1, 3]), _batch_named(list(range(200))), _batch_named([])
    ('1, 3', '200 from 0 to 199', 'none')
    """
    if len(numbers) > 8:
        return f"{len(numbers)} from {numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
