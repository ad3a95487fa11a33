"""A Report -> one page that needs no network: the verdict and findings as text, below them pairs, curves and paces as a figure."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.results import PhaseResult, Report
from dsdoctor.core.finding import Finding
from dsdoctor.report import page
from dsdoctor.report.comm.curves import add_curves, add_paces
from dsdoctor.report.comm.heat_map import add_matrix
from dsdoctor.report.comm.lines import MARKS, rank_lines
from dsdoctor.report.terminal import MARKS as SEVERITIES
from dsdoctor.report.terminal import printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PANEL, TALL, TOP, BOTTOM = 235, 620, 80, 90
"""Pixels: a panel beside the heat map, the least height of the heat map, the margins."""
MATRIX_WIDTH, ALONE, GAP = 0.5, 0.62, 0.09
NOTHING = "Nothing to draw: no pair of ranks was tried, and nothing was timed."
FLAT = {"orientation": "h"}
CLASSES = {"✓": "good", "!": "slow", "✗": "bad", "·": "dim"}

STYLE = """<style>
  .told { max-width: 1100px; padding: 24px 28px 4px; color: #2a3038; font-size: 15px; line-height: 1.5; }
  .dark .told { color: #d6d9dc; }
  .told h1 { font-size: 21px; line-height: 1.35; font-weight: 600; margin: 0 0 6px; }
  .told p { margin: 0 0 12px; color: #6b747d; font-size: 13px; }
  .told ul { margin: 2px 0 6px; padding-left: 34px; color: #6b747d; font-size: 13.5px; }
  .dark .told p, .dark .told ul { color: #98a1aa; }
  .told .phases span { display: inline-block; margin: 0 16px 4px 0; white-space: nowrap; }
  .told .finding { margin: 12px 0; padding-left: 12px; border-left: 3px solid #9aa3ab; }
  .told .finding.bad { border-color: #d62728; } .told .finding.slow { border-color: #e6862a; }
  .told pre { margin: 4px 0 8px 14px; padding: 8px 12px; border-radius: 5px; background: #f3f5f7; overflow-x: auto;
              font: 13px/1.45 ui-monospace, monospace; }
  .dark .told pre { background: #1e2327; }
  .told code { color: #6b747d; font-size: 12.5px; } .dark .told code { color: #98a1aa; }
  .told details { margin: 10px 0; } .told summary { cursor: pointer; color: #6b747d; font-size: 13.5px; }
  .told .good b { color: #2f9e63; } .told .slow b { color: #e6862a; } .told .bad b { color: #e04b4b; }
</style>"""


def write_page(report: Report, path: Path) -> None:
    """Write the page. Raises UsageError for a target that cannot be written, ImpossiblePlan where plotly is absent."""
    page.check_target(path)
    page.check_plotly()
    page.write(figure(report), path, title=f"dsdoctor comm, {report.world} ranks", above=text(report))


def figure(report: Report) -> "Figure":
    """Pairs at the left; at the right, below each other, bandwidths, times and paces: each as far as it was measured.

    Raises ImportError where there is no plotly.
    """
    from plotly.subplots import make_subplots

    panels = [*(("bandwidth", "latency") if report.speeds else ()), *(("pace",) if report.paces else ())]
    pairs = bool(report.pairs or report.reaches)
    rows, col = max(1, len(panels)), 2 if pairs else 1
    shown = make_subplots(
        rows=rows,
        cols=col,
        specs=[[*([{"rowspan": rows} if not row else None] if pairs else []), {}] for row in range(rows)],
        column_widths=[MATRIX_WIDTH, 1 - MATRIX_WIDTH] if pairs else None,
        horizontal_spacing=GAP,
        vertical_spacing=0.12 if rows > 1 else 0,
        subplot_titles=[
            *(["between ranks, MB/s: rows send, columns receive"] if pairs else []),
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
    if not pairs and not panels:
        _say_nothing(shown)
    return shown


def _say_nothing(shown: "Figure") -> None:
    """Text instead of a figure."""
    shown.update_xaxes(visible=False)
    shown.update_yaxes(visible=False)
    shown.update_layout(height=TOP)
    shown.update_layout(margin={"t": 0, "b": 0})
    shown.add_annotation(text=NOTHING, showarrow=False, xref="paper", yref="paper", x=0, y=0.5, font={"size": 13})


TITLES = {
    "bandwidth": "busbw by size, GB/s",
    "latency": "time by size: p50, dotted p99",
    "pace": "the same work on every rank",
}


def _lay_out(shown: "Figure", *, pairs: bool, panels: list[str]) -> None:
    """Sizes in pixels; titles at the left above their panels, legends beside or below them."""
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
        _place_matrix(shown, inner, titles[0], alone=not panels)
    for panel, title in zip(panels, titles[pairs:], strict=True):
        number = titles.index(title) + 1
        start, end = shown.layout[f"xaxis{number if number > 1 else ''}"].domain
        title.update(x=start, xanchor="left", font={"size": 13})
        if panel == "bandwidth":
            shown.update_layout(legend={"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"})
        if panel == "pace":
            shown.update_layout(legend2={**FLAT, "x": end, "xanchor": "right", "y": title.y, "yanchor": "bottom"})


def _place_matrix(shown: "Figure", inner: int, title: Any, *, alone: bool) -> None:
    """The heat map's title above its axis, the scale of its colours below it; alone it stays about as wide as high."""
    if alone:
        shown.update_layout(xaxis={"domain": [0, ALONE]})
    start, end = shown.layout.xaxis.domain
    title.update(x=start, xanchor="left", yshift=24, font={"size": 13})
    scale = {
        "x": (start + end) / 2,
        "xanchor": "center",
        "y": -14 / inner,
        "yanchor": "top",
        "len": (end - start) * 0.7,
    }
    shown.data[0].update(colorbar=scale)
    shown.update_layout(legend3={**FLAT, "x": start, "xanchor": "left", "y": -48 / inner, "yanchor": "top"})


def text(report: Report) -> str:
    """Verdict, phases, findings and ranks as HTML. All text is escaped, because it may come from other hosts."""
    return "\n".join([STYLE, '<div class="told">', *_parts(report), "</div>"])


def _parts(report: Report) -> Iterator[str]:
    mark, said = report.verdict[:1], report.verdict[1:]
    yield f'<h1 class="{CLASSES.get(mark, "dim")}"><b>{_safe(mark)}</b>{_safe(said)}</h1>'
    facts = [
        f"{report.world} ranks by {report.launcher}",
        report.backend,
        f"{report.mode.value}, {report.seconds:.1f} s",
    ]
    facts += [f"{name} {version}" for name, version in report.versions.items()]
    yield f"<p>{_safe(' · '.join(facts))}</p>"
    yield f'<p class="phases">{"".join(map(_phase, report.phases))}</p>'
    yield from map(_finding, report.findings)
    rows = "\n".join(map(printable, rank_lines(report, verbose=False)))
    if rows:
        opened = "" if report.state is PhaseState.OK else " open"
        yield f"<details{opened}><summary>ranks</summary><pre>{html.escape(rows)}</pre></details>"


def _phase(result: PhaseResult) -> str:
    mark = MARKS[result.state]
    took = "" if result.state is PhaseState.SKIPPED else f" {result.seconds:.1f} s"
    return f'<span class="{CLASSES[mark]}" title="{_safe(result.said)}"><b>{mark}</b> {_safe(result.phase.value)}{took}</span> '


def _finding(finding: Finding) -> str:
    mark = SEVERITIES[finding.severity]
    parts = [f"<div><b>{mark}</b> {_safe(finding.title)} <code>[{_safe(finding.rule)}]</code></div>"]
    if finding.evidence:
        parts.append(f"<ul>{''.join(f'<li>{_safe(line)}</li>' for line in finding.evidence)}</ul>")
    if finding.fix:
        parts.append(f"<div>Fix: {_safe(finding.fix.text)}</div>")
        if finding.fix.commands:
            parts.append(f"<pre>{_safe_lines(finding.fix.commands)}</pre>")
    return f'<div class="finding {CLASSES[mark]}">{"".join(parts)}</div>'


def _safe_lines(lines: tuple[str, ...]) -> str:
    return "\n".join(map(_safe, lines))


def _safe(text: str) -> str:
    return html.escape(printable(text))
