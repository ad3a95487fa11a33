"""What was seen: one frame per call of a module, with the figures of every tensor, in the formats of floating point, and as the
guide prints it. Data and text only; knows no torch.

A *key* is the unsigned integer view of an element with the sign cleared: keys are ordered like the absolute values.
"""

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

BUFFER = "buffer "
"""How the name of a buffer begins among the tensors of a call."""
NOT_MEASURED = "not measured"
"""What ``Other.what`` says of a tensor that has figures which could not be read."""
MASK_REST = 1 / 16
"""-inf beside values below this part of the dtype's limit is a mask: a value that overflowed to -inf has neighbours near the
limit, or is a channel of a Linear (for that reason ``first_bad`` takes no output of a module with weights for a mask)."""
PREFIX = " " * 17
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"


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


class Other(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="other", tag_field="is"):
    """A place in a call that holds no measured tensor. ``what``: ``None``, ``not a tensor``, or its dtype: ``int64``."""

    name: str
    what: str


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


Item = TensorStats | Other


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


Line = Header | Frame | StepEnd


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format. ``kind``: its number in scan.c. ``limit``: the first key that is not finite.

    ``infinity`` is None where the format has no inf, ``signed`` is False where it has no sign bit, ``fnuz`` means that the
    bits of minus zero are its only nan, ``zero`` is False for the format that has no zero.
    """

    name: str
    kind: int
    bytes: int
    mantissa: int
    bias: int
    limit: int
    infinity: int | None = None
    signed: bool = True
    fnuz: bool = False
    zero: bool = True

    @property
    def normal(self) -> int:
        """The smallest normal key; 0 where nothing is subnormal."""
        return 1 << self.mantissa if self.zero else 0

    @property
    def mask(self) -> int:
        """A bit mask that clears the sign."""
        return (1 << (8 * self.bytes - self.signed)) - 1


# In the order of KINDS in measure/scan.c.
FORMATS = (
    Format(name="float16", kind=0, bytes=2, mantissa=10, bias=15, limit=0x7C00, infinity=0x7C00),
    Format(name="bfloat16", kind=1, bytes=2, mantissa=7, bias=127, limit=0x7F80, infinity=0x7F80),
    Format(name="float32", kind=2, bytes=4, mantissa=23, bias=127, limit=0x7F800000, infinity=0x7F800000),
    Format(name="float64", kind=3, bytes=8, mantissa=52, bias=1023, limit=0x7FF << 52, infinity=0x7FF << 52),
    Format(name="float8_e4m3fn", kind=4, bytes=1, mantissa=3, bias=7, limit=0x7F),
    Format(name="float8_e5m2", kind=5, bytes=1, mantissa=2, bias=15, limit=0x7C, infinity=0x7C),
    Format(name="float8_e4m3fnuz", kind=6, bytes=1, mantissa=3, bias=8, limit=0x80, fnuz=True),
    Format(name="float8_e5m2fnuz", kind=7, bytes=1, mantissa=2, bias=16, limit=0x80, fnuz=True),
    Format(name="float8_e8m0fnu", kind=8, bytes=1, mantissa=0, bias=127, limit=0xFF, signed=False, zero=False),
)
BY_NAME = {form.name: form for form in FORMATS}


def decode(bits: int, dtype: str) -> float:
    """The absolute value that a key stands for; nan for -1 ("there is none"). KeyError for a dtype that is not measured.

    >>> decode(0x7BFF, "float16"), decode(0x0001, "bfloat16"), decode(0x7E, "float8_e4m3fn")
    (65504.0, 9.183549615799121e-41, 448.0)
    >>> decode(0x7C00, "float16"), decode(0x7FC0, "bfloat16"), decode(-1, "float32")
    (inf, nan, nan)
    """
    form = BY_NAME[dtype]
    if not 0 <= bits < form.limit:
        return math.inf if bits == form.infinity else math.nan
    exponent, fraction = divmod(bits, 1 << form.mantissa)
    if exponent or not form.zero:
        fraction += 1 << form.mantissa
    else:
        exponent = 1
    return math.ldexp(fraction, exponent - form.bias - form.mantissa)


def limit(dtype: str) -> float:
    """The largest finite number of a dtype.

    >>> limit("float16"), limit("float8_e5m2"), limit("float8_e4m3fnuz")
    (65504.0, 57344.0, 240.0)
    """
    return decode(BY_NAME[dtype].limit - 1, dtype)


def smallest_normal(dtype: str) -> float:
    """The smallest number of a dtype with all its precision; what is smaller, but not zero, is subnormal.

    >>> smallest_normal("float16") == 2**-14, smallest_normal("float8_e8m0fnu") == 2**-127
    (True, True)
    """
    return decode(BY_NAME[dtype].normal, dtype)


def smallest(dtype: str) -> float:
    """The smallest number of a dtype above zero; half of it, and what is smaller, rounds to zero.

    >>> smallest("float16") == 2**-24, smallest("float8_e4m3fn") == 2**-9
    (True, True)
    """
    return decode(1, dtype)


LIMITS = {form.name: limit(form.name) for form in FORMATS if form.zero}
"""The largest finite value of each dtype that activations have (IEEE 754; OCP 8-bit floating point specification for fp8)."""
SMALLEST_NORMAL = {name: smallest_normal(name) for name in LIMITS}
"""Below it precision fades (IEEE 754; OCP 8-bit floating point specification; ONNX for the fnuz formats)."""
UNIT_ROUNDOFF = {name: 2.0 ** -(BY_NAME[name].mantissa + 1) for name in LIMITS}
"""Half the distance from 1 to the next number (Higham, Accuracy and Stability of Numerical Algorithms, table 2.1)."""


def limit_of(dtype: str) -> float:
    """The largest finite value of a dtype, and float32's for one that has no entry in ``LIMITS``, such as complex64."""
    return LIMITS.get(dtype, LIMITS["float32"])


