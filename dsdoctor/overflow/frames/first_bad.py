"""Frames of one rank -> the first call that went wrong, and in which way. Pure; knows no torch."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from dsdoctor.overflow.frames.frame import LIMITS, Frame, Phase, TensorStats


class Kind(enum.Enum):
    """How the first nan or inf came to be."""

    MODULE = "module"
    """Inputs and weights were finite, the output is not."""
    BETWEEN = "between"
    """The input was bad already, and no module's output had been: made outside of modules."""
    DATA = "data"
    """The batch itself: an input of the whole model."""
    WEIGHT = "weight"
    """A parameter holds it."""
    GRADIENT = "gradient"
    """The forward was finite, a gradient is not."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The first bad call. ``tensor``: what was bad; ``before``: the last call that ended before it."""

    kind: Kind
    frame: Frame
    tensor: TensorStats
    before: Frame | None = None


MASK_REST = 1 / 16
"""An output whose only bad values are -inf is a mask as long as its finite rest stays below this part of the limit, and the
module has no weights: what overflows to -inf comes with neighbours near the limit, or out of a channel of a Linear."""


def culprit(frames: Iterable[Frame]) -> Culprit | None:
    """The first bad call of a batch, forward before backward; None: none, or nothing but masks."""
    frames = tuple(frames)
    forward = tuple(frame for frame in frames if frame.phase is Phase.FORWARD)
    return _in_forward(forward) or _in_backward(frame for frame in frames if frame.phase is Phase.BACKWARD)


def _in_forward(frames: tuple[Frame, ...]) -> Culprit | None:
    before: Frame | None = None
    given = any(_bad_inputs(frame) for frame in frames if frame.module == "")
    for frame in frames:
        found = _judge(frame, before, given=given)
        if found is not None:
            return found
        before = frame
    return None


def _judge(frame: Frame, before: Frame | None, *, given: bool) -> Culprit | None:
    """What is wrong with one call, if anything, when all before it was right. ``given``: the batch itself is bad."""
    for tensor in frame.weights:
        if tensor.is_bad:
            return Culprit(kind=Kind.WEIGHT, frame=frame, tensor=tensor, before=before)
    for tensor in _bad_inputs(frame):
        kind = Kind.DATA if given else Kind.BETWEEN
        return Culprit(kind=kind, frame=frame, tensor=tensor, before=before)
    for tensor in frame.outputs:
        if tensor.is_bad and not (is_mask(tensor) and not frame.weights):
            return Culprit(kind=Kind.MODULE, frame=frame, tensor=tensor, before=before)
    return None


def _bad_inputs(frame: Frame) -> tuple[TensorStats, ...]:
    """Inputs that are bad and no masks: -inf is one where it lies beside small values; any inf where the module bore it."""
    bad = (tensor for tensor in frame.inputs if tensor.is_bad and not is_mask(tensor))
    return tuple(tensor for tensor in bad if tensor.nan or not _is_finite(frame))


def is_mask(tensor: TensorStats) -> bool:
    """Whether a tensor looks like a mask: -inf only, beside small values."""
    limit = LIMITS.get(tensor.dtype, LIMITS["float32"])
    return tensor.only_minus_inf and tensor.absmax is not None and tensor.absmax <= MASK_REST * limit


def _is_finite(frame: Frame) -> bool:
    """Whether the module bore its inputs: all outputs that were measured are finite."""
    return bool(frame.outputs) and not any(tensor.is_bad and not is_mask(tensor) for tensor in frame.outputs)


def _in_backward(frames: Iterable[Frame]) -> Culprit | None:
    before: Frame | None = None
    for frame in frames:
        for tensor in frame.measured:
            if tensor.is_bad:
                return Culprit(kind=Kind.GRADIENT, frame=frame, tensor=tensor, before=before)
        before = frame
    return None
