"""Which tensors are attention masks: what a mask is filled with is no overflow, and no value of the model. Without torch."""

from dsdoctor.overflow.frames.dtypes import LIMITS, limit_of
from dsdoctor.overflow.frames.frame import TensorStats

MASK_REST = 1 / 16
"""-inf beside values below this part of the dtype's limit is a mask: a value that overflowed to -inf has neighbours near the
limit, or is a channel of a Linear (for that reason ``first_bad`` takes no output of a module with weights for a mask)."""
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