def headroom_bits(absmax: float | None, dtype: str) -> float | None:
    """How many times the largest value may double before it overflows its dtype. None: nothing to go by.

    >>> headroom_bits(1023.5, "float16")
    6.0
    """
    largest = LIMITS.get(dtype)
    if not absmax or largest is None or not math.isfinite(absmax):
        return None
    return math.log2(largest / absmax)


def unscaled(stats: TensorStats, scale: float) -> TensorStats:
    """A gradient's figures without the loss scale that is in them.

    >>> unscaled(TensorStats(name="grad weight", dtype="float16", shape=(1,), absmax=512.0), 256.0).absmax
    2.0
    """
    least, nonzero, most = (figure and figure / scale for figure in (stats.absmin, stats.absmin_nonzero, stats.absmax))
    return msgspec.structs.replace(stats, absmin=least, absmin_nonzero=nonzero, absmax=most)


# torch.finfo(dtype).min is the usual filling, and some models halve it. An activation that is so near 3.4e38 is not finite one
# operation later, so a quarter is safe there.
FILLINGS = {name: LIMITS[name] / 4 for name in ("float64", "float32", "bfloat16")} | {"float16": LIMITS["float16"]}
"""A tensor whose largest value is at least this is a mask. fp8 has no entry, because it saturates at its limit."""


def is_minus_inf_mask(tensor: TensorStats) -> bool:
    """Whether a tensor is a mask filled with -inf: nothing else in it is not finite, and its other values are small."""
    return tensor.only_minus_inf and tensor.absmax is not None and tensor.absmax <= MASK_REST * limit_of(tensor.dtype)


def is_mask(tensor: TensorStats) -> bool:
    """Whether a tensor is a mask, filled with -inf or with the lowest number of its dtype.

    >>> is_mask(TensorStats(name="input[mask]", dtype="float32", shape=(2,), absmax=3.4028234663852886e38))
    True
    >>> is_mask(TensorStats(name="input[mask]", dtype="float16", shape=(2,), neginf=6, absmax=0.0))
    True
    >>> is_mask(TensorStats(name="output", dtype="float16", shape=(2,), posinf=6, absmax=65504.0))
    False
    """
    if tensor.neginf and is_minus_inf_mask(tensor):
        return True
    filling = FILLINGS.get(tensor.dtype)
    if filling is None or tensor.absmax is None or tensor.absmax < filling:
        return False
    return not tensor.nan and not tensor.posinf


def starting(batch: int) -> str:
    """The two lines that open a batch, after two blank ones."""
    return f"\n\n{PREFIX} *** Starting batch number={batch} ***\n{COLUMNS}"


def lines(frame: Frame) -> Iterator[str]:
    """The lines of one frame."""
    yield f"{PREFIX} {frame.module} {frame.kind}"
    yield from (item_line(item) for item in frame.tensors)
    if frame.raised:
        yield f"{'raised':>17} forward"


def item_line(item: Item) -> str:
    """One line: abs min, abs max and the place. A nan hides both figures, an inf is the largest, as in the guide.

    >>> from dsdoctor.overflow.frames.frame import TensorStats
    >>> item_line(TensorStats(name="input[0]", dtype="float16", shape=(2,), count=2, absmin=0.00026, absmax=62700.0))
    '2.60e-04 6.27e+04 input[0]'
    >>> item_line(TensorStats(name="output", dtype="float16", shape=(2,), count=2, absmin=0.0, absmax=9.0, posinf=1))
    '0.00e+00      inf output'
    >>> item_line(Other(name="output[1]", what="None"))
    '             None output[1]'
    """
    if isinstance(item, Other):
        return f"{item.what:>17} {item.name}"
    if item.count == 0:
        return f"{'empty':>17} {item.name}"
    infinite = item.posinf or item.neginf
    least = float("nan") if item.nan else float("inf") if item.absmin is None else item.absmin
    most = float("nan") if item.nan else float("inf") if infinite or item.absmax is None else item.absmax
    return f"{least:8.2e} {most:8.2e} {item.name}"


def text(frames: Iterable[Frame]) -> str:
    """Frames as the guide prints them; the first frame of a batch opens with the batch's two lines."""
    parts: list[str] = []
    for frame in frames:
        if frame.order == 0 and frame.phase is CallPhase.FORWARD:
            parts.append(starting(frame.batch))
        parts.extend(lines(frame))
    return "\n".join(parts)


def detected(batch: int, frames: tuple[Frame, ...]) -> str:
    """What the guide prints at a hit."""
    head = f"\nDetected inf/nan during batch_number={batch}\nLast {len(frames)} forward frames:\n{COLUMNS}\n"
    return head + text(frames) + "\n\n\n"


def first_words(frame: Frame) -> Iterator[str]:
    """What the guide prints as soon as it meets bad values: ``output has infs``."""
    for stats in frame.measured:
        if stats.nan:
            yield f"{stats.name} has nans"
        if stats.posinf or stats.neginf:
            yield f"{stats.name} has infs"
