"""What one rank can tell of a bad step: plain data that travels between ranks and into the report. Knows no torch."""

import msgspec

from dsdoctor.overflow.frames.first_bad import Culprit
from dsdoctor.overflow.frames.frame import Frame, TensorStats


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The first operation whose result was not finite. ``line``: the file, line and text that called it."""

    op: str
    line: str


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The loss scale that was in force. ``floor``: it will not go below; None: it is not dynamic."""

    value: float = 1.0
    floor: float | None = None


class Account(msgspec.Struct, frozen=True, kw_only=True):
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
    culprit: Culprit | None = None
    origin: Origin | None = None
    minus_inf: Origin | None = None
    frames: tuple[Frame, ...] = ()
    replayed: str = ""
    weight_bad_since: int | None = None
    loss_gradient: float | None = None
    loss_gradient_due: float | None = None
