"""Frames of one rank -> the first call that went wrong and in which way, as plain data that travels between ranks."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from dsdoctor.overflow.frames.frame import LIMITS, CallPhase, Frame, TensorStats


class BadKind(enum.Enum):
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
class FirstBad:
    """The first bad call. ``tensor``: what was bad; ``before``: the last call that ended before it."""

    kind: BadKind
    frame: Frame
    tensor: TensorStats
    before: Frame | None = None


MASK_REST = 1 / 16
"""An output whose only bad values are -inf is a mask as long as its finite rest stays below this part of the limit, and the
module has no weights: what overflows to -inf comes with neighbours near the limit, or out of a channel of a Linear."""


def first_bad(frames: Iterable[Frame]) -> FirstBad | None:
    """The first bad call of a batch, forward before backward; None: none, or nothing but masks."""
    frames = tuple(frames)
    forward = tuple(frame for frame in frames if frame.phase is CallPhase.FORWARD)
    return _in_forward(forward) or _in_backward(frame for frame in frames if frame.phase is CallPhase.BACKWARD)


def _in_forward(frames: tuple[Frame, ...]) -> FirstBad | None:
    before: Frame | None = None
    given = any(_bad_inputs(frame) for frame in frames if frame.module == "")
    for frame in frames:
        found = _judge(frame, before, given=given)
        if found is not None:
            return found
        before = frame
    return None


def _judge(frame: Frame, before: Frame | None, *, given: bool) -> FirstBad | None:
    """What is wrong with one call, if anything, when all before it was right. ``given``: the batch itself is bad."""
    for tensor in frame.weights:
        if tensor.is_bad:
            return FirstBad(kind=BadKind.WEIGHT, frame=frame, tensor=tensor, before=before)
    for tensor in _bad_inputs(frame):
        kind = BadKind.DATA if given else BadKind.BETWEEN
        return FirstBad(kind=kind, frame=frame, tensor=tensor, before=before)
    for tensor in frame.outputs:
        if tensor.is_bad and not (is_mask(tensor) and not frame.weights):
            return FirstBad(kind=BadKind.MODULE, frame=frame, tensor=tensor, before=before)
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


def _in_backward(frames: Iterable[Frame]) -> FirstBad | None:
    before: Frame | None = None
    for frame in frames:
        for tensor in frame.measured:
            if tensor.is_bad:
                return FirstBad(kind=BadKind.GRADIENT, frame=frame, tensor=tensor, before=before)
        before = frame
    return None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The first operation whose result was not finite. ``line``: the file, line and text that called it."""

    op: str
    line: str


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The loss scale that was in force. ``floor``: it will not go below; None: it is not dynamic."""

    value: float = 1.0
    floor: float | None = None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of the batch that overflowed.

    ``named``: bad gradients after reduction, those parts that this rank holds. ``local``: this rank's own gradients in
    the replay, bad ones first. ``at_scale_one``: the same replayed with scale 1; None: not done. ``frames``: the last ones
    up to the culprit. ``minus_inf``: what made the -inf that the culprit was given. ``replayed``: how far, in words.
    ``applied``: the step was taken in spite of it. ``weight_bad_since``: the first step of which that is known; None: from
    the start. ``loss_gradient``: what arrived at the loss, and what is due there: the loss scale over the accumulation
    steps.
    """

    rank: int
    world: int = 1
    host: str = ""
    stage: int | None = None
    step: int = 0
    micro: int = 0
    batch: int = 0
    dtype: str = "float32"
    zero_stage: int | None = None
    scale: Scale = Scale()
    losses: tuple[float, ...] = ()
    skipped: int = 0
    applied: bool = False
    named: tuple[TensorStats, ...] = ()
    local: tuple[TensorStats, ...] = ()
    at_scale_one: tuple[TensorStats, ...] | None = None
    first_bad: FirstBad | None = None
    origin: Origin | None = None
    minus_inf: Origin | None = None
    frames: tuple[Frame, ...] = ()
    replayed: str = ""
    weight_bad_since: int | None = None
    loss_gradient: float | None = None
    loss_gradient_due: float | None = None


PART = 4
"""``torch.finfo(dtype).min`` is the usual filling; some models halve it. A real activation so near 3.4e38 is not finite
one operation later."""
FILLINGS = {
    "float64": LIMITS["float64"] / PART,
    "float32": LIMITS["float32"] / PART,
    "bfloat16": LIMITS["bfloat16"] / PART,
    "float16": LIMITS["float16"],
}
"""From which value on it is a filling. None for fp8: that saturates at its limit."""


def is_masking(tensor: TensorStats) -> bool:
    """Whether a tensor's largest value is the filling of a mask: -inf beside small values, or the dtype's own limit.

    >>> is_masking(TensorStats(name="input[mask]", dtype="float32", shape=(2,), absmax=3.4028234663852886e38))
    True
    >>> is_masking(TensorStats(name="input[mask]", dtype="float16", shape=(2,), neginf=6, absmax=0.0))
    True
    >>> is_masking(TensorStats(name="output", dtype="float16", shape=(2,), posinf=6, absmax=65504.0))
    False
    """
    if tensor.neginf and is_mask(tensor):
        return True
    filling = FILLINGS.get(tensor.dtype)
    if filling is None or tensor.absmax is None or tensor.absmax < filling:
        return False
    return not tensor.nan and not tensor.posinf
