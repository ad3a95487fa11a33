"""Frames -> would this run fit another dtype: each module's largest value against the limit, whether it grows, the modules to
keep in fp32, and what a picture shows of that, batch by batch.

Pure and streamed: memory grows with the number of modules alone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsdoctor.overflow.frames.frame import (
    LIMITS,
    SMALLEST_NORMAL,
    CallPhase,
    Frame,
    StepEnd,
    TensorStats,
    headroom_bits,
    is_mask,
    smallest,
)

CRITICAL = (636.62, 31.60, 12.92, 8.610, 6.869, 5.959, 5.408, 5.041, 4.781, 4.587)
"""Student's t, two-sided, at 99.9 %, for 1 to 10 degrees of freedom: a model has hundreds of modules, and none
of them may raise a false alarm."""
BEYOND_TEN, MANY = 4.587, 30
CRITICAL_MANY = 3.646
FEWEST = 3
HORIZON = 10
"""A prediction reaches at most this many times as far as the batches that were seen."""
LEAST_BITS, MOST_BITS = -1022, 1023
MAX_COLUMNS = 240
"""Columns of the heat map. A longer run has several batches in each."""
NARROW = ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Growth: ``doubles_every`` so many batches; ``reaches_in``: batches after the last until the limit, at this pace."""

    doubles_every: float
    reaches_in: float


@dataclass
class Growth:
    """Sums of a least-squares line through log2 of the largest value over the batch number (Draper and Smith, chapter 1)."""

    count: int = 0
    first: int = 0
    last: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, batch: int, absmax: float) -> None:
        """Add a batch. Zeros and infinities say nothing about growth and are left out."""
        if absmax <= 0 or not math.isfinite(absmax):
            return
        if not self.count:
            self.first = batch
        self.last = batch
        x, y = float(batch - self.first), math.log2(absmax)
        self.count += 1
        self.x, self.y = self.x + x, self.y + y
        self.xx, self.xy, self.yy = self.xx + x * x, self.xy + x * y, self.yy + y * y

    def trend(self, limit: float) -> Trend | None:
        """The growth, if it is significant and reaches the limit within the horizon; else None.

        >>> growth = Growth()
        >>> for batch in range(6):
        ...     growth.add(batch, 2.0 ** batch)
        >>> growth.trend(1024.0)
        Trend(doubles_every=1.0, reaches_in=5.0)
        """
        if self.count < FEWEST:
            return None
        spread = self.xx - self.x * self.x / self.count
        if spread <= 0:
            return None
        slope = (self.xy - self.x * self.y / self.count) / spread
        if slope <= 0 or not self._is_significant(slope, spread):
            return None
        now = self.y / self.count + slope * ((self.last - self.first) - self.x / self.count)
        left = (math.log2(limit) - now) / slope
        if left <= 0 or left > HORIZON * (self.last - self.first + 1):
            return None
        return Trend(doubles_every=1 / slope, reaches_in=left)

    def _is_significant(self, slope: float, spread: float) -> bool:
        """Whether the slope is more than noise: t = slope / its standard error."""
        freedom = self.count - 2
        total = self.yy - self.y * self.y / self.count
        rest = max(total - slope * slope * spread, 1e-12 * abs(total))
        error = math.sqrt(rest / freedom / spread)
        return error == 0 or slope / error > critical(freedom)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest absolute value, and where it was."""

    value: float
    tensor: str
    dtype: str
    batch: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients as they were traced: the largest, and by which loss scale (a power of 2) they may still be multiplied.

    ``scale``: the loss scale that is in them. ``smallest``: of the tensor whose gradients stay smallest, its largest over all
    batches, without a loss scale; ``needs_scale``: the loss scale (a power of 2) from which on that is a normal number of it.
    """

    peak: Peak
    module: str
    fits_scale: float
    scale: float
    smallest: float = 0.0
    smallest_at: str = ""
    needs_scale: float = 1.0


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


def critical(freedom: int) -> float:
    """The least t that is significant.

    >>> critical(1), critical(4), critical(20), critical(500)
    (636.62, 8.61, 4.587, 3.646)
    """
    if freedom <= len(CRITICAL):
        return CRITICAL[freedom - 1]
    return BEYOND_TEN if freedom < MANY else CRITICAL_MANY


