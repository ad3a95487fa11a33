"""The command that draws traces."""

import os
from pathlib import Path
from typing import Annotated

from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.trace.options import BatchList, Modules, One, Other, PhaseName, RankList, check_dtype, selection_of
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import check_target
from dsdoctor.core.finding import Step, step
from dsdoctor.core.options import option
from dsdoctor.overflow.frames.frame import CallPhase, Frame
from dsdoctor.overflow.trace import page as plot
from dsdoctor.overflow.trace.headroom import Picture, picture, reference
from dsdoctor.overflow.trace.page import page_of
from dsdoctor.overflow.trace.text import source_line
from dsdoctor.overflow.trace.trace_file import Selection, Traces, selected, sources
from dsdoctor.ui import page

Out = Annotated[
    Path, option(name=["-o", "--out"], metavar="FILE", help="Page (.html) or image (.png, .svg, .pdf) to write.")
]
LimitOf = Annotated[
    str | None,
    option(
        name="--dtype",
        metavar="DTYPE",
        help="Type whose limit to draw. Default: the trace's if it is 16-bit, else float16.",
    ),
]
Title = Annotated[str | None, option(name="--title", metavar="TEXT", help="Default: the names of the traces.")]


def plot_command(
    first: One,
    other: Other = None,
    /,
    *,
    out: Out = Path("trace.html"),
    modules: Modules = (),
    batch: BatchList = None,
    rank: RankList = None,
    phase: PhaseName = "forward",
    dtype: LimitOf = None,
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Plot a run, or two side by side: the range of every module against the limit, and a heat map of module by batch.

    The page holds all that it needs and works without a network. Images are drawn by Chrome or Chromium.
    Both need the extra named plot: plotly, and kaleido for images.

    Example: dsdoctor trace plot bf16 fp32 -o page.html
    """
    if dtype is not None:
        check_dtype(dtype)
    if phase == "all":
        raise UsageError("a plot shows one phase", hint="--phase forward, or --phase backward")
    drawn = out.suffix.lower() in page.IMAGE_SUFFIXES
    _check_target(out, drawn=drawn)
    found = {name: sources([path]) for name, path in _runs(first, other).items()}
    pictures = _pictures(found, selection_of(modules, batch, rank, phase))
    limit = reference(next(iter(pictures.values())), dtype)
    heading = title or f"dsdoctor trace: {' against '.join(found)} ({phase})"
    meta = [source_line(traces.sources[0]) for traces in found.values()]
    if drawn:
        page.write_image(plot.figure(pictures, limit, title=heading, meta=meta), out)
    else:
        next_step = _next_step(first, pictures, limit)
        page.write_page(page_of(pictures, limit, title=heading, meta=tuple(meta), next_step=next_step), out)
    rows = max(len(drawn.rows) for drawn in pictures.values())
    said = f"✓ {out}  ({rows:,} modules, limit of {limit}, {os.stat(out).st_size / (1 << 20):.1f} MiB)"  # noqa: PTH116
    notes = [f"! {note}" for traces in found.values() for note in traces.notes]
    print_result("trace plot", as_json, [said, *notes], (), file=str(out), dtype=limit)


def _check_target(out: Path, *, drawn: bool) -> None:
    """Before anything is read."""
    if drawn:
        check_target(out)
    elif out.suffix.lower() not in page.PAGE_SUFFIXES:
        raise UsageError(f"{out} is neither a page nor an image", hint="name it .html, .png, .svg or .pdf")
    else:
        page.check_target(out)
    page.check_extra(plotly=True)


def _next_step(run: Path, pictures: dict[str, Picture], dtype: str) -> Step:
    """Where the figures behind the page are."""
    if any(row.bad for picture in pictures.values() for row in picture.rows.values()):
        return step("python -m dsdoctor trace show {run} --bad", run=str(run))
    return step("python -m dsdoctor trace headroom {run} --dtype {dtype}", run=str(run), dtype=dtype)


def _runs(first: Path, other: Path | None) -> dict[str, Path]:
    """The runs and their names: of folders or files, A and B where those are alike."""
    if other is None:
        return {_run_name(first): first}
    names = _run_name(first), _run_name(other)
    return dict(zip(names if names[0] != names[1] else ("A", "B"), (first, other), strict=True))


def _pictures(found: dict[str, Traces], selection: Selection) -> dict[str, Picture]:
    """The picture of each run; one that stands alone needs no name. Raises UsageError when there is nothing to draw."""
    pictures = {}
    for name, traces in found.items():
        frames = ((rank, line) for rank, line in selected(traces, selection) if isinstance(line, Frame))
        pictures[name if len(found) > 1 else ""] = picture(frames, phase=selection.phase or CallPhase.FORWARD)
    if not any(drawn.rows for drawn in pictures.values()):
        raise UsageError("nothing matches these filters, so there is nothing to draw", hint="dsdoctor trace show")
    return pictures


def _run_name(path: Path) -> str:
    """A short name of a run: its folder's, or its file's."""
    return path.absolute().name if path.is_dir() else path.stem
