"""The floating point formats: how the bits of each become a number, its limits and its precision. Without torch.

A *key* is the unsigned integer view of an element with the sign cleared: keys are ordered like the absolute values.
"""

import math
from dataclasses import dataclass


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
