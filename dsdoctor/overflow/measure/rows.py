"""The row of eight int64 that one pass over a tensor writes, and the memory such a pass reads. Without torch.

The first five columns are counts. The other three are keys (see ``frames/dtypes.py``), which are ordered like the absolute
values: maxima and minima are exact in every dtype, also beside a nan.
"""

from collections.abc import Sequence
from typing import NamedTuple

COLUMNS = 8
NAN, POSINF, NEGINF, ZEROS, SUBNORMAL, ABSMAX, ABSMIN, MINNZ = range(COLUMNS)

# What a minimum starts from: rows are merged with max, min and +. Meter.read() turns it into -1, "there is none".
UNSET = (1 << 63) - 1
BLANK = (0, 0, 0, 0, 0, -1, UNSET, UNSET)


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
