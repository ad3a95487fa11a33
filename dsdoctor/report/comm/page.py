"""A Report -> one page that needs no network: verdict, findings and ranks; below them pairs, curves and paces as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.results import Report
from dsdoctor.report.comm.curves import add_curves, add_paces
from dsdoctor.report.comm.heat_map import add_matrix, axis_of, ticks
from dsdoctor.report.comm.lines import MARKS, rank_lines
from dsdoctor.report.comm.pairs import cells
from dsdoctor.ui import page
from dsdoctor.ui.page import Listing, Page, Picture, stacked

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PANEL, TALL, TOP, BOTTOM = 235, 620, 80, 90
"""Pixels: a panel beside the heat map, the least height of the heat map, the margins."""
MATRIX_WIDTH, GAP = 0.5, 0.09
NARROW_MATRIX, NARROW_PANEL = 330, 220
NOTHING = "nothing was timed and every pair that was tried is well: there is no picture"


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
