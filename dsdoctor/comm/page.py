"""Pairs of ranks -> a heat map of plotly: bandwidth by colour; slow pairs and those not reached have colours of their own.

plotly is imported where it is needed: the base install has none.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.results import Limit, Report, Speed
from dsdoctor.comm.text import MARKS, PairCell, cells, host_of, rank_and_host, rank_lines, words
from dsdoctor.ranks.nodelist import numbers_in_words
from dsdoctor.ui import page
from dsdoctor.ui.page import Listing, Page, Picture, safe, stacked
from dsdoctor.ui.table import clipped, digits, duration, gigabytes, short_hosts, size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


# Speeds and paces of ranks -> traces of plotly: bandwidths and times as curves over size, paces as bars.
#
# plotly is imported where it is needed: the base install has none.


LIMIT_LINE = "#d62728"
COLOURS = (
    *("#3f8fc4", "#e6862a", "#3aa56b", "#c2549d", "#8b7bd1", "#b08d3c"),
    *("#d1605e", "#4fb3bf", "#8a9199", "#9c755f", "#6f9c2c", "#e58fb8"),
)
BARS = ("#66788a", "#c9a227")
"""Other colours than those of the curves, for both are in one legend."""
MAX_TICKS, MAX_NAMED = 8, 16


def add_curves(shown: "Figure", report: Report, *, bandwidth: int, latency: int, col: int) -> None:
    """busbw against size with the limit as a line; below it times: the median, and the 99th percentile dotted."""
    from plotly import graph_objects as go

    by_op: dict[str, list[Speed]] = defaultdict(list)
    for speed in report.speeds:
        by_op[speed.op].append(speed)
    for number, (op, speeds) in enumerate(by_op.items()):
        speeds.sort(key=lambda speed: speed.size)
        look: dict[str, Any] = {
            "x": [speed.size for speed in speeds],
            "legendgroup": op,
            "name": safe(op),
            "hovertext": [_told(report, speed) for speed in speeds],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        line = {"color": COLOURS[number % len(COLOURS)], "width": 2}
        busbw = [speed.busbw / 1e9 for speed in speeds]
        shown.add_trace(go.Scatter(y=busbw, line=line, mode="lines+markers", **look), row=bandwidth, col=col)
        for attribute, dash in (("p50", "solid"), ("p99", "dot")):
            times = [getattr(speed, attribute) for speed in speeds]
            drawn = go.Scatter(y=times, line={**line, "dash": dash}, mode="lines", showlegend=False, **look)
            shown.add_trace(drawn, row=latency, col=col)
    if report.limit:
        _add_limit(shown, report.limit, {"row": bandwidth, "col": col})
    _size_axes(shown, report, bandwidth=bandwidth, latency=latency, col=col)


def _add_limit(shown: "Figure", limit: Limit, at: dict[str, int]) -> None:
    """The limit as a line, with its name. An annotation on a logarithmic axis takes the exponent."""
    bandwidth = limit.bandwidth / 1e9
    shown.add_hline(y=bandwidth, line={"color": LIMIT_LINE, "width": 1.5, "dash": "dash"}, **at)
    shown.add_annotation(
        text=f"limit {gigabytes(limit.bandwidth)} GB/s: {safe(limit.link)}",
        x=0.01,
        xref="x domain",
        xanchor="left",
        y=math.log10(bandwidth),
        yanchor="bottom",
        showarrow=False,
        font={"size": 11, "color": LIMIT_LINE},
        **at,
    )


def _told(report: Report, speed: Speed) -> str:
    parts = [
        f"<b>{safe(speed.op)}</b> {size(speed.size)}",
        f"p50 {duration(speed.p50)}, p99 {duration(speed.p99)}",
        f"algbw {gigabytes(speed.algbw)} GB/s, busbw {gigabytes(speed.busbw)} GB/s",
        f"slowest rank {safe(rank_and_host(report, speed.slowest))}",
    ]
    return "<br>".join(parts)


def _size_axes(shown: "Figure", report: Report, *, bandwidth: int, latency: int, col: int) -> None:
    """Logarithmic axes with readable ticks; everything that is drawn is within them."""
    sizes = sorted({speed.size for speed in report.speeds})
    powers = sorted({2 ** round(math.log2(max(count, 1))) for count in sizes})
    marks = powers[:: max(1, math.ceil(len(powers) / MAX_TICKS))]
    reach = [math.log10(max(sizes[0], 1)) - 0.15, math.log10(max(sizes[-1], 1)) + 0.15]
    limit = [report.limit.bandwidth] if report.limit else []
    figures = (
        (bandwidth, [speed.busbw / 1e9 for speed in report.speeds] + [value / 1e9 for value in limit], _plain),
        (latency, [time for speed in report.speeds for time in (speed.p50, speed.p99)], duration),
    )
    for row, values, said in figures:
        ticks_at, reach_y = _decades([value for value in values if value > 0])
        names = [said(value) for value in ticks_at]
        place = {"row": row, "col": col}
        shown.update_xaxes(type="log", tickvals=marks, ticktext=[size(mark) for mark in marks], range=reach, **place)
        shown.update_yaxes(type="log", tickvals=ticks_at, ticktext=names, range=reach_y, automargin=True, **place)
        shown.update_yaxes(zeroline=False, **place)


def _decades(values: list[float]) -> tuple[list[float], list[float]]:
    """Powers of ten that lie among values, and the range (as exponents) that shows all of them with some room."""
    low, high = math.log10(min(values, default=1)), math.log10(max(values, default=1))
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, math.ceil(len(powers) / MAX_TICKS))
    return [10.0**power for power in powers[::every]], [low - 0.25, high + 0.5]


def _plain(bandwidth: float) -> str:
    """A power of ten in GB/s, such as "0.001"."""
    return f"{bandwidth:,.6f}".rstrip("0").rstrip(".")


def add_paces(shown: "Figure", report: Report, *, row: int, col: int) -> None:
    """Bars by rank: how long it takes for the same work alone, and how long it then waits for the others."""
    from plotly import graph_objects as go

    places = [pace.rank for pace in report.paces]
    hosts = [safe(f"rank {rank_and_host(report, pace.rank)}") for pace in report.paces]
    for name, attribute, colour in (("works alone", "compute", BARS[0]), ("waits for the others", "waited", BARS[1])):
        times = [getattr(pace, attribute) * 1e3 for pace in report.paces]
        bars = go.Bar(
            x=places,
            y=times,
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            hovertext=[f"{host}<br>{name}: {duration(time / 1e3)}" for host, time in zip(hosts, times, strict=True)],
            hovertemplate="%{hovertext}<extra></extra>",
        )
        shown.add_trace(bars, row=row, col=col)
    few = {"dtick": 1} if len(places) <= MAX_NAMED else {}
    shown.update_xaxes(title={"text": "rank", "standoff": 2}, showgrid=False, zeroline=False, row=row, col=col, **few)
    shown.update_yaxes(title={"text": "ms", "standoff": 4}, rangemode="tozero", automargin=True, row=row, col=col)


UNREACHED, SLOW, EDGE = "#d4009b", "#d9480f", "#8a9199"
SCALE = ((0.0, "#b9770e"), (0.35, "#8a8f3c"), (0.6, "#4a9079"), (0.8, "#33839d"), (1.0, "#2a659b"))
DECADES = 1.5
"""The colours span at least so much, so that noise stays within a few shades."""
MAX_SINGLE_RANKS = 128
"""Ranks with a row each; above, rows are hosts, and a cell is the worst of its pairs."""
MOST_WRITTEN, MAX_RANKS_NAMED = 16, 16
"""Up to so many rows a cell contains its figure; up to so many rows each row has the rank's name."""
MAX_BLOCKS = 32


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
    if report.world > MAX_SINGLE_RANKS and len(by_host) > 1:
        return Axis(rows=tuple(map(tuple, by_host.values())), hosts=tuple(by_host))
    ranks = [(rank, host) for host, those in by_host.items() for rank in those]
    return Axis(rows=tuple((rank,) for rank, _ in ranks), hosts=tuple(host for _, host in ranks))


