"""One pass over a tensor into a row of int64 (rows.py) on the tensor's own device: tensors go in, rows come out.

Never copies to the host before ``read``, never communicates, never records autograd nodes; call it under no_grad. On the
CPU the pass is C (``_scan``, built when the package is installed), on CUDA and ROCm one Triton kernel; where either is
missing, and on other devices, it is a handful of torch operations with the same result. ``Meter.backend`` says which.
"""

import functools
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from dsdoctor.overflow.measure.rows import (
    ABSMAX,
    ABSMIN,
    BLANK,
    COLUMNS,
    FORMAT_OF,
    NEGINF,
    PLAIN,
    POSINF,
    UNSET,
    Span,
    measurable,
    measured_view,
    nonfinite,
    reduced,
    span,
)

try:
    from dsdoctor.overflow.measure._scan import scan as _scan
    from dsdoctor.overflow.measure._scan import scan_span as _scan_span
except ImportError:  # no compiler at installation
    HAS_C = False
else:
    HAS_C = True

__all__ = [
    "Meter",
    "backend_of",
    "bad_rows",
    "blank",
    "blank_",
    "flag",
    "measurable",
    "measured_view",
    "scan_into",
    "settled",
    "why_no_kernel",
]

ROW_BYTES = 8 * COLUMNS
CHUNK_ROWS = 8192
MIN_RUN_BYTES = 256  # on the CPU a copy gathers shorter runs faster than a scan of each
_KIND_OF = {dtype: form.kind for dtype, form in FORMAT_OF.items()}


def backend_of(device: torch.device) -> str:
    """What measures on a device: "c", "triton" or "torch"."""
    if device.type == "cpu":
        return "c" if HAS_C else "torch"
    return "torch" if device.type != "cuda" or why_no_kernel(device) else "triton"


@functools.cache
def why_no_kernel(device: torch.device) -> str:
    """Why the Triton kernel does not measure on a device, by one trial in a process; empty: it does, and measures right.

    Triton compiles when it first runs, for which it needs a C compiler and Python's headers.
    """
    if "triton" not in sys.modules and find_spec("triton") is None:
        return "Triton is not installed"
    tried = torch.tensor([1.0, -2.0, float("nan"), 0.0], device=device)
    form = FORMAT_OF[tried.dtype]
    ring = blank(1, device)
    try:
        from dsdoctor.overflow.measure.triton_kernel import launch

        launch(tried, Span(tried.numel()), form, ring, 0)
        right = torch.equal(settled(ring)[0], settled(reduced(tried, form)[None])[0])
    except Exception as error:  # whatever a compiler, a driver or a broken installation raises
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return "" if right else "its figures of four numbers are wrong"


def blank(rows: int, device: torch.device) -> Tensor:
    """``rows`` empty rows, int64 [rows, 8]: what ``scan_into`` merges into."""
    with torch.inference_mode(mode=False):
        return torch.tensor(BLANK, dtype=torch.int64, device=device).repeat(rows, 1)


def blank_(ring: Tensor) -> Tensor:
    """Empty rows in place, without a sync."""
    for column, value in enumerate(BLANK[ABSMAX:], ABSMAX):
        ring[:, column] = value
    ring[:, :ABSMAX] = 0
    return ring


def bad_rows(rows: Tensor) -> list[int]:
    """The numbers of the rows, [n, 8] on the host, that have seen a nan or an inf."""
    return rows[:, : NEGINF + 1].any(dim=1).nonzero().flatten().tolist()


def flag(tensor: Tensor) -> Tensor:
    """Whether a nan or an inf is in it: a bool scalar on the tensor's device, no sync. For one small tensor, the loss."""
    view = measured_view(tensor)
    return torch.zeros((), dtype=torch.bool, device=tensor.device) if view is None else nonfinite(view)


