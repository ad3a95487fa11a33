"""When each rank called its last collectives, and what it has done since -> a plotly figure.

plotly is imported where it is needed: the base install has none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsdoctor.hang.case import Case
from dsdoctor.hang.models import Incident, Operation, RankView
from dsdoctor.hang.stacks import ranks_words
from dsdoctor.ui.page import safe

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_ROWS = 48
ROW, MARGINS, LEAST_HEIGHT = 30, 110, 240
"""Pixels."""
COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#bcbd22")
OTHERS = "#7f7f7f"
WAITS, WORKS, ABSENT = "#aab2ba", "#e6862a", "#d62728"
LEAST_BEFORE, SHARE_BEFORE = 2.0, 0.35
"""Seconds of calls that are shown before the stillness, and their share of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the picture: one rank, or several that are alike."""

    name: str
    view: RankView
    calls: tuple[tuple[str, Operation], ...]


def calls_of(view: RankView) -> tuple[tuple[str, Operation], ...]:
    """The recorded calls of a rank whose time is known, each with its group, in their order."""
    groups = view.sample.groups if view.sample else ()
    found = [(group.name, each) for group in groups for each in group.operations if each.called]
    return tuple(sorted(found, key=lambda call: call[1].called))


def has_times(incident: Incident) -> bool:
    """Whether there is anything to draw."""
    return any(calls_of(view) for view in incident.ranks)


def rows_of(case: Case) -> list[Row]:
    """A row for each rank; of very many ranks those that are alike in one."""
    views = case.incident.ranks
    if len(views) <= MOST_ROWS:
        return [Row(name=f"rank {view.rank}", view=view, calls=calls_of(view)) for view in views]
    alike: dict[tuple[object, ...], list[RankView]] = {}
    for view in views:
        numbers = tuple((group.name, group.sequence) for group in (view.sample.groups if view.sample else ()))
        alike.setdefault((case.where(view), view.state, numbers), []).append(view)
    few_first = sorted(alike.values(), key=lambda members: (len(members), members[0].rank))[:MOST_ROWS]
    return [
        Row(name=_short(ranks_words(each.rank for each in members)), view=members[0], calls=calls_of(members[0]))
        for members in few_first
    ]


def figure(case: Case) -> "Figure":
    """Rows from the top, seconds before the look to the right. Raises ImportError where there is no plotly."""
    from plotly.graph_objects import Figure

    rows = rows_of(case)
    every = [operation.called for row in rows for _, operation in row.calls]
    end = max([case.incident.when, *every])
    shown = Figure()
    _add_waits(shown, case, rows, end)
    names = sorted({operation.name for row in rows for _, operation in row.calls})
    for place, name in enumerate(names):
        _add_calls(shown, rows, name, end, COLOURS[place] if place < len(COLOURS) else OTHERS)
    last = max(every)
    before = max(LEAST_BEFORE, SHARE_BEFORE * (end - last))
    _lay_out(shown, rows, first=max(min(every), last - before) - end)
    return shown


def _add_waits(shown: "Figure", case: Case, rows: list[Row], end: float) -> None:
    """What each rank has done since its last call, as far as the calls are known."""
    from plotly.graph_objects import Bar

    drawn = [row for row in rows if row.calls]
    since = [row.calls[-1][1].called for row in drawn]
    shown.add_trace(
        Bar(
            orientation="h",
            y=[safe(row.name) for row in drawn],
            base=[when - end for when in since],
            x=[end - when for when in since],
            width=0.62,
            marker={"color": [_colour(case, row.view) for row in drawn]},
            text=[safe(case.where(row.view)) for row in drawn],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "#14171a"},
            constraintext="inside",
            hovertext=[_told(case, row, end - when) for row, when in zip(drawn, since, strict=True)],
            hoverinfo="text",
            showlegend=False,
        )
    )


def _add_calls(shown: "Figure", rows: list[Row], name: str, end: float, colour: str) -> None:
    from plotly.graph_objects import Scatter

    calls = [(row, group, each) for row in rows for group, each in row.calls if each.name == name]
    shown.add_trace(
        Scatter(
            x=[each.called - end for _, _, each in calls],
            y=[safe(row.name) for row, _, _ in calls],
            mode="markers",
            name=safe(name),
            marker={"symbol": "line-ns", "size": 17, "line": {"width": 2, "color": colour}, "color": colour},
            hovertext=[
                safe(f"{row.name}: {name} of {_sizes(each)}, number {each.sequence} of group {group}")
                for row, group, each in calls
            ],
            hoverinfo="text",
            showlegend=True,
        )
    )


def _lay_out(shown: "Figure", rows: Iterable[Row], *, first: float) -> None:
    names = [safe(row.name) for row in rows]
    shown.update_layout(
        height=max(LEAST_HEIGHT, ROW * len(names) + MARGINS),
        margin={"t": 20, "r": 24, "b": 60, "l": 130},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left"},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis={"title": "seconds before the look", "range": [first * 1.03, 0], "zeroline": False},
        yaxis={"categoryorder": "array", "categoryarray": names[::-1], "range": [-0.6, len(names) - 0.4]},
    )


def _colour(case: Case, view: RankView) -> str:
    if view.rank in case.waiting_ranks:
        return WAITS
    return WORKS if view.activity else ABSENT


def _told(case: Case, row: Row, seconds: float) -> str:
    return safe(f"{row.name}, for {seconds:.1f} s: {case.where(row.view)}")


def _sizes(operation: Operation) -> str:
    return " ".join("x".join(map(str, each)) or "1" for each in operation.sizes) or "nothing"


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
