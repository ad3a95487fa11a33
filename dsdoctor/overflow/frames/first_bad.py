"""Frames of one rank -> the first call that went wrong and in which way, as plain data that travels between ranks."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats, is_minus_inf_mask


class BadKind(enum.Enum):
    """How the first nan or inf came to be."""

    MODULE = "module"
    """Inputs and weights were finite, the output is not."""
    BETWEEN = "between"
    """The input was bad already, and no module's output had been: made outside of modules."""
    DATA = "data"
    """The batch itself: an input of the whole model."""
    WEIGHT = "weight"
    """A parameter or a buffer holds it."""
    LOSS = "loss"
    """The number that the whole model gives, and nothing else that it gives."""
    GRADIENT = "gradient"
    """The forward was finite, a gradient is not."""


@dataclass(frozen=True, kw_only=True)
class FirstBad:
    """The first bad call. ``tensor``: what was bad; ``before``: the last call that ended before it."""

    kind: BadKind
    frame: Frame
    tensor: TensorStats
    before: Frame | None = None


class Cure(msgspec.Struct, frozen=True):
    """What to do about a bad value: the name of the book's remedy, and the operation or operand that it speaks of."""

    remedy: str
    about: str = ""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The first operation whose result was not finite. ``line``: the file, line and text that called it. ``how``: why it was
    not, such as ``0 / 0``; ``cure``: what to do about that; both empty where its figures do not decide."""

    op: str
    line: str
    how: str = ""
    cure: Cure | None = None


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that no operation of the batch had made bad and that was bad when one was given it: so it was before the batch.

    ``kind``: ``buffer``, ``weight`` or ``attribute`` of a module, and ``name``; both empty where the model does not have it.
    ``met``: the first operation that was given it. ``written``: one of this batch that writes into it: then it may have become bad
    in this very batch, by a call of which this is the replay."""

    tensor: TensorStats
    kind: str = ""
    name: str = ""
    met: Origin | None = None
    written: Origin | None = None


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The bad micro-batch, replayed with a module in float32. ``module``: its name, empty for the whole model. ``forward``,
    ``backward``: whether that was finite on this rank; None: not known. ``why_not``: why it could not be replayed."""

    module: str
    forward: bool
    backward: bool | None = None
    why_not: str = ""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The largest absolute value of a weight, as far as this rank holds it, or of what a module was given, in some steps:
    (step, value), the last of them now."""

    name: str
    points: tuple[tuple[int, float], ...]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The loss scale that was in force. ``floor``: it will not go below; None: it is not dynamic."""

    value: float = 1.0
    floor: float | None = None


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    """What of a rank's gradients is zero or denormal at a loss scale and would not be at a larger one: the share of all elements,
    the parameters where it is largest, and the largest scale (a power of 2) that leaves some room: ``fits``, which is 0 where every
    gradient is exactly zero in two checks, those that the model was given too, so that no replay shows a scale."""

    share: float
    worst: tuple[tuple[str, float], ...]
    scale: float
    fits: float


class Vanished(msgspec.Struct, frozen=True, kw_only=True):
    """An activation of which float16 has nothing left: the call, the tensor's name in it, the share of its elements that are zero
    in ``dtype`` and were not in the float32 replay, and the largest of them there."""

    frame: Frame
    name: str
    share: float
    largest: float
    dtype: str


def first_bad(frames: Iterable[Frame]) -> FirstBad | None:
    """The first bad call of a batch, of the forward if there is one, else of the backward. None: nothing is bad but masks."""
    frames = tuple(frames)
    forward = tuple(frame for frame in frames if frame.phase is CallPhase.FORWARD)
    return _in_forward(forward) or _in_backward(frame for frame in frames if frame.phase is CallPhase.BACKWARD)


def _in_forward(frames: tuple[Frame, ...]) -> FirstBad | None:
    before: Frame | None = None
    given = [(frame, tensor) for frame in frames if frame.module == "" for tensor in _bad_inputs(frame)]
    masks = [
        (frame, tensor)
        for frame in frames
        if frame.module == ""
        for tensor in frame.inputs
        if is_minus_inf_mask(tensor)
    ]
    mended = False
    for number, frame in enumerate(frames):
        found = _judge(frame, before)
        if found is not None:
            if found.kind is BadKind.BETWEEN:
                given = [pair for pair in given if not mended or _same_places(pair[1], found.tensor)]
                # what passed for a mask until a module computed with it
                given += [
                    pair
                    for pair in masks
                    if pair[1].shape == found.tensor.shape and _same_places(pair[1], found.tensor)
                ]
            if given and found.kind is BadKind.BETWEEN:
                # the batch itself: its place in the call of the whole model says more than where it was met first
                return FirstBad(kind=BadKind.DATA, frame=given[0][0], tensor=given[0][1])
            return _where_mask_was_made(frames[:number], found) or found
        before = frame
        mended = mended or any(tensor.is_bad and not is_minus_inf_mask(tensor) for tensor in frame.inputs)
    return None


def _where_mask_was_made(frames: tuple[Frame, ...], found: FirstBad) -> FirstBad | None:
    """The last call whose output passed for a mask and that was given none, where a module was then handed that output as a
    value; None where no module made it."""
    if found.kind is not BadKind.BETWEEN or not is_minus_inf_mask(found.tensor):
        return None
    for number, frame in reversed(tuple(enumerate(frames))):
        for tensor in frame.outputs:
            made = is_minus_inf_mask(tensor) and not any(each.is_bad for each in frame.inputs)
            if made and tensor.shape == found.tensor.shape and _same_places(tensor, found.tensor):
                before = frames[number - 1] if number else None
                return FirstBad(kind=BadKind.MODULE, frame=frame, tensor=tensor, before=before)
    return None


def _same_places(batch: TensorStats, met: TensorStats) -> bool:
    """Whether as many elements are bad as in the batch, of which a module before has made finite values."""
    return (batch.nan, batch.posinf + batch.neginf) == (met.nan, met.posinf + met.neginf)


def _judge(frame: Frame, before: Frame | None) -> FirstBad | None:
    """What is wrong with one call, given that all calls before it were right; None: nothing."""
    for tensor in frame.weights:
        if tensor.is_bad:
            return FirstBad(kind=BadKind.WEIGHT, frame=frame, tensor=tensor, before=before)
    for tensor in _bad_inputs(frame):
        return FirstBad(kind=BadKind.BETWEEN, frame=frame, tensor=tensor, before=before)
    bad = [tensor for tensor in frame.outputs if tensor.is_bad and not _is_output_mask(frame, tensor)]
    if not bad:
        return None
    is_loss = frame.module == "" and all(tensor.shape == () for tensor in bad)
    return FirstBad(kind=BadKind.LOSS if is_loss else BadKind.MODULE, frame=frame, tensor=bad[0], before=before)


def _bad_inputs(frame: Frame) -> tuple[TensorStats, ...]:
    """Inputs that are bad and are no masks. They do not count where the module's outputs are finite all the same: it fills in
    what is missing, or does not read it."""
    bad = tuple(tensor for tensor in frame.inputs if tensor.is_bad and not _is_input_mask(frame, tensor))
    return () if _is_finite(frame) else bad


def _is_input_mask(frame: Frame, tensor: TensorStats) -> bool:
    return is_minus_inf_mask(tensor) and not _is_value(frame, tensor)


def _is_value(frame: Frame, tensor: TensorStats) -> bool:
    """Whether a module computes with the -inf of an input as with other values, by what it does with its first one: it has
    weights for it, or nan comes of more elements than were -inf. A softmax leaves out what is masked, and makes nan of a row
    that is -inf as a whole; a mask for a module with weights comes behind what the weights are for."""
    if tensor is not frame.inputs[0]:
        return False
    spread = any(output.shape == tensor.shape and output.nan > tensor.neginf for output in frame.outputs)
    return spread or bool(frame.weights)


def has_mask(frame: Frame) -> bool:
    """Whether a call was given a mask of -inf."""
    return any(_is_input_mask(frame, tensor) for tensor in frame.inputs)


def _is_output_mask(frame: Frame, tensor: TensorStats) -> bool:
    return is_minus_inf_mask(tensor) and not frame.weights


def _is_finite(frame: Frame) -> bool:
    """Whether all outputs that were measured are finite, or masks."""
    return bool(frame.outputs) and not any(
        tensor.is_bad and not _is_output_mask(frame, tensor) for tensor in frame.outputs
    )


def _in_backward(frames: Iterable[Frame]) -> FirstBad | None:
    before: Frame | None = None
    for frame in frames:
        for tensor in frame.measured:
            if tensor.is_bad:
                return FirstBad(kind=BadKind.GRADIENT, frame=frame, tensor=tensor, before=before)
        before = frame
    return None


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of the batch that overflowed.

    ``named``: bad gradients after reduction, those parts that this rank holds. ``local``: this rank's own gradients in
    the replay, bad ones first. ``at_scale_one``: the same replayed with scale 1; None: not done. ``origin``: what made the
    first bad value. ``received``: it came from another rank, by this operation: a consequence. ``minus_inf``: what made the
    -inf that the operation was given. ``held``: the bad value came out of a tensor that was bad before the batch, or, where there
    is an ``origin``, the -inf did. ``frames``: the last ones up to the first bad call. ``unmeasured``: calls of the replay
    with a tensor that could not be measured. ``replayed``: how far the replay went, in words. ``differs_from_live``: it showed
    something else than the step itself. ``applied``: DeepSpeed applies the step all the same.
    ``weight_bad_since``: the first step that is known to have a bad weight; None: bad from the start.
    ``loss_line``: where a loss outside of the model became bad; ``loss_made``: the operation that its graph shows.
    ``began_bad``: the gradients with which the model's backward began were bad already, so what comes between it and the loss made
    them; ``loss_backward``: the operation there that did, where its backward was watched.
    ``loss_gradient``: the gradient that arrived at the loss.
    ``loss_gradient_due``: what should have arrived there, the loss scale over the accumulation steps. ``not_loaded``: the
    folder from which no checkpoint was loaded. ``unchanged``: weights that a step left as they were, in two checks.
    ``inputs``: how large the inputs of the first bad module were in earlier steps, of which level frames knows some.
    ``bad_tensors``: buffers, weights and attributes that hold nan or inf, looked for where a loss is bad and nothing is replayed.
    ``accumulation``: micro-batches of a step, 0 where not known. ``engine``: which one it is, in a process with several.
    ``evaluation``: the forward had no gradients; in which words. ``bad_applied``: the first step since the
    last clean one that DeepSpeed is known to have applied with gradients that were not finite.
    ``frozen``: the bad weight has no gradient, so no optimizer writes it.
    ``zero_over_zero``: bad elements of the optimizer's weights here, if its eps is 0 and all of them have a second moment of 0.
    ``again``: steps before went wrong too and were replayed, and this one is not.
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
    bad_tensors: tuple[TensorStats, ...] = ()
    skipped: int = 0
    applied: bool = False
    named: tuple[TensorStats, ...] = ()
    local: tuple[TensorStats, ...] = ()
    at_scale_one: tuple[TensorStats, ...] | None = None
    first_bad: FirstBad | None = None
    origin: Origin | None = None
    received: Origin | None = None
    loss_line: str = ""
    loss_made: Origin | None = None
    began_bad: bool = False
    loss_backward: Origin | None = None
    not_loaded: str = ""
    unmeasured: tuple[str, ...] = ()
    flushed: Flushed | None = None
    vanished: Vanished | None = None
    unchanged: tuple[tuple[str, float], ...] = ()
    minus_inf: Origin | None = None
    held: Held | None = None
    frames: tuple[Frame, ...] = ()
    replayed: str = ""
    differs_from_live: bool = False
    weight_bad_since: int | None = None
    loss_gradient: float | None = None
    loss_gradient_due: float | None = None
    tried: tuple[Tried, ...] = ()
    growth: tuple[Growth, ...] = ()
    inputs: tuple[Growth, ...] = ()
    rates: tuple[tuple[int, float, float], ...] = ()
    rows: str = ""
    ignored: str = ""
    bad_output: bool = False
    other_loss: bool = False
    accumulation: int = 0
    engine: str = ""
    evaluation: str = ""
    bad_applied: int | None = None
    frozen: bool = False
    zero_over_zero: int = 0
    again: bool = False