class Meter:
    """The rows of one device. Rows are taken in order; ``rewind`` starts again with row 0 and keeps the memory.

    On CUDA everything is queued on the current stream: ``scan``, ``read`` and ``rewind`` want the same one, or streams
    that wait for each other.
    """

    def __init__(self, device: torch.device, *, backend: str | None = None) -> None:
        """``backend`` is for comparisons; ValueError if it cannot measure on that device."""
        best = backend_of(device)
        if backend not in (None, best, "torch"):
            raise ValueError(f"{backend} does not measure on {device}: {best} or torch")
        self.device = device
        self.backend = backend or best
        self.used = 0  # rows written since the last rewind
        self._chunks: list[Tensor] = []
        self._kinds = _KIND_OF if self.backend == "c" else {}
        self._full = 0  # the row that the current chunk has no room for
        self._address = 0  # where row 0 would be if the current chunk went so far back

    def scan(self, tensor: Tensor) -> int:
        """Measure a tensor, and return the number of its row, or -1 if there is nothing to measure on this device."""
        row = self.used
        if type(tensor) in PLAIN and row < self._full and tensor.is_cpu:
            kind = self._kinds.get(tensor.dtype, -1)
            try:
                data = tensor.data_ptr() if kind >= 0 and tensor.is_contiguous() else 0
            except RuntimeError:  # no strided memory
                data = 0
            count = tensor.numel() if data else 0
            if count:
                self.used = row + 1  # first: a large scan lets other threads run
                if _scan(data, count, kind, self._address + row * ROW_BYTES):
                    self._signs(tensor, row)
                return row
        return self._scan_any(tensor)

    def rewind(self) -> None:
        """Forget all rows; their memory is used again."""
        if self.backend == "triton":  # the kernel merges
            for start, chunk in zip(range(0, self.used, CHUNK_ROWS), self._chunks, strict=False):
                blank_(chunk[: self.used - start])
        self.used = 0
        self._enter(0)

    def read(self) -> Tensor:
        """The rows so far, int64 [used, 8] on the host, -1 where there is no such element: one copy, one sync."""
        parts = [
            chunk[: self.used - at * CHUNK_ROWS] for at, chunk in enumerate(self._chunks) if at * CHUNK_ROWS < self.used
        ]
        if not parts:
            return torch.empty(0, COLUMNS, dtype=torch.int64)
        return settled(torch.cat(parts))

    def _enter(self, row: int) -> None:
        """Make the chunk of a row the current one."""
        at = row // CHUNK_ROWS
        if at == len(self._chunks):
            self._chunks.append(blank(CHUNK_ROWS, self.device))
        self._full = (at + 1) * CHUNK_ROWS
        self._address = self._chunks[at].data_ptr() - at * CHUNK_ROWS * ROW_BYTES

    def _scan_any(self, tensor: Tensor) -> int:
        view = measured_view(tensor)
        if view is None:
            return -1
        row = self.used
        if row >= self._full:
            self._enter(row)
        ring = self._chunks[row // CHUNK_ROWS]
        if view.device != ring.device:
            return -1
        self.used = row + 1
        try:
            _write(view, ring, row % CHUNK_ROWS, self.backend, merge=False)
        except Exception:
            if self.backend != "triton":
                raise
            # the kernel is compiled anew for each format and layout, and any of that may fail
            blank_(ring[row % CHUNK_ROWS : row % CHUNK_ROWS + 1])
            self.backend = "torch"
            _write(view, ring, row % CHUNK_ROWS, self.backend, merge=False)
        return row

    def _signs(self, tensor: Tensor, row: int) -> None:
        """A lazily negated tensor holds the infs of the other sign."""
        if tensor.is_neg():
            chunk = self._chunks[row // CHUNK_ROWS]
            chunk[row % CHUNK_ROWS, [POSINF, NEGINF]] = chunk[row % CHUNK_ROWS, [NEGINF, POSINF]]


def settled(ring: Tensor) -> Tensor:
    """A host copy of rows in which -1 says "no such element"."""
    rows = ring.detach().to("cpu", copy=True)
    return rows.masked_fill_(rows == UNSET, -1)


def _write(view: Tensor, ring: Tensor, row: int, backend: str, *, merge: bool) -> None:
    """Measure a plain view into ``ring[row]``; the Triton kernel always merges."""
    form = FORMAT_OF[view.dtype]
    if backend == "torch":
        fresh = reduced(view, form)
        if merge:
            old = ring[row]
            counts, high = old[:ABSMAX] + fresh[:ABSMAX], torch.maximum(old[ABSMAX], fresh[ABSMAX])
            fresh = torch.cat((counts, high[None], torch.minimum(old[ABSMIN:], fresh[ABSMIN:])))
        ring[row].copy_(fresh)
        return
    place = Span(view.numel()) if view.is_contiguous() else span(view.shape, view.stride())
    if place is None or (backend == "c" and place.runs > 1 and place.inner * form.bytes < MIN_RUN_BYTES):
        view = view.contiguous()
        place = Span(view.numel())
    if backend == "c":
        target = ring.data_ptr() + row * ROW_BYTES
        _scan_span(view.data_ptr(), place.inner, place.runs, place.pitch, place.factor, form.kind, target, merge)
    else:
        from dsdoctor.overflow.measure.triton_kernel import launch  # Triton takes a second to import

        launch(view, place, form, ring, row)


def _into(tensor: Tensor, ring: Tensor, row: int) -> None:
    if ring.dtype != torch.int64 or ring.dim() != 2 or ring.shape[1] != COLUMNS or not ring.is_contiguous():
        raise ValueError(f"a ring is a contiguous int64 tensor [rows, {COLUMNS}], see blank()")
    if not 0 <= row < ring.shape[0]:
        raise IndexError(f"row {row} of {ring.shape[0]}")
    view = measured_view(tensor)
    if view is not None:
        if view.device != ring.device:
            raise ValueError(f"the tensor is on {view.device}, the ring on {ring.device}")
        _write(view, ring, row, backend_of(ring.device), merge=True)


def _into_nothing(tensor: Tensor, ring: Tensor, row: int) -> None:
    """What a compiler that traces with fake tensors runs."""


# The plain form of torch.library.custom_op, which costs 30 us a call. The library lives as long as this module.
_LIBRARY = torch.library.Library("dsdoctor", "FRAGMENT")
_LIBRARY.define("scan_into(Tensor tensor, Tensor(a!) ring, int row) -> ()")
_LIBRARY.impl("scan_into", _into, "CompositeExplicitAutograd")
torch.library.register_fake("dsdoctor::scan_into", _into_nothing, lib=_LIBRARY)


def scan_into(ring: Tensor, row: int, tensor: Tensor) -> None:
    """Measure a tensor and merge the result into ``ring[row]``, the ring being ``blank(rows, device)``.

    An operator that torch.compile takes into its graph, without a break. Small rings are better there: a compiler that
    cannot write in place copies the ring. Read it with ``settled(ring)``.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        torch.ops.dsdoctor.scan_into(tensor.detach(), ring, row)
