"""Frames -> what a picture of a run shows: each module's range, and its headroom batch by batch. Pure, streamed, bounded."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dsdoctor.overflow.frames.dtypes import LIMITS, headroom_bits
from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats
from dsdoctor.overflow.frames.masks import is_mask

MOST_COLUMNS = 240
"""Columns of the heat map. A longer run has several batches in each."""
NARROW = ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """One figure and the tensor that it is of."""

    value: float
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    batch: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Bad:
    """The first tensor of a row that holds a nan or an inf."""

    tensor: str
    nan: int
    inf: int
    batch: int
    rank: int


@dataclass
class HeatCell:
    """A module in the batches of one column: its least headroom in bits, and whether it holds a nan or an inf."""

    absmax: float = 0.0
    bad: bool = False

    def join(self, other: "HeatCell") -> "HeatCell":
        """Two columns as one."""
        return HeatCell(absmax=max(self.absmax, other.absmax), bad=self.bad or other.bad)


@dataclass
class ModuleRow:
    """One module (its ``call``-th call of a batch). ``most``, ``least``: of its outputs; of its inputs if none is measured."""

    module: str
    kind: str
    call: int
    most: Extreme | None = None
    least: Extreme | None = None
    bad: Bad | None = None
    cells: dict[int, HeatCell] = field(default_factory=dict)


@dataclass
class Picture:
    """Rows in the order of execution. Column c holds the batches ``first + c * width`` and the ``width`` - 1 after it."""

    rows: dict[tuple[str, int], ModuleRow] = field(default_factory=dict)
    first: int = 0
    width: int = 1
    batches: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)

    @property
    def columns(self) -> list[int]:
        """The columns that hold anything."""
        return sorted({column for row in self.rows.values() for column in row.cells})

    def halve(self) -> None:
        """Put every two columns into one."""
        self.width *= 2
        for row in self.rows.values():
            cells: dict[int, HeatCell] = {}
            for column, cell in row.cells.items():
                cells[column // 2] = cells.get(column // 2, HeatCell()).join(cell)
            row.cells = cells


def picture(lines: Iterable[tuple[int, Frame]], *, phase: CallPhase = CallPhase.FORWARD) -> Picture:
    """The picture of a run, from its frames each with its rank. Masks and whole numbers are no part of it."""
    found = Picture()
    seen: set[int] = set()
    for rank, frame in lines:
        if frame.phase is not phase:
            continue
        if not seen:
            found.first = frame.batch
        seen.add(frame.batch)
        row = found.rows.setdefault((frame.module, frame.call), ModuleRow(frame.module, frame.kind, frame.call))
        column = _column(found, frame.batch)
        measured = [tensor for tensor in frame.measured if tensor.dtype in LIMITS and not is_mask(tensor)]
        shown = _shown_prefix(frame, measured)
        for tensor in measured:
            found.dtypes[tensor.dtype] = None
            _note(row, column, rank, frame, tensor, shown=tensor.name.startswith(shown))
    found.batches = len(seen)
    return found


def _column(found: Picture, batch: int) -> int:
    """The column of a batch; makes room for it. A batch before the first one shares its column."""
    while (batch - found.first) // found.width >= MOST_COLUMNS:
        found.halve()
    return max(batch - found.first, 0) // found.width


def _shown_prefix(frame: Frame, measured: list[TensorStats]) -> str:
    """How the names of those tensors begin that a row's range is of: outputs, else inputs; of gradients all."""
    if frame.phase is CallPhase.BACKWARD:
        return ""
    return "output" if any(tensor.name.startswith("output") for tensor in measured) else "input"


def _note(row: ModuleRow, column: int, rank: int, frame: Frame, tensor: TensorStats, *, shown: bool) -> None:
    cell = row.cells.setdefault(column, HeatCell())
    cell.absmax = max(cell.absmax, tensor.absmax or 0.0)
    if tensor.is_bad:
        cell.bad = True
        row.bad = row.bad or Bad(
            tensor=tensor.name, nan=tensor.nan, inf=tensor.posinf + tensor.neginf, batch=frame.batch, rank=rank
        )
    if not shown:
        return
    if tensor.absmax and (row.most is None or tensor.absmax > row.most.value):
        row.most = _extreme(tensor.absmax, tensor, frame, rank)
    least = tensor.absmin_nonzero or tensor.absmin
    if least and (row.least is None or least < row.least.value):
        row.least = _extreme(least, tensor, frame, rank)


def _extreme(value: float, tensor: TensorStats, frame: Frame, rank: int) -> Extreme:
    return Extreme(
        value=value, tensor=tensor.name, dtype=tensor.dtype, shape=tensor.shape, batch=frame.batch, rank=rank
    )


def reference(found: Picture, asked: str | None = None) -> str:
    """The dtype whose limit the picture is held against: asked for, else the narrowest in it, else float16.

    A bfloat16 run has 120 bits of room everywhere: whether it would fit float16 says more.

    >>> reference(Picture(dtypes={"float32": None, "float8_e4m3fn": None, "float16": None}))
    'float8_e4m3fn'
    >>> reference(Picture(dtypes={"bfloat16": None}))
    'float16'
    """
    narrow = [dtype for dtype in found.dtypes if dtype in NARROW]
    return asked or min(narrow, key=LIMITS.__getitem__, default="float16")


def bits(cell: HeatCell, dtype: str) -> float | None:
    """The headroom of a cell."""
    return headroom_bits(cell.absmax, dtype)
