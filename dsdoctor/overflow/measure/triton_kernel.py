"""The Triton kernel: reads each element of a tensor once and merges its row into the ring. No sync, no float arithmetic.

Nothing is tuned at run time: a launch costs the host 5 to 10 us (an estimate), and every program ends in a few relaxed
atomics. Runs in Triton's interpreter too (``TRITON_INTERPRET=1``), which is how it is tested without a GPU.
"""

# Triton is neither typed nor always there.
# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def,unused-ignore"

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsdoctor.overflow.frames.frame import Format
from dsdoctor.overflow.measure.rows import COLUMNS, INTEGER, UNSET, Span

VECTOR_BYTES = 16  # what a thread loads at once
VECTORS_PER_THREAD = 4  # in flight; half as many for 8 bits: 64 keys a thread spill
WARPS = 4
PROGRAMS_PER_PROCESSOR = 4
INTERPRETED_PROGRAMS = 3
ARGUMENTS = ("row", "numel", "inner", "pitch", "factor")  # a new kernel for each lucky number would be compiled


@triton.jit
def _fold(raw, valid, high, low, least, nans, plus, minus, zeros, tiny, FORM: tl.constexpr):
    """Fold a tile of raw integers [rows, lanes] into the state [rows]. Only a tile with something odd is counted."""
    MASK: tl.constexpr = FORM[0]
    LIMIT: tl.constexpr = FORM[1]
    INF: tl.constexpr = FORM[2]
    NORMAL: tl.constexpr = FORM[3]
    ZERO: tl.constexpr = FORM[4]
    FNUZ: tl.constexpr = FORM[5]
    NONE: tl.constexpr = FORM[6]
    value = raw.to(high.dtype)
    key = value & MASK
    if FNUZ:
        key = tl.where(value == -LIMIT, LIMIT, key)
    top = tl.max(key, 1)
    bottom = tl.min(key, 1)
    small = bottom
    odd = (top >= LIMIT) | (bottom < NORMAL)
    if tl.max(odd.to(tl.int32), 0) > 0:
        bad = key >= LIMIT
        infinite = valid & (key == INF)
        top = tl.max(tl.where(bad, -1, key), 1)
        bottom = tl.min(tl.where(bad, NONE, key), 1)
        small = tl.min(tl.where(bad | (key < ZERO), NONE, key), 1)
        nans += tl.sum((valid & bad & (key != INF)).to(tl.int32), 1)
        plus += tl.sum((infinite & (value >= 0)).to(tl.int32), 1)
        minus += tl.sum((infinite & (value < 0)).to(tl.int32), 1)
        zeros += tl.sum((valid & (key < ZERO)).to(tl.int32), 1)
        tiny += tl.sum((valid & (key >= ZERO) & (key < NORMAL)).to(tl.int32), 1)
    high = tl.maximum(high, top)
    low = tl.minimum(low, bottom)
    least = tl.minimum(least, small)
    return high, low, least, nans, plus, minus, zeros, tiny


@triton.jit
def _add(place, counts, factor):
    total = tl.sum(counts.to(tl.int64), 0)
    if total > 0:
        tl.atomic_add(place, total * factor, sem="relaxed")


@triton.jit
def _merge(place, high, low, least, nans, plus, minus, zeros, tiny, factor, NONE: tl.constexpr):
    """What one program found, into the row that all of them share."""
    _add(place, nans, factor)
    _add(place + 1, plus, factor)
    _add(place + 2, minus, factor)
    _add(place + 3, zeros, factor)
    _add(place + 4, tiny, factor)
    most = tl.max(high, 0).to(tl.int64)
    if most >= 0:
        tl.atomic_max(place + 5, most, sem="relaxed")
        tl.atomic_min(place + 6, tl.min(low, 0).to(tl.int64), sem="relaxed")
    some = tl.min(least, 0)
    if some < NONE:
        tl.atomic_min(place + 7, some.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=ARGUMENTS)