def ticks(axis: Axis) -> tuple[list[float], list[str], list[str]]:
    """Where a label stands, what it says beside a row, and above a column: a rank each, or where they are many a host."""
    count = len(axis.rows)
    short = {host: safe(name) for host, name in short_hosts(axis.hosts).items()}
    single = count <= MAX_RANKS_NAMED or not axis.edges
    starts = tuple(range(count + 1)) if single else (0, *axis.edges, count)
    blocks = list(itertools.pairwise(starts))
    blocks = blocks[:: math.ceil(len(blocks) / (MAX_BLOCKS if axis.edges else MAX_RANKS_NAMED))]
    ranks = [numbers_in_words(rank for row in axis.rows[first:end] for rank in row) for first, end in blocks]
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
        power + math.log10(factor) for power in range(math.floor(bottom), math.ceil(top) + 1) for factor in (1, 2, 5)
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
    for edge in axis.edges if len(axis.edges) < len(axis.rows) - 1 or len(axis.rows) <= MAX_RANKS_NAMED else ():
        shown.add_shape(type="line", x0=edge - 0.5, x1=edge - 0.5, y0=-0.5, y1=end, line=line, **at)
        shown.add_shape(type="line", y0=edge - 0.5, y1=edge - 0.5, x0=-0.5, x1=end, line=line, **at)
    shown.add_shape(
        type="line", x0=-0.5, y0=-0.5, x1=end, y1=end, line={"color": EDGE, "width": 0.5, "dash": "dot"}, **at
    )
    places, beside, above = ticks(axis)
    bare = {"tickvals": places, "showgrid": False, "zeroline": False, **at}
    shown.update_xaxes(range=[-0.5, end], ticktext=above, side="top", tickangle=0, **bare)
    shown.update_yaxes(range=[end, -0.5], ticktext=beside, automargin=True, **bare)


