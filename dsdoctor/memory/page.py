"""A ledger of memory -> one page: whether it fits, what to change, and a bar for each part of a step with what it is made of."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsdoctor.core.finding import Severity
from dsdoctor.memory.judge import MemoryReport
from dsdoctor.memory.models import Moment, Place
from dsdoctor.memory.text import COLUMNS, GIB, MIB, amount, batch_words, cell, peak_line, peak_moment
from dsdoctor.ui.page import Page, Picture, Table, safe
from dsdoctor.ui.screen import most_harmful
from dsdoctor.ui.terminal import MARKS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


COLOURS = (
    *("#3f8fc4", "#e6862a", "#3aa56b", "#c2549d", "#8b7bd1", "#b08d3c"),
    *("#d1605e", "#4fb3bf", "#8a9199", "#9c755f", "#6f9c2c", "#e58fb8"),
)
LIMIT = "#d62728"
HEIGHT, NARROW_HEIGHT = 520, 400
CAPTION = "Each bar is the moment of that part of a step at which a rank's device holds most."


def page_of(done: MemoryReport, *, limit: int | None, fits: str) -> Page:
    """The page. ``limit``: bytes of a GPU, None where none was named; ``fits``: the line that says that it fits, or ""."""
    unit, name = (GIB, "GiB") if done.prediction.peak.device >= GIB else (MIB, "MiB")
    moments = {
        part: moment for part, points in COLUMNS.items() if (moment := peak_moment(done.prediction, points)) is not None
    }
    caption = CAPTION + (f" The dashed line is a GPU's {amount(limit)}." if limit else "")
    drawn = Picture(
        title=f"What a rank's device holds, {name}",
        caption=caption,
        figure=figure(moments, unit, limit),
        narrow={"height": NARROW_HEIGHT, "margin.l": 40, "margin.r": 8, "xaxis.tickfont.size": 10},
    )
    host = any(row.place == "host" for moment in moments.values() for row in moment.rows)
    ledgers = [_ledger(moments, "device", unit, name), *([_ledger(moments, "host", unit, name)] if host else [])]
    return Page(
        title=f"dsdoctor memory, {done.now.model.name}",
        run=tuple(_facts(done)),
        verdict=_verdict(done, fits),
        findings=done.findings,
        parts=(drawn, *_changes(done), *ledgers),
    )


def _facts(done: MemoryReport) -> Iterator[str]:
    settings, model = done.now.settings, done.now.model
    yield f"{model.elements:,} parameters"
    yield f"ZeRO stage {settings.stage}, {settings.dtype}"
    yield f"{done.now.layout.world} ranks"
    if done.now.run:
        yield batch_words(done.now.run)
    yield f"DeepSpeed {settings.version}"
    yield peak_line(done)
    low, high = (sum(each) for each in zip(*((b.low, b.high) for b in done.overheads), strict=True))
    yield f"overhead, not measured here: {amount(low)} to {amount(high)}"


def _verdict(done: MemoryReport, fits: str) -> str:
    """The worst finding's title; where there is none, that it fits, or the peak."""
    worst = next(iter(most_harmful(done.findings)), None)
    if worst is not None and worst.severity is not Severity.NOTE:
        return f"{MARKS[worst.severity]} {worst.title}"
    return fits or f"· {peak_line(done)}"


def _things(moments: dict[str, Moment], place: Place) -> dict[str, dict[str, int]]:
    """Bytes of each thing in each part of a step, the largest thing first."""
    found: dict[str, dict[str, int]] = {}
    for part, moment in moments.items():
        for row in moment.rows:
            if row.place == place:
                found.setdefault(row.what, {})[part] = row.size
    return dict(sorted(found.items(), key=lambda item: -max(item[1].values())))


def figure(moments: dict[str, Moment], unit: int, limit: int | None) -> "Figure":
    """A bar for each part of a step. Raises ImportError where there is no plotly."""
    from plotly import graph_objects as go

    shown = go.Figure()
    parts = list(moments)
    for number, (what, sizes) in enumerate(_things(moments, "device").items()):
        values = [sizes.get(part, 0) for part in parts]
        bars = go.Bar(
            x=parts,
            y=[value / unit for value in values],
            name=safe(what),
            marker={"color": COLOURS[number % len(COLOURS)], "line": {"width": 0}},
            hovertext=[
                f"<b>{safe(what)}</b><br>{part}: {amount(value)}" for part, value in zip(parts, values, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
            legendgroup=safe(what),
        )
        shown.add_trace(bars)
    if limit:
        shown.add_hline(y=limit / unit, line={"color": LIMIT, "width": 1.5, "dash": "dash"})
    shown.update_layout(
        barmode="stack",
        height=HEIGHT,
        bargap=0.3,
        margin={"t": 34, "b": 40, "l": 56, "r": 24},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left"},
        yaxis={"rangemode": "tozero", "automargin": True},
        xaxis={"type": "category", "showgrid": False},
    )
    return shown


def _changes(done: MemoryReport) -> tuple[Table, ...]:
    if not done.changes:
        return ()
    rows = tuple(
        (
            change.what,
            amount(change.won),
            amount(change.peak),
            ", ".join(f"{key} = {value}" for key, value in change.set),
            change.cost,
        )
        for change in done.changes
    )
    head = ("change", "less", "peak then", "set", "costs")
    return (Table(title="Possible changes, cheapest first (each on its own)", head=head, rows=rows, align="<>><<"),)


def _ledger(moments: dict[str, Moment], place: Place, unit: int, name: str) -> Table:
    things = _things(moments, place)
    rows = [(what, *(cell(sizes.get(part, 0), unit) for part in moments)) for what, sizes in things.items()]
    totals = [sum(row.size for row in moment.rows if row.place == place) for moment in moments.values()]
    rows.append(("in all", *(cell(total, unit) for total in totals)))
    where = "a rank's device" if place == "device" else "the host for a rank"
    title = (
        f"{name} on {where}, at the peak of each part"
        if place == "device"
        else f"{name} of {where}, at the same moments"
    )
    return Table(title=title, head=("", *moments), rows=tuple(rows), align="<" + ">" * len(moments))
