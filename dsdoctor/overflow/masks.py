"""Which extreme values are no activations: what attention masks are filled with."""

from dsdoctor.overflow.frames.first_bad import is_mask
from dsdoctor.overflow.frames.frame import LIMITS, TensorStats

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
