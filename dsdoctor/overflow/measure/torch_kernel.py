"""A tensor's row by torch operations alone: for devices without a kernel, and for installs without a compiler.

A plain view goes in, int64 [8] on its device comes out, as exact as the kernels; slower, since it makes temporaries.
"""

import torch
from torch import Tensor

from dsdoctor.overflow.frames.dtypes import Format
from dsdoctor.overflow.measure.rows import UNSET
from dsdoctor.overflow.measure.views import FORMAT_OF

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
