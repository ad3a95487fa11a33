"""What a row must say, by Python's floats, element for element."""

import math

import torch
from torch import Tensor

from dsdoctor.overflow.frames.frame import decode, smallest_normal


def truth(tensor: Tensor) -> tuple[float | None, ...]:
    """nan, +inf, -inf, zeros, subnormals, abs max, abs min, smallest non-zero, all of them by Python's floats."""
    values = tensor.detach().double().flatten().tolist()
    sizes = [abs(value) for value in values if math.isfinite(value)]
    normal = smallest_normal(str(tensor.dtype)[6:])
    return (
        sum(math.isnan(value) for value in values),
        values.count(math.inf),
        values.count(-math.inf),
        sizes.count(0.0),
        sum(0 < size < normal for size in sizes),
        max(sizes, default=None),
        min(sizes, default=None),
        min((size for size in sizes if size), default=None),
    )


def numbers(row: list[int], dtype: torch.dtype) -> tuple[float | None, ...]:
    return (*row[:5], *(None if bits == -1 else decode(bits, str(dtype)[6:]) for bits in row[5:]))


def planted(*shape: int) -> Tensor:
    tensor = torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)
    flat = tensor.view(-1)
    flat[0], flat[1], flat[2], flat[-1] = math.nan, math.inf, -math.inf, 1e-40
    return tensor