class Excess:
    """The modules that hold or make a tensor above a limit, collected frame by frame.

    A leaf counts with each of its tensors. A module with children only counts for a tensor that none of its children had in
    this batch: a residual sum, for instance. A value that it merely passes on counts for its children.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.modules: dict[str, None] = {}
        self.leaking: set[str] = set()
        self._batch: dict[int, int] = {}
        self._seen: dict[int, dict[tuple[float, tuple[int, ...]], set[str]]] = {}

    def add(self, rank: int, frame: Frame, tensor: TensorStats, value: float) -> None:
        """Note a tensor of a forward frame whose largest value exceeds; children's frames come before their parents'."""
        if self._batch.get(rank) != frame.batch:
            self._batch[rank], self._seen[rank] = frame.batch, {}
        if tensor.name.startswith("output"):
            self.leaking.add(frame.module)
        holders = self._seen[rank].setdefault((value, tensor.shape), set())
        inside = any(is_inside(holder, frame.module) for holder in holders)
        if frame.module not in self.modules and not inside:
            self.modules[frame.module] = None
        holders.add(frame.module)


def is_inside(module: str, outer: str) -> bool:
    """Whether a module is a part of another, by their names.

    >>> is_inside("h.1.mlp", "h.1"), is_inside("h.10", "h.1"), is_inside("h.1", ""), is_inside("h.1", "h.1")
    (True, False, True, False)
    """
    return module != outer and (not outer or module.startswith(f"{outer}."))


def fp32_list(excess: Excess, order: Iterable[str], bad: Iterable[str], *, cast_back: bool) -> tuple[str, ...]:
    """The names to keep in fp32, in the order of execution, none inside of another.

    ``bad``: modules that made a nan or an inf. ``cast_back``: a module that is kept in fp32 gives its output back in
    the low precision, so an output that exceeds must not leave: the nearest enclosing module is taken whose own outputs fit.
    """
    known = list(order)
    names = dict.fromkeys([*excess.modules, *bad])
    if cast_back:
        names = dict.fromkeys(_enclosing(name, excess.leaking, set(known)) for name in names)
    outermost = [name for name in names if not any(is_inside(name, other) for other in names)]
    return tuple(sorted(outermost, key=known.index))


def _enclosing(name: str, leaking: set[str], known: set[str]) -> str:
    """The module itself or the nearest one around it whose outputs fit; the outermost that was traced where none does."""
    found = name
    while found in leaking and name:
        name = name.rpartition(".")[0]
        if name in known:
            found = name
    return found


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much room a module has: ``bits`` to the limit, negative above it; None: it held nothing but zeros and masks.

    ``least``: the smallest value of its inputs and outputs that is not zero. ``fades``: an input or output lies below the
    dtype's normal numbers as a whole. ``vanishes``: one would be zero as a whole. ``bad``: it holds a nan or an inf already.
    """

    module: str
    kind: str
    peak: Peak | None
    bits: float | None
    least: float | None
    fades: bool
    bad: bool
    trend: Trend | None
    vanishes: bool = False


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Every module's room, least first. ``keep``: run these in fp32, as ``dsdoctor.keep_in_fp32`` does it.

    ``keep_under_autocast``: where a module's output may stay fp32, these are enough.
    """

    dtype: str
    limit: float
    margin: float
    batches: int
    modules: tuple[Room, ...]
    keep: tuple[str, ...]
    keep_under_autocast: tuple[str, ...]
    gradients: Gradients | None
    masks: int


@dataclass
class _Module:
    """What was seen of one module so far."""

    kind: str
    peak: Peak | None = None
    least: float | None = None
    fades: bool = False
    vanishes: bool = False
    bad: bool = False
    batch: int = -1
    largest: float = 0.0
    growth: Growth = field(default_factory=Growth)

    def add(self, frame: Frame, tensor: TensorStats, rank: int, normal: float, flushed: float) -> None:
        value = tensor.absmax or 0.0
        if self.peak is None or value > self.peak.value:
            self.peak = Peak(value=value, tensor=tensor.name, dtype=tensor.dtype, batch=frame.batch, rank=rank)
        if tensor.name.startswith(("input", "output")):
            least = tensor.absmin_nonzero
            if least is not None and (self.least is None or least < self.least):
                self.least = least
            self.fades = self.fades or 0 < value < normal
            self.vanishes = self.vanishes or 0 < value <= flushed
        if frame.batch != self.batch:
            self.close()
            self.batch = frame.batch
        self.largest = max(self.largest, value)

    def close(self) -> None:
        """A batch is over."""
        if self.batch >= 0:
            self.growth.add(self.batch, self.largest)
        self.largest = 0.0

    def room(self, module: str, limit: float) -> Room:
        self.close()
        value = self.peak.value if self.peak else 0.0
        return Room(
            module=module,
            kind=self.kind,
            peak=self.peak if value else None,
            bits=_bits(limit / value) if value > 0 else None,
            least=self.least,
            fades=self.fades,
            bad=self.bad,
            vanishes=self.vanishes,
            trend=None if value > limit else self.growth.trend(limit),
        )


class _Reading:
    """The modules so far, and the batches and masks that were met."""

    def __init__(self, dtype: str, margin: float) -> None:
        self.limit = LIMITS[dtype]
        self.normal = SMALLEST_NORMAL[dtype]
        self.flushed = smallest(dtype) / 2
        self.modules: dict[str, _Module] = {}
        self.batches: set[int] = set()
        self.masks = 0
        self.excess = Excess(self.limit * 2.0**-margin)
        self.first_bad: dict[str, None] = {}
        self._bad_batch: dict[int, int] = {}
        self.gradient: tuple[Peak, str, float] | None = None
        self.gradients_of: dict[str, float] = {}

    def add(self, rank: int, line: Frame | StepEnd) -> None:
        if isinstance(line, StepEnd):
            return
        if line.phase is CallPhase.FORWARD:
            self._forward(rank, line)
        else:
            self._backward(rank, line)

    def _forward(self, rank: int, frame: Frame) -> None:
        self.batches.add(frame.batch)
        module = self.modules.setdefault(frame.module, _Module(kind=frame.kind))
        for tensor in frame.measured:
            if tensor.dtype not in LIMITS:
                continue
            if is_mask(tensor):
                self.masks += 1
                continue
            if tensor.is_bad:
                module.bad = True
                self._note_bad(rank, frame, tensor)
            module.add(frame, tensor, rank, self.normal, self.flushed)
            if tensor.absmax is not None and tensor.absmax > self.excess.limit:
                self.excess.add(rank, frame, tensor, tensor.absmax)

    def _note_bad(self, rank: int, frame: Frame, tensor: TensorStats) -> None:
        """Keep the module that made the first nan or inf of a batch: the others got it from there."""
        if self._bad_batch.get(rank) != frame.batch:
            self._bad_batch[rank] = frame.batch
            if tensor.name.startswith("output"):
                self.first_bad[frame.module] = None

    def _backward(self, rank: int, frame: Frame) -> None:
        scale = frame.loss_scale or 1.0
        for tensor in frame.measured:
            value = tensor.absmax or 0.0
            # of a file that anybody wrote: no gradient is below nothing or without an end
            if tensor.dtype not in LIMITS or not 0 < value / scale < math.inf:
                continue
            place = ".".join(part for part in (frame.module, tensor.name.removeprefix("grad ")) if part)
            self.gradients_of[place] = max(self.gradients_of.get(place, 0.0), value / scale)
            known = 0.0 if self.gradient is None else self.gradient[0].value / self.gradient[2]
            if value / scale > known:
                peak = Peak(value=value, tensor=tensor.name, dtype=tensor.dtype, batch=frame.batch, rank=rank)
                self.gradient = peak, frame.module, scale

    def gradients(self) -> Gradients | None:
        if self.gradient is None:
            return None
        peak, module, scale = self.gradient
        fits = 2.0 ** math.floor(_bits(self.limit / peak.value * scale))
        place = min(self.gradients_of, key=self.gradients_of.__getitem__)
        least = self.gradients_of[place]
        needs = 2.0 ** max(0, math.ceil(_bits(self.normal / least)))
        return Gradients(
            peak=peak,
            module=module,
            fits_scale=fits,
            scale=scale,
            smallest=least,
            smallest_at=place,
            needs_scale=needs,
        )


def _bits(ratio: float) -> float:
    """The exponent of a ratio, within those that a scale can have.

    >>> _bits(8.0), _bits(0.0), _bits(math.inf)
    (3.0, -1022.0, 1023.0)
    """
    return float(min(max(math.log2(ratio), LEAST_BITS), MOST_BITS)) if ratio > 0 else float(LEAST_BITS)


def headroom(lines: Iterable[tuple[int, Frame | StepEnd]], *, dtype: str = "float16", margin: float = 1.0) -> Headroom:
    """How the lines of a run, each with its rank, would fit ``dtype``. ``margin``: bits to be left free below the limit."""
    reading = _Reading(dtype, margin)
    for rank, line in lines:
        reading.add(rank, line)
    rooms = [module.room(name, reading.limit) for name, module in reading.modules.items()]
    rooms.sort(key=lambda room: (not room.bad, math.inf if room.bits is None else room.bits))
    order = tuple(reading.modules)
    return Headroom(
        dtype=dtype,
        limit=reading.limit,
        margin=margin,
        batches=len(reading.batches),
        modules=tuple(rooms),
        keep=fp32_list(reading.excess, order, reading.first_bad, cast_back=True),
        keep_under_autocast=fp32_list(reading.excess, order, reading.first_bad, cast_back=False),
        gradients=reading.gradients(),
        masks=reading.masks,
    )


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
    while (batch - found.first) // found.width >= MAX_COLUMNS:
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
