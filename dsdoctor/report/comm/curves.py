"""Speeds and paces of ranks -> traces of plotly: bandwidths and times as curves over size, paces as bars.

plotly is imported where it is needed: the base install has none.
"""

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dsdoctor.comm.results import Limit, Report, Speed
from dsdoctor.report.comm.pairs import named
from dsdoctor.ui.page import safe
from dsdoctor.ui.table import duration, gigabytes, size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LIMIT_LINE = "#d62728"
COLOURS = (
    *("#3f8fc4", "#e6862a", "#3aa56b", "#c2549d", "#8b7bd1", "#b08d3c"),
    *("#d1605e", "#4fb3bf", "#8a9199", "#9c755f", "#6f9c2c", "#e58fb8"),
)
BARS = ("#66788a", "#c9a227")
"""Other colours than those of the curves, for both are in one legend."""
MOST_TICKS, MOST_NAMED = 8, 16


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
        f"slowest rank {safe(named(report, speed.slowest))}",
    ]
    return "<br>".join(parts)


def _size_axes(shown: "Figure", report: Report, *, bandwidth: int, latency: int, col: int) -> None:
    """Logarithmic axes with readable ticks; everything that is drawn is within them."""
    sizes = sorted({speed.size for speed in report.speeds})
    powers = sorted({2 ** round(math.log2(max(count, 1))) for count in sizes})
    marks = powers[:: max(1, math.ceil(len(powers) / MOST_TICKS))]
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
    every = max(1, math.ceil(len(powers) / MOST_TICKS))
    return [10.0**power for power in powers[::every]], [low - 0.25, high + 0.5]


def _plain(bandwidth: float) -> str:
    """A power of ten in GB/s, such as "0.001"."""
    return f"{bandwidth:,.6f}".rstrip("0").rstrip(".")


def add_paces(shown: "Figure", report: Report, *, row: int, col: int) -> None:
    """Bars by rank: how long it takes for the same work alone, and how long it then waits for the others."""
    from plotly import graph_objects as go

    places = [pace.rank for pace in report.paces]
    hosts = [safe(f"rank {named(report, pace.rank)}") for pace in report.paces]
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
    few = {"dtick": 1} if len(places) <= MOST_NAMED else {}
    shown.update_xaxes(title={"text": "rank", "standoff": 2}, showgrid=False, zeroline=False, row=row, col=col, **few)
    shown.update_yaxes(title={"text": "ms", "standoff": 4}, rangemode="tozero", automargin=True, row=row, col=col)