# A Report -> one page that needs no network: verdict, findings and ranks; below them pairs, curves and paces as a picture.


PANEL, TALL, TOP, BOTTOM = 235, 620, 80, 90
"""Pixels: a panel beside the heat map, the least height of the heat map, the margins."""
MATRIX_WIDTH, GAP = 0.5, 0.09
NARROW_MATRIX, NARROW_PANEL = 330, 220
NOTHING = "nothing was timed and every tested pair is healthy, so there is nothing to draw"


def write_page(report: Report, path: Path) -> None:
    """Write the page. Raises UsageError for a target that cannot be written, ImpossiblePlan where plotly is absent."""
    page.check_target(path)
    page.check_extra(plotly=True)
    page.write_page(page_of(report), path)


def page_of(report: Report) -> Page:
    """What the page says and shows."""
    drawn = bool(shows_pairs(report) or report.speeds or report.paces)
    return Page(
        title=f"dsdoctor comm, {report.world} ranks",
        run=tuple(_facts(report)) + (() if drawn else (NOTHING,)),
        verdict=report.verdict,
        findings=report.findings,
        parts=((_picture(report),) if drawn else ()) + _ranks(report),
    )


def shows_pairs(report: Report) -> bool:
    """Whether a pair was timed or stands out. Of pairs that were only reached there is nothing to see."""
    return any(cell.bandwidth or cell.bad for cell in cells(report).values())


def _facts(report: Report) -> Iterator[str]:
    yield f"{report.world} ranks by {report.launcher}"
    yield report.backend
    yield f"{report.mode.value}, {report.seconds:.1f} s"
    yield from (f"{name} {version}" for name, version in report.versions.items())
    for result in report.phases:
        took = "" if result.state is PhaseState.SKIPPED else f" {result.seconds:.1f} s"
        yield f"{MARKS[result.state]} {result.phase.value}{took}"


def _ranks(report: Report) -> tuple[Listing, ...]:
    rows = tuple(rank_lines(report, verbose=True))
    return (Listing(title="ranks", lines=rows, opened=report.state is not PhaseState.OK),) if rows else ()


