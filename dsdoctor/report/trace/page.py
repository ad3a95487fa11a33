"""Pictures of runs -> one page: what holds nan or inf and what is nearest to the limit, in words; below it the picture."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsdoctor.core.finding import Step
from dsdoctor.overflow.frames.dtypes import LIMITS
from dsdoctor.overflow.trace.extremes import ModuleRow, Picture
from dsdoctor.report.trace.lines import WHOLE, counted
from dsdoctor.report.trace.plot import BAR, body, figure
from dsdoctor.ui.page import GAP, Page, Table, short, stacked
from dsdoctor.ui.page import Picture as Drawing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_ROWS = 12
NARROW_TALLEST, NARROW_LABEL = 4000, 16
"""Pixels of a panel, letters of a module's name: on a telephone."""
TOLD = (
    "Left: a dot is the largest value of a module, its line goes down to the least above zero. "
    "Right: bits that are left below the limit; below 0 it does not fit."
)


def page_of(
    pictures: dict[str, Picture], dtype: str, *, title: str, meta: tuple[str, ...], next_step: Step | None = None
) -> Page:
    """The page of one run, or of two beside each other."""
    return Page(
        title=title,
        run=meta,
        verdict=verdict(pictures, dtype),
        next_step=next_step,
        parts=(
            Table(
                title=f"Nearest to the limit of {dtype}",
                head=("module", "bits left", "abs max", "tensor", "batch", "rank"),
                align="<>><>>",
                rows=tuple(_table_rows(pictures, dtype)),
            ),
            _drawing(pictures, dtype),
        ),
    )


def verdict(pictures: dict[str, Picture], dtype: str) -> str:
    """One line: what holds nan or inf, else what is nearest to the limit."""
    said = [_run_verdict(picture, dtype) for picture in pictures.values()]
    mark = next(mark for mark in "✗!✓" if any(each.startswith(mark) for each in said))
    if len(said) == 1:
        return said[0]
    return f"{mark} " + "; ".join(f"{name}: {each[2:]}" for name, each in zip(pictures, said, strict=True))


def _run_verdict(picture: Picture, dtype: str) -> str:
    bad = sorted((row.bad.batch, place, row) for place, row in enumerate(picture.rows.values()) if row.bad)
    seen = f"{counted(len(picture.rows), 'module', 'modules')}, {counted(picture.batches, 'batch', 'batches')}"
    if bad:
        batch, _, row = bad[0]
        assert row.bad is not None
        where = f"{row.module or WHOLE}, {row.bad.tensor}, batch {batch}, rank {row.bad.rank}"
        return f"✗ nan or inf in {len(bad):,} of {seen}; the first: {where}"
    nearest = _by_room(picture, dtype)
    if not nearest:
        return f"! nothing was measured in {seen}"
    room, row = nearest[0]
    name = row.module or WHOLE
    if room < 0:
        over = sum(each < 0 for each, _ in nearest)
        do = "does" if over == 1 else "do"
        return f"! no nan or inf; {over:,} of {seen} {do} not fit {dtype}: {name} needs {-room:.1f} bits more"
    return f"✓ no nan or inf in {seen}; {name} is nearest to {dtype}'s limit, {room:.1f} bits below it"


def _by_room(picture: Picture, dtype: str) -> list[tuple[float, ModuleRow]]:
    """The rows with what is left below the limit in bits, least first."""
    found = [(math.log2(LIMITS[dtype] / row.most.value), row) for row in picture.rows.values() if row.most]
    return sorted(found, key=lambda pair: pair[0])


def _table_rows(pictures: dict[str, Picture], dtype: str) -> Iterator[tuple[str, ...]]:
    """Rows with a nan or an inf first."""
    for name, picture in pictures.items():
        of = f"{name}: " if name else ""
        bad = [row for row in picture.rows.values() if row.bad]
        for row in bad[:MOST_ROWS]:
            assert row.bad is not None
            what = f"✗ {row.bad.nan} nan, {row.bad.inf} inf"
            yield (f"{of}{row.module or WHOLE}", what, "", row.bad.tensor, str(row.bad.batch), str(row.bad.rank))
        for room, row in _by_room(picture, dtype)[: max(MOST_ROWS - len(bad), 3)]:
            most = row.most
            assert most is not None
            left = f"{'✗ ' if room < 0 else '! ' if room < 0.95 else ''}{room:.1f}"
            value = f"{most.value:.3e}"
            yield (
                f"{of}{row.module or WHOLE}",
                left,
                value,
                f"{most.tensor} {most.dtype}",
                str(most.batch),
                str(most.rank),
            )


def _drawing(pictures: dict[str, Picture], dtype: str) -> Drawing:
    shown = figure(pictures, dtype)
    return Drawing(title="Every module", told=TOLD, figure=shown, narrow=_narrow(shown, panels=1 + len(pictures)))


def _narrow(shown: "Figure", *, panels: int) -> dict[str, object]:
    """The panels below each other, with the ends of the modules' names."""
    height = min(body(shown), NARROW_TALLEST)
    found = stacked(shown, [height] * panels, gap=GAP, top=70)
    names = [short(name, NARROW_LABEL) for name in shown.layout.yaxis.tickvals]
    for number in ("", *map(str, range(2, panels + 1))):
        found[f"yaxis{number}.ticktext"] = names
    above = found[f"yaxis{panels}.domain"]
    assert isinstance(above, list)
    total = height * panels + GAP * (panels - 1)
    return found | {"coloraxis.colorbar.y": above[1] + BAR / total, "coloraxis.colorbar.len": 0.4}
