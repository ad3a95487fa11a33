"""Pictures of runs -> a plotly figure: a row for each module, its range against the limit, its headroom batch by batch.

plotly is imported where it is needed: the base install has none.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dsdoctor.overflow.frames.dtypes import LIMITS
from dsdoctor.overflow.trace.extremes import ModuleRow, Picture, bits
from dsdoctor.report.labels import batches_of, hover, label
from dsdoctor.ui.page import safe, short

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Heatmap

COLOURS = ("#1f77b4", "#e6862a")
BAD, LIMIT_LINE = "#d4009b", "#d62728"
LEAST_BITS, MOST_BITS = -4, 16
SCALE = (
    (0.0, "#67000d"),
    (0.199, "#cb181d"),
    (0.2, "#f16913"),
    (0.3, "#fdae61"),
    (0.45, "#fee090"),
    (0.65, "#abd9e9"),
    (1.0, "#2c7bb6"),
)
"""From -4 to 16 bits; 0.2 is 0 bits: what is dark red does not fit."""
ROW, TALLEST, SHORTEST, TOP, TOP_OF_PAGE, BOTTOM = 17, 9000, 420, 160, 92, 30
HEADING, LEGEND, TITLES, BAR = 10, 74, 22, 44
"""Pixels; the bar of colours is at the right, above the titles. A few modules have taller rows, so that they fill the page."""


def figure(pictures: dict[str, Picture], dtype: str, *, title: str = "", meta: Iterable[str] = ()) -> "Figure":
    """One run, or two beside each other. ``dtype``: whose limit they are held against. A page has ``title``, ``meta`` (lines
    below it) and the legend itself; an image has them in the figure.

    Raises ImportError where there is no plotly.
    """
    from plotly.subplots import make_subplots

    rows = _all_rows(pictures)
    names = list(pictures)
    heads = [f"values, and the limit of {dtype}", *(f"bits below it, by batch{_of(name)}" for name in names)]
    shown = make_subplots(
        rows=1,
        cols=1 + len(names),
        shared_yaxes=True,
        horizontal_spacing=0.02,
        column_widths=[0.4, *[0.6 / len(names)] * len(names)],
        subplot_titles=heads,
    )
    for place, (name, picture) in enumerate(pictures.items()):
        _add_ranges(shown, name, picture, dtype, COLOURS[place], thin=bool(place))
        _add_heat(shown, picture, rows, dtype, column=2 + place, first=not place)
    heading = "<br>".join([safe(title), *(f"<sup>{safe(line)}</sup>" for line in meta)])
    _lay_out(shown, rows, dtype, heading=heading if title else "")
    return shown


def body(shown: "Figure") -> int:
    """Pixels that the rows take."""
    return int(shown.layout.height - shown.layout.margin.t - shown.layout.margin.b)


def _of(name: str) -> str:
    return f" ({safe(name)})" if name else ""


def _all_rows(pictures: dict[str, Picture]) -> list[str]:
    """The labels of all rows in the order of execution; those that only the second run has come last."""
    return list(dict.fromkeys(label(row) for picture in pictures.values() for row in picture.rows.values()))


def _add_ranges(shown: "Figure", name: str, picture: Picture, dtype: str, colour: str, *, thin: bool) -> None:
    """A line from the least value above zero to the largest, a dot at the largest, a cross where nan or inf is."""
    from plotly import graph_objects as go

    rows = [(row, row.most) for row in picture.rows.values() if row.most]
    line_x: list[float | None] = []
    line_y: list[str | None] = []
    for row, most in rows:
        line_x += [row.least.value if row.least else most.value, most.value, None]
        line_y += [label(row), label(row), None]
    group: dict[str, Any] = {"legendgroup": name or "range"}
    line = {"color": colour, "width": 1.5 if thin else 5}
    shown.add_trace(
        go.Scatter(
            x=line_x,
            y=line_y,
            mode="lines",
            line=line,
            opacity=0.9 if thin else 0.35,
            hoverinfo="skip",
            showlegend=False,
            **group,
        ),
        row=1,
        col=1,
    )
    dots = go.Scatter(
        x=[most.value for _, most in rows],
        y=[label(row) for row, _ in rows],
        mode="markers",
        marker={"color": colour, "size": 8, "symbol": "diamond-open" if thin else "circle"},
        text=[hover(row, dtype) for row, _ in rows],
        hovertemplate="%{text}<extra></extra>",
        name=f"{safe(name)}: least above 0 to largest" if name else "least above 0 to largest",
        **group,
    )
    shown.add_trace(dots, row=1, col=1)
    _add_crosses(shown, name, [row for row in picture.rows.values() if row.bad], dtype)


def _add_crosses(shown: "Figure", name: str, rows: list[ModuleRow], dtype: str) -> None:
    from plotly import graph_objects as go

    if not rows:
        return
    crosses = go.Scatter(
        x=[LIMITS[dtype]] * len(rows),
        y=[label(row) for row in rows],
        mode="markers",
        marker={"color": BAD, "size": 10, "symbol": "x"},
        text=[hover(row, dtype) for row in rows],
        hovertemplate="%{text}<extra></extra>",
        name=f"nan or inf{_of(name)}",
    )
    shown.add_trace(crosses, row=1, col=1)


def _add_heat(shown: "Figure", picture: Picture, rows: list[str], dtype: str, *, column: int, first: bool) -> None:
    """Headroom, module by batch; over it the cells that hold a nan or an inf."""
    from plotly import graph_objects as go

    by_label = {label(row): row for row in picture.rows.values()}
    columns = picture.columns
    batches = [batches_of(picture, place) for place in columns]
    cells = [[by_label[name].cells.get(place) if name in by_label else None for place in columns] for name in rows]
    room = [[bits(cell, dtype) if cell else None for cell in line] for line in cells]
    shown.add_trace(
        go.Heatmap(
            x=batches,
            y=rows,
            z=[[None if value is None else round(value, 2) for value in line] for line in room],
            coloraxis="coloraxis",
            hovertemplate="<b>%{y}</b><br>batch %{x}<br>%{z} bits<extra></extra>",
            hoverongaps=False,
        ),
        row=1,
        col=column,
    )
    shown.update_xaxes(row=1, col=column, nticks=12 if picture.width == 1 else 5)
    if any(cell and cell.bad for line in cells for cell in line):
        bad = [[1 if cell and cell.bad else None for cell in line] for line in cells]
        shown.add_trace(_bad_cells(batches, rows, bad, in_legend=first), row=1, col=column)


def _bad_cells(batches: list[str], rows: list[str], bad: list[list[int | None]], *, in_legend: bool) -> "Heatmap":
    """The cells that hold a nan or an inf, to lie over the others."""
    from plotly import graph_objects as go

    return go.Heatmap(
        x=batches,
        y=rows,
        z=bad,
        colorscale=[[0, BAD], [1, BAD]],
        showscale=False,
        showlegend=in_legend,
        name="nan or inf in this batch",
        hovertemplate="<b>%{y}</b><br>batch %{x}<br><b>nan or inf</b><extra></extra>",
        hoverongaps=False,
    )


def _lay_out(shown: "Figure", rows: list[str], dtype: str, *, heading: str) -> None:
    """Sizes in pixels: from top to bottom the heading, the legend, the columns' titles, their axes, the rows."""
    inner = min(max(SHORTEST, ROW * len(rows)), TALLEST)
    top = TOP if heading else TOP_OF_PAGE
    shown.update_layout(
        height=inner + top + BOTTOM,
        margin={"t": top, "r": 20, "b": BOTTOM, "l": 10},
        template="plotly_white",
        legend={"orientation": "h", "x": 0, "y": 1 + LEGEND / inner, "yanchor": "top"},
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left"},
    )
    for place, title in enumerate(shown.layout.annotations):
        start, _ = shown.layout[f"xaxis{place + 1 if place else ''}"].domain
        title.update(font={"size": 13}, yshift=TITLES, x=start, xanchor="left")
    if heading:
        corner = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "top"}
        shown.add_annotation(
            text=heading,
            font={"size": 17},
            showarrow=False,
            align="left",
            yshift=TOP - HEADING,
            name="heading",
            **corner,
        )
    bar: dict[str, Any] = {
        "orientation": "h",
        "thickness": 8,
        "len": 0.2,
        "x": 1,
        "xanchor": "right",
        "yanchor": "bottom",
    }
    bar |= {"y": 1 + BAR / inner, "ypad": 0, "tickfont": {"size": 10}}
    scale = {"cmin": LEAST_BITS, "cmax": MOST_BITS, "colorscale": [list(step) for step in SCALE]}
    shown.update_layout(coloraxis={**scale, "colorbar": bar})
    _lay_out_axes(shown, rows, every=math.ceil(ROW * len(rows) / inner))
    shown.add_vline(x=LIMITS[dtype], line={"color": LIMIT_LINE, "width": 2, "dash": "dash"}, row=1, col=1)


def _lay_out_axes(shown: "Figure", rows: list[str], *, every: int) -> None:
    """``every``: which labels there is room for, such as 1 for all."""
    ticks = rows[::every]
    shown.update_yaxes(type="category", categoryorder="array", categoryarray=rows, range=[len(rows) - 0.5, -0.5])
    shown.update_yaxes(
        tickmode="array",
        tickvals=ticks,
        ticktext=[short(name) for name in ticks],
        tickfont={"size": 11},
        automargin=True,
    )
    shown.update_xaxes(type="category", side="top", tickangle=0)
    shown.update_xaxes(
        row=1,
        col=1,
        type="log",
        nticks=8,
        exponentformat="power",
        minor={"ticks": "", "showgrid": False},
        tickfont={"size": 11},
    )