def _picture(report: Report) -> Picture:
    shown = figure(report)
    parts = {"between ranks": shows_pairs(report), "by size": report.speeds, "by rank": report.paces}
    return Picture(
        title=f"What was measured {', '.join(name for name, there in parts.items() if there)}",
        figure=shown,
        narrow=_narrow(report, shown),
    )


def _narrow(report: Report, shown: "Figure") -> dict[str, object]:
    """The panels below each other; at the heat map's side the ranks without their hosts' names."""
    pairs = shows_pairs(report)
    panels = 2 * bool(report.speeds) + bool(report.paces)
    heights = [*([NARROW_MATRIX] if pairs else []), *[NARROW_PANEL] * panels]
    found = stacked(shown, heights)
    if pairs:
        inner = sum(heights) + 96 * (len(heights) - 1)
        _, _, above = ticks(axis_of(report))
        found |= {
            "yaxis.ticktext": above,
            "coloraxis.colorbar.x": 0.5,
            "coloraxis.colorbar.y": 1 - (NARROW_MATRIX + 10) / inner,
            "coloraxis.colorbar.len": 0.9,
        }
    return found


def figure(report: Report) -> "Figure":
    """Pairs at the left; at the right, below each other, bandwidths, times and paces: each as far as it was measured.

    Raises ImportError where there is no plotly.
    """
    from plotly.subplots import make_subplots

    panels = [*(("bandwidth", "latency") if report.speeds else ()), *(("pace",) if report.paces else ())]
    pairs = shows_pairs(report)
    rows, col = max(1, len(panels)), 2 if pairs else 1
    shown = make_subplots(
        rows=rows,
        cols=col,
        specs=[[*([{"rowspan": rows} if not row else None] if pairs else []), {}] for row in range(rows)],
        column_widths=[MATRIX_WIDTH, 1 - MATRIX_WIDTH] if pairs else None,
        horizontal_spacing=GAP,
        vertical_spacing=0.12 if rows > 1 else 0,
        subplot_titles=[
            *(["MB/s: rows send, columns receive"] if pairs else []),
            *map(TITLES.__getitem__, panels),
        ],
    )
    if pairs:
        add_matrix(shown, report, row=1, col=1)
    if report.speeds:
        add_curves(shown, report, bandwidth=1, latency=2, col=col)
    if report.paces:
        add_paces(shown, report, row=rows, col=col)
    _lay_out(shown, pairs=pairs, panels=panels)
    return shown


TITLES = {
    "bandwidth": "busbw by size, GB/s",
    "latency": "time by size: p50, dotted p99",
    "pace": "the same work on every rank",
}


def _lay_out(shown: "Figure", *, pairs: bool, panels: list[str]) -> None:
    """Sizes in pixels; titles at the left above their panels. The page has the legend."""
    inner = max(TALL if pairs else 0, PANEL * len(panels), PANEL)
    shown.update_layout(
        height=inner + TOP + BOTTOM,
        margin={"t": TOP, "r": 24, "b": BOTTOM, "l": 28},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left"},
        bargap=0.25,
    )
    titles = list(shown.select_annotations())[: len(panels) + pairs]
    if pairs:
        _place_matrix(shown, inner, titles[0])
    for title in titles[pairs:]:
        number = titles.index(title) + 1
        start, _ = shown.layout[f"xaxis{number if number > 1 else ''}"].domain
        title.update(x=start, xanchor="left", font={"size": 13})


def _place_matrix(shown: "Figure", inner: int, title: Any) -> None:
    """The heat map's title above its axis, the scale of its colours below it."""
    start, end = shown.layout.xaxis.domain
    title.update(x=start, xanchor="left", yshift=24, font={"size": 13})
    scale = {
        "x": (start + end) / 2,
        "xanchor": "center",
        "y": -14 / inner,
        "yanchor": "top",
        "len": (end - start) * 0.7,
    }
    shown.update_layout(coloraxis={"colorbar": scale})
