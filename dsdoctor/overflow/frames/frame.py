"""What was seen: one frame per call of a module, with the figures of every tensor. Data only; knows no torch."""

import enum

import msgspec


class CallPhase(enum.Enum):
    """When a frame was taken: while the module ran, or while its gradients flowed back."""

    FORWARD = "forward"
    BACKWARD = "backward"


class TensorStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tensor", tag_field="is"):
    """The figures of one tensor. ``absmin``, ``absmin_nonzero`` and ``absmax`` are of its finite elements; None: it has none.

    ``name``: its place in the call, such as ``weight``, ``input[0]``, ``input[mask]``, ``output[1][0]``, ``output.logits``.
    ``shape``: of the logical (for DTensor and sparse tensors: of the stored, local) tensor. ``count``: elements measured.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    count: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    subnormal: int = 0
    absmin: float | None = None
    absmin_nonzero: float | None = None
    absmax: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether it holds a nan or an inf.

        >>> TensorStats(name="output", dtype="float16", shape=(2,), nan=1).is_bad
        True
        """
        return bool(self.nan or self.posinf or self.neginf)

    @property
    def only_minus_inf(self) -> bool:
        """Whether all that is not finite is -inf, as in a mask."""
        return bool(self.neginf) and not self.nan and not self.posinf


def unscaled(stats: TensorStats, scale: float) -> TensorStats:
    """A gradient's figures without the loss scale that is in them.

    >>> unscaled(TensorStats(name="grad weight", dtype="float16", shape=(1,), absmax=512.0), 256.0).absmax
    2.0
    """
    least, nonzero, most = (figure and figure / scale for figure in (stats.absmin, stats.absmin_nonzero, stats.absmax))
    return msgspec.structs.replace(stats, absmin=least, absmin_nonzero=nonzero, absmax=most)


class Other(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="other", tag_field="is"):
    """A place in a call that holds no measured tensor. ``what``: ``None``, ``not a tensor``, or its dtype: ``int64``."""

    name: str
    what: str


Item = TensorStats | Other
BUFFER = "buffer "
"""How the name of a buffer begins among the tensors of a call."""
NOT_MEASURED = "not measured"
"""What ``Other.what`` says of a tensor that has figures which could not be read."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="frame", tag_field="t"):
    """One call of one module.

    ``batch``: the guide's number, calls of the whole model from 0. ``step``, ``micro``: optimizer step and micro-batch
    within it, from 0. ``order``: place in the sequence of frames of this rank and batch, from 0; children come before parents.
    ``call``: how many times this module had been called in this micro-batch. ``leaf``: has no child modules.
    ``after``: in the backward, the modules whose backward made the gradient. ``raised``: forward did not return.
    ``loss_scale``: the factor in the gradients; None: 1, or not known.
    """

    batch: int
    order: int
    module: str
    kind: str
    tensors: tuple[Item, ...]
    step: int = 0
    micro: int = 0
    rank: int = 0
    stage: int | None = None
    call: int = 0
    phase: CallPhase = CallPhase.FORWARD
    training: bool = True
    leaf: bool = True
    raised: bool = False
    after: tuple[str, ...] = ()
    loss_scale: float | None = None

    @property
    def measured(self) -> tuple[TensorStats, ...]:
        """The tensors among the items."""
        return tuple(item for item in self.tensors if isinstance(item, TensorStats))

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The places whose figures could not be read: nothing is known of them."""
        return tuple(item.name for item in self.tensors if isinstance(item, Other) and item.what == NOT_MEASURED)

    @property
    def inputs(self) -> tuple[TensorStats, ...]:
        """Measured inputs, positional and keyword."""
        return tuple(tensor for tensor in self.measured if tensor.name.startswith("input"))

    @property
    def outputs(self) -> tuple[TensorStats, ...]:
        """Measured outputs, however nested."""
        return tuple(tensor for tensor in self.measured if tensor.name.startswith("output"))

    @property
    def weights(self) -> tuple[TensorStats, ...]:
        """Measured parameters of the module itself."""
        other = ("input", "output", "grad", BUFFER)
        return tuple(tensor for tensor in self.measured if not tensor.name.startswith(other))

    @property
    def buffers(self) -> tuple[TensorStats, ...]:
        """Buffers of the module itself, which are read only where something is bad: after the call, which may have written them."""
        return tuple(tensor for tensor in self.measured if tensor.name.startswith(BUFFER))


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="header", tag_field="t"):
    """The first line of a trace: which program, rank and model wrote it, and in which version of the format."""

    schema: str
    dsdoctor: str
    rank: int = 0
    world: int = 1
    host: str = ""
    torch: str = ""
    deepspeed: str = ""
    zero_stage: int | None = None
    stage: int | None = None
    dtype: str = ""
    started: str = ""


class StepEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="t"):
    """The end of an optimizer step: DeepSpeed's decision. ``loss`` is a text: ``nan`` and ``inf`` are no JSON numbers."""

    step: int
    batch: int
    overflow: bool | None = None
    loss_scale: float | None = None
    loss: str = ""


Line = Header | Frame | StepEnd
