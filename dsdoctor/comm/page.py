"""Pairs of ranks -> a heat map of plotly: bandwidth by colour; slow pairs and those not reached have colours of their own.

plotly is imported where it is needed: the base install has none.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsdoctor.comm.results import Report
from dsdoctor.report.comm.pairs import PairCell, cells, host_of, words
from dsdoctor.ui.page import safe
from dsdoctor.ui.table import clipped, digits, ranges, short_hosts

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

UNREACHED, SLOW, EDGE = "#d4009b", "#d9480f", "#8a9199"
SCALE = ((0.0, "#b9770e"), (0.35, "#8a8f3c"), (0.6, "#4a9079"), (0.8, "#33839d"), (1.0, "#2a659b"))
DECADES = 1.5
"""The colours span at least so much, so that noise stays within a few shades."""
MOST_SINGLE = 128
"""Ranks with a row each; above, rows are hosts, and a cell is the worst of its pairs."""
MOST_WRITTEN, MOST_NAMED = 16, 16
"""Up to so many rows a cell contains its figure; up to so many rows each row has the rank's name."""
MOST_BLOCKS = 32


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The rows, and the columns, of the heat map: each is a rank, or a host of many. Ranks of a host stand together."""

    rows: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]

    @property
    def edges(self) -> tuple[int, ...]:
        """The rows before which another host begins."""
        return tuple(place for place in range(1, len(self.rows)) if self.hosts[place] != self.hosts[place - 1])


def axis_of(report: Report) -> Axis:
    """The order of ranks in the picture."""
    by_host: dict[str, list[int]] = {}
    for rank in range(report.world):
        by_host.setdefault(host_of(report, rank), []).append(rank)
    if report.world > MOST_SINGLE and len(by_host) > 1:
        return Axis(rows=tuple(map(tuple, by_host.values())), hosts=tuple(by_host))
    ranks = [(rank, host) for host, those in by_host.items() for rank in those]
    return Axis(rows=tuple((rank,) for rank, _ in ranks), hosts=tuple(host for _, host in ranks))


def ticks(axis: Axis) -> tuple[list[float], list[str], list[str]]:
    """Where a label stands, what it says beside a row, and above a column: a rank each, or where they are many a host."""
    count = len(axis.rows)
    short = {host: safe(name) for host, name in short_hosts(axis.hosts).items()}
    single = count <= MOST_NAMED or not axis.edges
    starts = tuple(range(count + 1)) if single else (0, *axis.edges, count)
    blocks = list(itertools.pairwise(starts))
    blocks = blocks[:: math.ceil(len(blocks) / (MOST_BLOCKS if axis.edges else MOST_NAMED))]
    ranks = [ranges(rank for row in axis.rows[first:end] for rank in row) for first, end in blocks]
    beside = [clipped(f"{those} {short[axis.hosts[first]]}") for those, (first, _) in zip(ranks, blocks, strict=True)]
    return [(first + end - 1) / 2 for first, end in blocks], beside, [str(axis.rows[first][0]) for first, _ in blocks]


def add_matrix(shown: "Figure", report: Report, *, row: int, col: int) -> None:
    """The heat map: bandwidth by colour; over it what is slow, and what was not reached."""
    axis = axis_of(report)
    grid = _grid(report, axis)
    values = [math.log10(cell.bandwidth) for line in grid for cell in line if cell and cell.bandwidth]
    top = max(values, default=9.0)
    bottom = min([*values, top - DECADES])
    colours = {"cmin": bottom, "cmax": top, "colorscale": [list(step) for step in SCALE]}
    shown.update_layout(coloraxis={**colours, "colorbar": _colorbar(bottom, top), "showscale": bool(values)})
    at = {"row": row, "col": col}
    timed = _layer(report, axis, grid, lambda cell: bool(cell.bandwidth) and not cell.bad, coloraxis="coloraxis")
    shown.add_trace(timed, **at)
    plain = _layer(report, axis, grid, lambda cell: not cell.bandwidth and not cell.bad, **_flat(EDGE))
    shown.add_trace(plain.update(name="reached, not timed", showlegend=_any(plain), opacity=0.45), **at)
    slow = _layer(report, axis, grid, lambda cell: cell.slow and not cell.unreached, **_flat(SLOW))
    shown.add_trace(slow.update(name="below a third of the median", showlegend=_any(slow)), **at)
    lost = _layer(report, axis, grid, lambda cell: cell.unreached, **_flat(UNREACHED))
    shown.add_trace(lost.update(name="not reached", showlegend=_any(lost)), **at)
    _add_edges(shown, axis, at)


def _grid(report: Report, axis: Axis) -> list[list[PairCell | None]]:
    """A cell for each row and column: where they are hosts, the worst of the pairs between them."""
    place = {rank: number for number, row in enumerate(axis.rows) for rank in row}
    grid: list[list[PairCell | None]] = [[None] * len(axis.rows) for _ in axis.rows]
    for (source, target), cell in cells(report).items():
        if source not in place or target not in place:
            continue
        before = grid[place[source]][place[target]]
        if before is None or _badness(cell) > _badness(before):
            grid[place[source]][place[target]] = cell
    return grid


def _badness(cell: PairCell) -> tuple[bool, bool, float]:
    return cell.unreached, cell.slow, -(cell.bandwidth or 0.0)


def _layer(
    report: Report, axis: Axis, grid: list[list[PairCell | None]], wanted: Callable[[PairCell], bool], **looks: Any
) -> Any:
    """The cells that are wanted as a heat map, the others left out."""
    from plotly import graph_objects as go

    kept = [[cell if cell and wanted(cell) else None for cell in line] for line in grid]
    flat = looks.get("zmax") == 1
    return go.Heatmap(
        z=[
            [None if not cell else 1 if flat else round(math.log10(cell.bandwidth or 1), 3) for cell in line]
            for line in kept
        ],
        customdata=[[safe(words(report, cell)) if cell else "" for cell in line] for line in kept],
        text=[[_written(cell) if cell else "" for cell in line] for line in kept],
        texttemplate="%{text}" if len(axis.rows) <= MOST_WRITTEN else None,
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        textfont={"color": "#ffffff"},
        xgap=1 if len(axis.rows) <= 64 else 0,
        ygap=1 if len(axis.rows) <= 64 else 0,
        **looks,
    )


def _any(layer: Any) -> bool:
    return any(value is not None for line in layer.z for value in line)


def _written(cell: PairCell) -> str:
    """What stands in a cell: MB/s."""
    if cell.unreached:
        return "✗"
    if not cell.bandwidth:
        return "ok"
    value = cell.bandwidth / 1e6
    return (f"{value:.0f}" if value >= 9.5 else digits(value)) + ("!" if cell.slow else "")


def _flat(colour: str) -> dict[str, Any]:
    return {"zmin": 0, "zmax": 1, "colorscale": [[0, colour], [1, colour]], "showscale": False}


def _colorbar(bottom: float, top: float) -> dict[str, Any]:
    """A bar below the heat map whose ticks are 1, 2 or 5 times a power of ten."""
    steps = [
        math.log10(factor * 10.0**power)
        for power in range(math.floor(bottom), math.ceil(top) + 1)
        for factor in (1, 2, 5)
    ]
    inside = [step for step in steps if bottom <= step <= top]
    return {
        "orientation": "h",
        "thickness": 10,
        "tickvals": inside,
        "ticktext": [f"{10**step / 1e6:,.0f}" if step >= 6 else f"{10**step / 1e6:g}" for step in inside],
        "outlinewidth": 0,
    }


def _add_edges(shown: "Figure", axis: Axis, at: dict[str, int]) -> None:
    """A line wherever another host begins, and a faint one along the diagonal."""
    line = {"color": EDGE, "width": 1.5 if len(axis.edges) <= 32 else 0.5}
    end = len(axis.rows) - 0.5
    for edge in axis.edges if len(axis.edges) < len(axis.rows) - 1 or len(axis.rows) <= MOST_NAMED else ():
        shown.add_shape(type="line", x0=edge - 0.5, x1=edge - 0.5, y0=-0.5, y1=end, line=line, **at)
        shown.add_shape(type="line", y0=edge - 0.5, y1=edge - 0.5, x0=-0.5, x1=end, line=line, **at)
    shown.add_shape(
        type="line", x0=-0.5, y0=-0.5, x1=end, y1=end, line={"color": EDGE, "width": 0.5, "dash": "dot"}, **at
    )
    places, beside, above = ticks(axis)
    bare = {"tickvals": places, "showgrid": False, "zeroline": False, **at}
    shown.update_xaxes(range=[-0.5, end], ticktext=above, side="top", tickangle=0, **bare)
    shown.update_yaxes(range=[end, -0.5], ticktext=beside, automargin=True, **bare)
