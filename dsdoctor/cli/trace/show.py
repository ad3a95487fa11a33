"""The command that prints traces, or says whether their run would fit another dtype."""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

from cyclopts.validators import Number

from dsdoctor.cli.ending import FOUND, OK, finding_of, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.trace.options import BatchList, Files, Modules, PhaseName, RankList, check_dtype, selection_of, talk
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.options import flag, option
from dsdoctor.overflow.frames.frame import LIMITS
from dsdoctor.overflow.trace.headroom import headroom as headroom_of
from dsdoctor.overflow.trace.text import headroom_lines, shown_document, shown_document_end, shown_lines, source_parts
from dsdoctor.overflow.trace.trace_file import Ranked, Traces, last_of_each, selected, sources
from dsdoctor.ui.terminal import Stream, show


def show_command(
    *files: Files,
    modules: Modules = (),
    batch: BatchList = None,
    rank: RankList = None,
    phase: PhaseName = "all",
    bad: Annotated[bool, flag(name="--bad", help="Only calls with a nan or an inf.")] = False,
    last: Annotated[
        int | None, option(name="--last", metavar="N", validator=Number(gte=1), help="Only the last N of each rank.")
    ] = None,
    headroom: Annotated[
        str | None,
        option(
            name="--headroom",
            metavar="DTYPE",
            help="Instead of the calls, whether the run would fit this dtype, and which modules would not. "
            f"One of {', '.join(LIMITS)}.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        option(
            name="--margin",
            metavar="BITS",
            validator=Number(gte=0),
            help="With --headroom: bits to leave free. Default: 1, so that all may double.",
        ),
    ] = None,
    every: Annotated[
        bool, flag(name="--all", help="With --headroom: every module, not only those with the least room.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Print traces frame by frame: abs min, abs max and name of every tensor in every call.

    Several ranks are merged batch by batch. What is read is printed at once, so a trace of gigabytes can be piped.

    With --headroom: the largest value of every module over all batches and ranks, in bits below the dtype's limit; the modules to
    keep in fp32, to paste; with three batches or more, which grow and when they reach the limit.

    Example: dsdoctor trace show dsdoctor-trace --batch 150 --bad
    """
    if headroom is None and (margin is not None or every):
        raise UsageError("--margin and --all apply only to --headroom", hint="add --headroom float16")
    if headroom is not None and bad:
        raise UsageError("--bad shows calls, and --headroom reads all of them", hint="leave one of them out")
    selection = selection_of(modules, batch, rank, phase, bad=bad)
    if headroom is not None:
        check_dtype(headroom, "--headroom")
        if margin is not None and not math.isfinite(margin):
            raise UsageError(f"--margin {margin} is not a number of bits", hint="such as --margin 1")
    traces = sources(files)
    lines = selected(traces, selection)
    if last is not None:
        lines = last_of_each(lines, last)
    if headroom is not None:
        return _show_headroom(traces, lines, headroom, 1.0 if margin is None else margin, every=every, as_json=as_json)
    if as_json:
        return _write_document(traces, lines)
    talk(traces)
    if not _write_lines(shown_lines(lines, with_rank=len(traces.sources) > 1)):
        show(Stream(stderr=True), ["· no call is bad" if bad else "· nothing matches these filters"])
    return OK


def _show_headroom(
    traces: Traces, lines: Iterator[Ranked], dtype: str, margin: float, *, every: bool, as_json: bool
) -> int:
    found = headroom_of(lines, dtype=dtype, margin=margin)
    if not found.modules:
        raise UsageError("nothing matches these filters: no forward call was read", hint="dsdoctor trace show")
    if not as_json:
        talk(traces)
    parts = {"traces": source_parts(traces), "headroom": found}
    print_result("trace show", as_json, headroom_lines(found, every=every), (), **parts)
    return FOUND if found.keep else OK


def _write_lines(lines: Iterable[str]) -> bool:
    """Write lines as they come; whether there were any."""
    some = False
    for line in lines:
        sys.stdout.write(line + "\n")
        some = True
    return some


def _write_document(traces: Traces, lines: Iterator[Ranked]) -> int:
    """The document piece by piece. What goes wrong on the way is its last finding: it stays one document."""
    error: DoctorError | None = None
    try:
        for part in shown_document(traces, lines):
            sys.stdout.write(part)
    except DoctorError as cause:
        error = cause
    sys.stdout.write(shown_document_end((finding_of(error),) if error else ()))
    return error.exit_code if error else OK
