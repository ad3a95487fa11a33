"""The row that one pass over a tensor leaves, and how its bits become numbers. Pure: no torch, no floating point traps.

A row is eight int64. A *key* is the unsigned integer view of an element with the sign cleared: keys are ordered like the
absolute values, so maxima and minima are exact in every format and a nan hides nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COLUMNS = 8
NAN, POSINF, NEGINF, ZEROS, SUBNORMAL, ABSMAX, ABSMIN, MINNZ = range(COLUMNS)
LAYOUT = ("nan", "posinf", "neginf", "zeros", "subnormal", "absmax", "absmin", "minnz")

# What a minimum starts from: rows are merged with max, min and +. Meter.read() turns it into -1, "there is none".
UNSET = (1 << 63) - 1
BLANK = (0, 0, 0, 0, 0, -1, UNSET, UNSET)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A floating point format: ``limit`` is the first key that is not finite, ``normal`` the smallest normal key.

    ``infinity`` is None where the format has no inf, ``signed`` is False where every bit is magnitude, ``fnuz`` means
    that the pattern of minus zero is the one nan, ``zero`` is False for the format that cannot say zero.
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
        """What clears the sign."""
        return (1 << (8 * self.bytes - self.signed)) - 1


# In the order of scan.c's KINDS.
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
BY_NAME = {each.name: each for each in FORMATS}


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


class Span(NamedTuple):
    """Memory of a strided tensor: ``runs`` stretches of ``inner`` elements, ``pitch`` elements from start to start.

    Each element stands for ``factor`` equal ones of the logical tensor.
    """

    inner: int
    runs: int = 1
    pitch: int = 0
    factor: int = 1


def span(shape: Sequence[int], stride: Sequence[int]) -> Span | None:
    """The memory behind a shape and its strides, in elements; None if it is not that regular (then copy the tensor).

    >>> span((4, 8, 2), (2, 8, 1))  # a permuted tensor is dense
    Span(inner=64, runs=1, pitch=0, factor=1)
    >>> span((2, 5, 64), (960, 192, 1))  # one part of a split
    Span(inner=64, runs=10, pitch=192, factor=1)
    >>> span((3, 16), (0, 1))  # expanded
    Span(inner=16, runs=1, pitch=0, factor=3)
    >>> span((4, 4), (1, 1)) is None  # overlapping windows
    True
    """
    inner, runs, pitch, factor = 1, 1, 0, 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step == 0:
            factor *= size
        elif step == inner and runs == 1:
            inner *= size
        elif runs == 1 and step > inner:
            runs, pitch = size, step
        elif step == pitch * runs and runs > 1:
            runs *= size
        else:
            return None
    return Span(inner, runs, pitch, factor)
