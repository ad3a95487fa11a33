"""A tensor's row of eight int64: which memory of a tensor is measured, and the row by torch's operations alone.

The first five columns are counts. The other three are keys (see ``frames/frame.py``), which are ordered like the absolute values:
maxima and minima are exact in every dtype, also beside a nan. torch's operations serve devices without a kernel and installs
without a compiler: as exact as the kernels, and slower, since they make temporaries. Never communicates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dsdoctor.overflow.frames.frame import FORMATS, Format

COLUMNS = 8
NAN, POSINF, NEGINF, ZEROS, SUBNORMAL, ABSMAX, ABSMIN, MINNZ = range(COLUMNS)
# What a minimum starts from: rows are merged with max, min and +. Meter.read() turns it into -1, "there is none".
UNSET = (1 << 63) - 1
BLANK = (0, 0, 0, 0, 0, -1, UNSET, UNSET)
# fp8 types came with different releases of torch
FORMAT_OF: dict[torch.dtype, Format] = {
    getattr(torch, form.name): form for form in FORMATS if hasattr(torch, form.name)
}
PLAIN = frozenset({Tensor, torch.nn.Parameter})
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_NO_DISPATCH = Tensor.__torch_dispatch__
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def measurable(tensor: object) -> bool:
    """Whether ``Meter.scan`` would measure it: it is a tensor that has floating point or complex elements in memory."""
    return measured_view(tensor) is not None


def measured_view(tensor: object) -> Tensor | None:
    """The elements that are measured, as a plain, strided, non-empty tensor of a format in dtypes.FORMATS.

    A view, but for conjugated and negated views, which are copied. Sparse and nested tensors give their values, a DTensor
    its local part, complex numbers their real and imaginary parts (a last dimension of two). None for what is no tensor,
    empty, bool, integer, quantised, packed, and for what has no memory: meta, fake, wrapped by torch.func, not yet
    initialised.
    """
    if not isinstance(tensor, Tensor) or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return None
    try:
        plain = _values(_unwrapped(tensor))
        if plain is None or plain.is_meta or plain.numel() == 0:
            return None
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj().resolve_neg())
        if plain.is_neg():
            plain = plain.resolve_neg()
        # a tensor of torch.func raises here, a zero that was never made has no address
        return plain if plain.dtype in FORMAT_OF and plain.data_ptr() else None
    except (
        RuntimeError,
        NotImplementedError,
    ):  # wrappers of torch.func and foreign layouts have no memory that could be read
        return None


def _unwrapped(tensor: Tensor) -> Tensor | None:
    """Without its class; of the classes with a dispatch of their own only two are known to hold plain memory."""
    kind = type(tensor)
    if kind in PLAIN:
        return tensor
    if kind.__torch_dispatch__ is _NO_DISPATCH:
        return None if is_lazy(tensor) else tensor.as_subclass(Tensor)
    if kind.__name__ == "DTensor":
        local = getattr(tensor, "_local_tensor", None)  # to_local() may wait for others
        return local if isinstance(local, Tensor) and type(local) in PLAIN else None
    if tensor.layout is torch.jagged:
        values = tensor.values()
        return values if type(values) in PLAIN else None
    return None


def _values(tensor: Tensor | None) -> Tensor | None:
    """The strided tensor that holds the values."""
    if tensor is None:
        return None
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in _COMPRESSED or tensor.is_nested:
        return tensor.values()
    return tensor if tensor.layout is torch.strided else None


def keys(view: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """The elements as signed integers, and their keys, in an integer type that holds both."""
    raw = view.view(INTEGER[form.bytes])
    if form.bytes == 1:
        raw = raw.to(torch.int16)
    key = raw & form.mask
    return raw, torch.where(raw == -form.limit, form.limit, key) if form.fnuz else key


def nonfinite(view: Tensor) -> Tensor:
    """Whether a nan or an inf is there: a bool scalar on the device."""
    form = FORMAT_OF[view.dtype]
    return (keys(view, form)[1] >= form.limit).any()


def reduced(view: Tensor, form: Format) -> Tensor:
    """The row of a view of any strides, without a sync (on the CPU, where looking is free, with a short cut)."""
    once, factor = _once(view)
    raw, key = keys(once, form)
    if key.is_cpu:
        low, high = (int(each) for each in torch.aminmax(key))
        if low >= form.normal and high < form.limit:
            return torch.tensor([0, 0, 0, 0, 0, high, low, low], dtype=torch.int64)
    return _row(raw, key, form, factor)


def _once(view: Tensor) -> tuple[Tensor, int]:
    """Without the dimensions that repeat the same memory, and how often each element was repeated."""
    factor = 1
    for dim in reversed(range(view.dim())):
        if view.stride(dim) == 0:
            factor *= view.shape[dim]
            view = view.select(dim, 0)
    return view, factor


def _row(raw: Tensor, key: Tensor, form: Format, factor: int) -> Tensor:
    """Counts and extremes; arithmetic that wraps, where ``torch.where`` would take five times as long on a CPU."""
    none = torch.iinfo(key.dtype).max  # no finite key, and no key of 8 bits at all
    infinity = none if form.infinity is None else form.infinity
    nonfinite, plus = torch.count_nonzero(key >= form.limit), torch.count_nonzero(raw == infinity)
    infinite, below = torch.count_nonzero(key == infinity), torch.count_nonzero(key < form.normal)
    zeros = torch.count_nonzero(key == 0) if form.zero else torch.zeros_like(below)
    counts = torch.stack((nonfinite - infinite, plus, infinite - plus, zeros, below - zeros)) * factor
    room = none - form.limit + 1  # keys that are not finite wrap below zero
    high = ((key + room).amax().long() - room).clamp(min=-1)
    least = ((key - 1) & none).amin() + 1 if form.zero else key.amin()  # zero wraps to the largest
    lows = torch.stack((key.amin().long(), least.long()))
    return torch.cat((counts, high[None], torch.where((lows < 0) | (lows >= form.limit), UNSET, lows)))
