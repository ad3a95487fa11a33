"""A verdict on a run in which nothing moves -> one page that needs no network: verdict, who called what and when, stacks.

plotly is imported where it is needed: the base install has none.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from dsdoctor.core.processes import LETTERS
from dsdoctor.hang.incident_view import IncidentView
from dsdoctor.hang.models import PROCESSES, RECORDERS, GroupState, Incident, Operation, RankView, Verdict
from dsdoctor.hang.stacks import main_stack
from dsdoctor.hang.verdict import headline
from dsdoctor.hang.waiting import sizes_text
from dsdoctor.ranks.nodelist import ranks_in_words
from dsdoctor.ui import page
from dsdoctor.ui.page import Listing, Page, Picture, Table, safe
from dsdoctor.ui.table import clipped
from dsdoctor.ui.terminal import MARKS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_TIMELINE_ROWS = 48
MAX_NAME_LENGTH = 24
ROW, MARGINS, MIN_HEIGHT = 30, 110, 240
"""Pixels."""
COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#bcbd22")
OTHER_COLOUR = "#7f7f7f"
WAITS, WORKS, ABSENT = "#aab2ba", "#e6862a", "#d62728"
MIN_SECONDS_BEFORE, MIN_SHARE_BEFORE = 2.0, 0.35
"""Seconds of calls that are shown before the stillness, and their share of it."""
COLUMNS, MAX_GROUPS, MAX_ROWS = 8, 6, 200
NEVER = "–"
LAST_TIME = datetime.max.replace(tzinfo=timezone.utc).timestamp() - 1
"""Seconds: what is later is no time of a file of ours."""


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


def rows_of(run: IncidentView) -> list[Row]:
    """A row for each rank; of very many ranks those that are alike in one."""
    views = run.incident.ranks
    if len(views) <= MAX_TIMELINE_ROWS:
        return [Row(name=f"rank {view.rank}", view=view, calls=calls_of(view)) for view in views]
    alike: dict[tuple[object, ...], list[RankView]] = {}
    for view in views:
        numbers = tuple((group.name, group.sequence) for group in (view.sample.groups if view.sample else ()))
        alike.setdefault((run.where(view), view.state, numbers), []).append(view)
    few_first = sorted(alike.values(), key=lambda members: (len(members), members[0].rank))[:MAX_TIMELINE_ROWS]
    return [
        Row(
            name=clipped(ranks_in_words(each.rank for each in members), MAX_NAME_LENGTH),
            view=members[0],
            calls=calls_of(members[0]),
        )
        for members in few_first
    ]


def figure(run: IncidentView) -> "Figure":
    """Rows from the top, seconds before the look to the right. Raises ImportError where there is no plotly."""
    from plotly.graph_objects import Figure

    rows = rows_of(run)
    every = [operation.called for row in rows for _, operation in row.calls]
    end = max([run.incident.when, *every])
    shown = Figure()
    _add_waits(shown, run, rows, end)
    names = sorted({operation.name for row in rows for _, operation in row.calls})
    for place, name in enumerate(names):
        _add_calls(shown, rows, name, end, COLOURS[place] if place < len(COLOURS) else OTHER_COLOUR)
    last = max(every)
    before = max(MIN_SECONDS_BEFORE, MIN_SHARE_BEFORE * (end - last))
    _lay_out(shown, rows, first=max(min(every), last - before) - end)
    return shown


def _add_waits(shown: "Figure", run: IncidentView, rows: list[Row], end: float) -> None:
    """What each rank has done since its last call, as far as the calls are known."""
    from plotly.graph_objects import Bar

    drawn = [row for row in rows if row.calls]
    since = [row.calls[-1][1].called for row in drawn]
    colours = [WAITS if row.view.rank in run.waiting_ranks else WORKS if row.view.activity else ABSENT for row in drawn]
    shown.add_trace(
        Bar(
            orientation="h",
            y=[safe(row.name) for row in drawn],
            base=[when - end for when in since],
            x=[end - when for when in since],
            width=0.62,
            marker={"color": colours},
            text=[safe(run.where(row.view)) for row in drawn],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "#14171a"},
            constraintext="inside",
            hovertext=[
                safe(f"{row.name}, for {end - when:.1f} s: {run.where(row.view)}")
                for row, when in zip(drawn, since, strict=True)
            ],
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
                safe(f"{row.name}: {name} of {sizes_text(each) or 'nothing'}, number {each.sequence} of group {group}")
                for row, group, each in calls
            ],
            hoverinfo="text",
            showlegend=True,
        )
    )


def _lay_out(shown: "Figure", rows: Iterable[Row], *, first: float) -> None:
    names = [safe(row.name) for row in rows]
    shown.update_layout(
        height=max(MIN_HEIGHT, ROW * len(names) + MARGINS),
        margin={"t": 20, "r": 24, "b": 60, "l": 130},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left"},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis={"title": "seconds before the look", "range": [first * 1.03, 0], "zeroline": False},
        yaxis={"categoryorder": "array", "categoryarray": names[::-1], "range": [-0.6, len(names) - 0.4]},
    )


def check_page(path: Path) -> None:
    """Raise UsageError for a page that could not be written, ImpossiblePlan where what draws it is absent."""
    page.check_target(path)
    page.check_extra(plotly=True)


def write_page(incident: Incident, verdict: Verdict, path: Path) -> None:
    """Write the page."""
    page.write_page(page_of(incident, verdict), path)


def page_of(incident: Incident, verdict: Verdict) -> Page:
    """What the page says and shows."""
    run = IncidentView(incident)
    first = verdict.findings[0] if verdict.findings else None
    stacks = any(map(main_stack, incident.ranks))
    return Page(
        title=f"dsdoctor hang, {incident.world} ranks",
        run=tuple(_facts(incident)),
        verdict=f"{MARKS[first.severity]} {first.title}" if first else "✓ no hang detected",
        findings=verdict.findings,
        parts=(
            *((_timeline(incident, figure(run)),) if has_times(run.incident) else ()),
            *_calls(run),
            _ranks(run),
            *((Listing(title="stacks of all ranks, grouped", lines=verdict.stacks),) if stacks else ()),
        ),
    )


def _facts(incident: Incident) -> Iterator[str]:
    yield headline(incident)
    hosts = sorted({view.host for view in incident.ranks})
    if incident.source != RECORDERS:
        yield f"{len(hosts)} host{'s' * (len(hosts) != 1)}: {', '.join(hosts[:4])}{' …' * (len(hosts) > 4)}"
    if 0 < incident.when < LAST_TIME:
        yield datetime.fromtimestamp(incident.when, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    steps = sorted({view.sample.step for view in incident.ranks if view.sample and view.sample.step is not None})
    if steps:
        yield f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _timeline(incident: Incident, shown: "Figure") -> Picture:
    clock = "" if len({view.host for view in incident.ranks}) == 1 else ", by each host's own clock"
    return Picture(
        title="last collectives of each rank, over time",
        caption=f"A stroke is a call{clock}. A bar is the time since the last one: grey is blocked in a collective, "
        "red has not reached it, orange is working.",
        figure=shown,
        narrow={"margin.l": 70, "margin.r": 10},
    )


def _calls(run: IncidentView) -> Iterator[Table]:
    """For each group whose ranks are not alike a table: the last calls by number, ranks that called the same in one row."""
    groups: dict[str, dict[int, GroupState]] = {}
    for view in run.incident.ranks:
        for group in view.sample.groups if view.sample else ():
            groups.setdefault(group.name, {})[view.rank] = group
    unlike = []
    for name, members in sorted(groups.items()):
        last = {
            (group.sequence, *((each.sequence, _call(each)) for each in group.operations[-COLUMNS:]))
            for group in members.values()
        }
        unlike += [name] if len(last) > 1 else []
    for name in unlike[:MAX_GROUPS]:
        yield _table(name, groups[name])


def _table(name: str, members: dict[int, GroupState]) -> Table:
    recorded = {rank: {each.sequence: _call(each) for each in group.operations} for rank, group in members.items()}
    numbers = shown_numbers(recorded, max(group.sequence for group in members.values()))
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, group in sorted(members.items()):
        cells = tuple(recorded[rank].get(number, "called" if number <= group.sequence else NEVER) for number in numbers)
        rows.setdefault((str(group.sequence), *cells), []).append(rank)
    usual = [
        _most_frequent(column) for column in zip(*(cells for cells, ranks in rows.items() for _ in ranks), strict=True)
    ]
    marked = [
        (
            ranks_in_words(ranks),
            *(cell if cell == most else f"✗ {cell}" for cell, most in zip(cells, usual, strict=True)),
        )
        for cells, ranks in rows.items()
    ]
    return Table(
        title=f"the last collectives of group {name}",
        caption=f"By number in the group; {NEVER} was not called. A mark shows where a rank differs from the majority.",
        head=("", "called", *(str(number) for number in numbers)),
        rows=tuple(marked[:MAX_ROWS]),
        align="<>",
    )


def shown_numbers(recorded: dict[int, dict[int, str]], last: int) -> tuple[int, ...]:
    """The numbers around the first call that differs, else the last ones.

    >>> same = {number: "all_reduce" for number in range(1, 31)}
    >>> shown_numbers({0: same, 1: same}, 30), shown_numbers({0: same, 1: {**same, 12: "barrier"}}, 30)
    ((23, 24, 25, 26, 27, 28, 29, 30), (8, 9, 10, 11, 12, 13, 14, 15))
    """
    known = sorted({number for calls in recorded.values() for number in calls})
    differs = (n for n in known if len({calls[n] for calls in recorded.values() if n in calls}) > 1)
    middle = next(differs, last)
    end = min(last, middle + COLUMNS // 2 - 1)
    return tuple(range(max(1, end - COLUMNS + 1), end + 1))


def _most_frequent(cells: tuple[str, ...]) -> str:
    """What most ranks have; "" where no cell is more frequent than the others."""
    (first, count), *others = Counter(cells).most_common(2)
    return first if not others or count > others[0][1] else ""


def _call(operation: Operation) -> str:
    return f"{operation.name} {sizes_text(operation, 3)}".strip()


def _ranks(run: IncidentView) -> Table:
    """What each rank does, alike ones in one row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for view in run.incident.ranks:
        rows.setdefault((_state(run, view), run.where(view), view.activity), []).append(view.rank)
    few_first = sorted(rows.items(), key=lambda item: (len(item[1]), item[1]))
    columns = 3 if any(view.activity for view in run.incident.ranks) else 2
    return Table(
        title="state of each rank",
        head=("", "state", "where", "activity")[: columns + 1],
        rows=tuple(
            (run.rank_label(ranks[0]) if len(ranks) == 1 else ranks_in_words(ranks), *cells[:columns])
            for cells, ranks in few_first[:MAX_ROWS]
        ),
    )


def _state(run: IncidentView, view: RankView) -> str:
    if view.rank in run.waiting_ranks:
        return f"blocked in {run.waiting.operation_of(view)}"
    if view.ended:
        return f"✗ {view.ended}"
    if view.rank in run.faulty_ranks:
        return f"✗ {LETTERS.get(view.state, 'runs no Python')}" if view.state in {"T", "t", "D"} else "✗ runs no Python"
    if view.activity:
        return "! working"
    return "✗ in no collective" if run.waiting_ranks and run.incident.source != PROCESSES else "in no collective"
