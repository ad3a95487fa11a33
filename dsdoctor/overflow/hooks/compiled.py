"""Modules inside a compiled graph -> the figures of their outputs, measured by an operator that is part of the graph.

No graph break and no wait per module. In return less is known: all calls of a step are merged, and inputs are not measured.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.frames.dtypes import FORMATS
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.measure.measure import blank, blank_, scan_into, settled
from dsdoctor.overflow.measure.readings import stats_of

OUTPUTS = 4
"""Outputs of a module that have a row."""
KINDS = tuple(form.name for form in FORMATS)
_CODES = {getattr(torch, name): number for number, name in enumerate(KINDS, start=1) if hasattr(torch, name)}


class CompiledRows:
    """Rows for the outputs of ``modules`` modules on a device. ``kinds`` [rows, 2]: the dtype's number and the elements."""

    def __init__(self, modules: int, device: torch.device) -> None:
        self._ring = blank(modules * OUTPUTS, device)
        self._kinds = torch.zeros(modules * OUTPUTS, 2, dtype=torch.int64)
        self._modules = modules

    def look(self, index: int, output: Any) -> None:
        """Measure the outputs of a module. This is what the compiler traces: plain loops, constant rows."""
        if index >= self._modules:
            return
        if isinstance(output, Tensor):
            parts = [output]
        elif isinstance(output, Mapping):
            parts = list(output.values())
        elif isinstance(output, (tuple, list)):
            parts = list(output)
        else:
            parts = []
        for place, part in enumerate(parts[:OUTPUTS]):
            if isinstance(part, Tensor) and part.dtype.is_floating_point:
                row = index * OUTPUTS + place
                scan_into(self._ring, row, part)
                _note_kind(part.detach(), self._kinds, row)

    def read(self) -> dict[int, list[TensorStats]]:
        """What was measured since the last time, by module. One wait."""
        rows = settled(self._ring).tolist()
        found: dict[int, list[TensorStats]] = {}
        for row, (code, count) in enumerate(self._kinds.tolist()):
            if code:
                index, place = divmod(row, OUTPUTS)
                stats = stats_of(
                    rows[row],
                    name=f"output[{place}]",
                    dtype=KINDS[code - 1],
                    shape=(count,),
                    device=str(self._ring.device),
                )
                found.setdefault(index, []).append(stats)
        blank_(self._ring)
        self._kinds.zero_()
        return found


@torch.library.custom_op("dsdoctor::note_kind", mutates_args=("kinds",))
def _note_kind(tensor: Tensor, kinds: Tensor, row: int) -> None:
    kinds[row, 0] = _CODES.get(tensor.dtype, 0)
    kinds[row, 1] = tensor.numel()


@_note_kind.register_fake
def _(*_: Any) -> None:
    return None
