"""Pictures of runs -> a plotly figure, and one page around it: what holds nan or inf and what is nearest to the limit, in words;
below it a row for each module, its range against the limit, its headroom batch by batch.

plotly is imported where it is needed: the base install has none. Module names come from the user's model, so nothing in them is
read as a tag.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dsdoctor.core.finding import Step
from dsdoctor.overflow.frames.frame import LIMITS
from dsdoctor.overflow.trace.headroom import Extreme, ModuleRow, Picture, bits
from dsdoctor.overflow.trace.text import WHOLE_MODEL, counted
from dsdoctor.ui.page import PANEL_GAP_PIXELS, Page, Table, safe, short, stacked
from dsdoctor.ui.page import Picture as Drawing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Heatmap

COLOURS = ("#1f77b4", "#e6862a")
BAD, LIMIT_LINE = "#d4009b", "#d62728"
MIN_BITS, MAX_BITS = -4, 16
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
ROW, MAX_HEIGHT, MIN_HEIGHT, TOP, TOP_OF_PAGE, BOTTOM = 17, 9000, 420, 160, 92, 30
HEADING, LEGEND, TITLES, BAR = 10, 74, 22, 44
"""Pixels; the bar of colours is at the right, above the titles. A few modules have taller rows, so that they fill the page."""
MAX_ROWS = 12
MAX_NARROW_HEIGHT, MAX_NARROW_LABEL = 4000, 16
"""Pixels of a panel, letters of a module's name: on a telephone."""
CAPTION = (
    "Left: a dot is the largest value of a module, its line goes down to the least above zero. "
    "Right: bits that are left below the limit; below 0 it does not fit."
)


def label(row: ModuleRow) -> str:
    """A row's name, safe to stand in a page.

    >>> label(ModuleRow("h.1.<script>", "Linear", 1)), label(ModuleRow("", "GPT2", 0))
    ('h.1.&lt;script&gt; (call 1)', '(the whole model)')
    """
    call = f" (call {row.call})" if row.call else ""
    return safe(row.module or WHOLE_MODEL) + call


def hover(row: ModuleRow, dtype: str) -> str:
    """The text that appears when the mouse is over a row: the figures, of which tensor, in which batch and rank."""
    parts = [f"<b>{label(row)}</b> {safe(row.kind)}"]
    if row.bad:
        bad = row.bad
        parts.append(
            f"<b>{bad.nan} nan, {bad.inf} inf</b> in {safe(bad.tensor)} (batch {bad.batch}, rank {bad.rank}, the first)"
        )
    if row.most:
        room = math.log2(LIMITS[dtype] / row.most.value)
        parts += [f"abs max {_extreme(row.most)}", f"{room:.1f} bits below {dtype}'s limit {LIMITS[dtype]:.4g}"]
    if row.least:
        parts.append(f"least above zero {_extreme(row.least)}")
    return "<br>".join(parts)


def _extreme(extreme: Extreme) -> str:
    return safe(
        f"{extreme.value:.3e} in {extreme.tensor} {extreme.dtype} {list(extreme.shape)}, batch {extreme.batch}, rank {extreme.rank}"
    )


def batches_of(picture: Picture, column: int) -> str:
    """The batches of a column in words.

    >>> batches_of(Picture(first=10, width=1), 3), batches_of(Picture(first=10, width=4), 3)
    ('13', '22-25')
    """
    first = picture.first + column * picture.width
    return str(first) if picture.width == 1 else f"{first}-{first + picture.width - 1}"


def figure(pictures: dict[str, Picture], dtype: str, *, title: str = "", meta: Iterable[str] = ()) -> "Figure":
    """One run, or two side by side. ``dtype``: whose limit they are held against. A page has ``title``, ``meta`` (lines
    below it) and the legend itself; an image has them in the figure.

    Raises ImportError where there is no plotly.
    """
    from plotly.subplots import make_subplots

    # those that only the second run has come last
    rows = list(dict.fromkeys(label(row) for picture in pictures.values() for row in picture.rows.values()))
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
    inner = min(max(MIN_HEIGHT, ROW * len(rows)), MAX_HEIGHT)
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
    scale = {"cmin": MIN_BITS, "cmax": MAX_BITS, "colorscale": [list(step) for step in SCALE]}
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


def page_of(
    pictures: dict[str, Picture], dtype: str, *, title: str, meta: tuple[str, ...], next_step: Step | None = None
) -> Page:
    """The page of one run, or of two side by side."""
    shown = figure(pictures, dtype)
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
            Drawing(
                title="Every module", caption=CAPTION, figure=shown, narrow=_narrow(shown, panels=1 + len(pictures))
            ),
        ),
    )


def verdict(pictures: dict[str, Picture], dtype: str) -> str:
    """One line: what holds nan or inf, else what is nearest to the limit."""
    verdicts = [_run_verdict(picture, dtype) for picture in pictures.values()]
    mark = next(mark for mark in "✗!✓" if any(each.startswith(mark) for each in verdicts))
    if len(verdicts) == 1:
        return verdicts[0]
    return f"{mark} " + "; ".join(f"{name}: {each[2:]}" for name, each in zip(pictures, verdicts, strict=True))


def _run_verdict(picture: Picture, dtype: str) -> str:
    bad = sorted((row.bad.batch, place, row) for place, row in enumerate(picture.rows.values()) if row.bad)
    seen = f"{counted(len(picture.rows), 'module', 'modules')}, {counted(picture.batches, 'batch', 'batches')}"
    if bad:
        batch, _, row = bad[0]
        assert row.bad is not None
        where = f"{row.module or WHOLE_MODEL}, {row.bad.tensor}, batch {batch}, rank {row.bad.rank}"
        return f"✗ nan or inf in {len(bad):,} of {seen}; the first: {where}"
    nearest = _by_room(picture, dtype)
    if not nearest:
        return f"! nothing was measured in {seen}"
    room, row = nearest[0]
    name = row.module or WHOLE_MODEL
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
        for row in bad[:MAX_ROWS]:
            assert row.bad is not None
            what = f"✗ {row.bad.nan} nan, {row.bad.inf} inf"
            yield (f"{of}{row.module or WHOLE_MODEL}", what, "", row.bad.tensor, str(row.bad.batch), str(row.bad.rank))
        for room, row in _by_room(picture, dtype)[: max(MAX_ROWS - len(bad), 3)]:
            most = row.most
            assert most is not None
            left = f"{'✗ ' if room < 0 else '! ' if room < 0.95 else ''}{room:.1f}"
            value = f"{most.value:.3e}"
            yield (
                f"{of}{row.module or WHOLE_MODEL}",
                left,
                value,
                f"{most.tensor} {most.dtype}",
                str(most.batch),
                str(most.rank),
            )


def _narrow(shown: "Figure", *, panels: int) -> dict[str, object]:
    """The panels below each other, with the ends of the modules' names."""
    height = min(body(shown), MAX_NARROW_HEIGHT)
    found = stacked(shown, [height] * panels, gap=PANEL_GAP_PIXELS, top=70)
    names = [short(name, MAX_NARROW_LABEL) for name in shown.layout.yaxis.tickvals]
    for number in ("", *map(str, range(2, panels + 1))):
        found[f"yaxis{number}.ticktext"] = names
    above = found[f"yaxis{panels}.domain"]
    assert isinstance(above, list)
    total = height * panels + PANEL_GAP_PIXELS * (panels - 1)
    return found | {"coloraxis.colorbar.y": above[1] + BAR / total, "coloraxis.colorbar.len": 0.4}
