"""The command that prints traces."""

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

from cyclopts.validators import Number

from dsdoctor.cli.ending import OK, finding_of
from dsdoctor.cli.options import Json
from dsdoctor.cli.trace.options import BatchList, Files, Modules, PhaseName, RankList, selection_of, talk
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.options import flag, option
from dsdoctor.overflow.trace.text import shown_document, shown_document_end, shown_lines
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
    as_json: Json = False,
) -> int:
    """Print traces as the guide prints frames: abs min, abs max and the place of every tensor of every call.

    Several ranks are merged batch by batch. What is read is printed at once, so a trace of gigabytes can be piped.

    Example: dsdoctor trace show dsdoctor-trace --batch 150 --bad
    """
    selection = selection_of(modules, batch, rank, phase, bad=bad)
    traces = sources(files)
    lines = selected(traces, selection)
    if last is not None:
        lines = last_of_each(lines, last)
    if as_json:
        return _write_document(traces, lines)
    talk(traces)
    if not _write_lines(shown_lines(lines, with_rank=len(traces.sources) > 1)):
        show(Stream(stderr=True), ["· no call is bad" if bad else "· nothing fits these filters"])
    return OK


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
