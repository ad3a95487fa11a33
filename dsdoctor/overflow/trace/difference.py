"""How much two tensors of one place may differ by rounding alone, and in which figure they differ more. Pure."""

import enum
import math
from dataclasses import dataclass

from dsdoctor.overflow.frames.dtypes import SMALLEST_NORMAL
from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats
from dsdoctor.overflow.frames.masks import is_mask, is_minus_inf_mask


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


@dataclass(kw_only=True)
class FormChange:
    """A shape or dtype that differs: how often, and where first."""

    a: str
    b: str
    count: int
    first: TensorPlace


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


ROUNDINGS = {CallPhase.FORWARD: 32, CallPhase.BACKWARD: 256}
"""Rounding errors of n operations grow like the root of n (Higham, section 2.8), and 32 is the root of a thousand. Gradients
are sums over all tokens in which much cancels: eight times as much."""
LEAST, MOST = 1e-3, 1.0
OTHER_DATA = {CallPhase.FORWARD: 4.0, CallPhase.BACKWARD: 8.0}
ZEROS_SAME, ZEROS_OTHER = 0.05, 0.25
SIMILAR = 8
"""An abs min is judged where all values lie within a factor of 8; else the least of many values near zero is rounding."""
NEGLIGIBLE = 1e-3
"""A tensor that is less than this part of the largest of its call on both sides is not judged: it moves nothing there."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What is no difference: a ratio of two abs maxima, and a difference of two shares of zeros."""

    ratio: float
    zeros: float


def allowed(roundoff: float, phase: CallPhase, *, same_data: bool, asked: float | None = None) -> Allowed:
    """What is allowed at a place. ``roundoff``: of the coarsest dtype that was met on the way to it.

    The same batch of the same rank: 1 + 32 unit roundoffs (gradients: 256), at least 1.001 and at most 2. Other data: a factor
    of 4 (gradients: 8). ``asked``: that ratio instead.

    >>> [allowed(2.0**-bits, CallPhase.FORWARD, same_data=True).ratio for bits in (24, 11, 8, 4)]
    [1.001, 1.015625, 1.125, 2.0]
    >>> allowed(2.0**-24, CallPhase.BACKWARD, same_data=False).ratio
    8.0
    """
    zeros = ZEROS_SAME if same_data else ZEROS_OTHER
    if asked is not None:
        return Allowed(ratio=asked, zeros=zeros)
    if not same_data:
        return Allowed(ratio=OTHER_DATA[phase], zeros=zeros)
    return Allowed(ratio=1 + min(max(ROUNDINGS[phase] * roundoff, LEAST), MOST), zeros=zeros)


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