def _scan(data, ring, row, numel, inner, pitch, factor, FORM: tl.constexpr, STRIDED: tl.constexpr, WIDE: tl.constexpr,
          ROWS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Programs take tiles [ROWS, LANES] in turn. STRIDED: LANES elements always lie in one run; pitch is in elements."""
    index_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    key_type: tl.constexpr = tl.int64 if data.dtype.element_ty == tl.int64 else tl.int32
    NONE: tl.constexpr = FORM[6]
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.arange(0, ROWS).to(index_type)
    step = tl.full([1], ROWS, index_type)
    lanes = tl.arange(0, LANES)[None, :]
    high = tl.full([ROWS], -1, key_type)
    low = tl.full([ROWS], NONE, key_type)
    least = low
    nans = tl.zeros([ROWS], tl.int32)
    plus, minus, zeros, tiny = nans, nans, nans, nans
    tiles = (numel // (ROWS * LANES)).to(tl.int32)
    for tile in range(program, tiles, programs):
        start = (rows + step * tile) * LANES
        if STRIDED:
            run = start // inner
            start = tl.multiple_of(run.to(tl.int64) * pitch + (start - run * inner), LANES)
        raw = tl.load(data + start[:, None] + lanes)
        high, low, least, nans, plus, minus, zeros, tiny = _fold(
            raw, raw == raw, high, low, least, nans, plus, minus, zeros, tiny, FORM)  # fmt: skip
    if program == tiles % programs:  # noqa: SIM102
        if numel % (ROWS * LANES) > 0:
            index = ((rows + step * tiles) * LANES)[:, None] + lanes
            there = tl.minimum(index, (numel - 1).to(index_type))  # repeats the last one, which changes no extreme
            if STRIDED:
                run = there // inner
                there = run.to(tl.int64) * pitch + (there - run * inner)
            raw = tl.load(data + there)
            high, low, least, nans, plus, minus, zeros, tiny = _fold(
                raw, index < numel, high, low, least, nans, plus, minus, zeros, tiny, FORM)  # fmt: skip
    _merge(ring + row.to(tl.int64) * COLUMNS, high, low, least, nans, plus, minus, zeros, tiny, factor, NONE)


def constants(form: Format, place: Span) -> dict[str, Any]:
    """What a kernel is compiled for: the format, and how the memory lies."""
    lanes = VECTOR_BYTES // form.bytes
    strided = place.runs > 1
    rows = 32 * WARPS * VECTORS_PER_THREAD // (2 if form.bytes == 1 else 1)
    if strided and (place.inner % lanes or place.pitch % lanes):
        lanes, rows = 1, 2 * rows
    none = UNSET if form.bytes == 8 else 0x7FFFFFFF
    infinity = -1 if form.infinity is None else form.infinity
    return {
        "FORM": (form.mask, form.limit, infinity, form.normal, int(form.zero), form.fnuz, none),
        "STRIDED": strided,
        "WIDE": place.inner * place.runs >= 1 << 30,  # the last tile reaches beyond
        "ROWS": rows,
        "LANES": lanes,
        "COLUMNS": COLUMNS,
    }


def launch(view: Tensor, place: Span, form: Format, ring: Tensor, row: int) -> None:
    """Queue one pass over the memory that starts at ``view`` and lies as ``place`` says; merges into ``ring[row]``."""
    fixed = constants(form, place)
    numel = place.inner * place.runs
    tiles = triton.cdiv(numel, fixed["ROWS"] * fixed["LANES"])
    cap, guard = INTERPRETED_PROGRAMS, contextlib.nullcontext()
    if view.is_cuda:
        cap = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(view.device).multi_processor_count
        if view.device.index != torch.cuda.current_device():
            guard = torch.cuda.device(view.device)  # type: ignore[assignment]
    with guard:
        _scan[(min(cap, tiles),)](
            view.view(INTEGER[form.bytes]), ring, row, numel, place.inner, place.pitch, place.factor,
            **fixed, num_warps=WARPS, enable_fp_fusion=False)  # fmt: skip
