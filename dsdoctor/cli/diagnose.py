"""The command that explains a failed log."""

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, cast

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.statuses import UNDECIDED
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import open_regular
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.options import argument, flag
from dsdoctor.diagnosis.diagnose import diagnose, problem_of, together, verdict_of
from dsdoctor.diagnosis.lines import is_text, raw_lines
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome, LogVerdict
from dsdoctor.ui.screen import first_step, next_line, screen_lines
from dsdoctor.ui.terminal import VerdictLine

GZIP, SAMPLE = b"\x1f\x8b", 8192
SAYINGS = {
    LogOutcome.CAUSE: "the cause was found",
    LogOutcome.ONLY_ECHOES: "only after-effects are in this log",
    LogOutcome.RAISED: "an exception of the script's own",
    LogOutcome.UNEXPLAINED: "a failure that no rule knows",
    LogOutcome.HEALTHY: "no failure in this log",
    LogOutcome.UNFINISHED: "a log that stops in the middle of something",
    LogOutcome.UNDECIDED: "undecided: no failure, but no end or progress either",
    LogOutcome.EMPTY: "an empty log",
}
Logs = Annotated[
    str,
    argument(
        metavar="LOG",
        allow_leading_hyphen=True,
        help="Log files (also .gz), one per rank if there are several; - is stdin.",
    ),
]  # fmt: skip
Verbose = Annotated[bool, flag(name=["-v", "--verbose"], help="Also show harmless lines and consequences.")]


def diagnose_command(*logs: Logs, as_json: Json = False, verbose: Verbose = False) -> int:
    """Diagnose the log of a failed install, build, JIT load, launch or run: the cause, its line, and the fix.

    Example: dsdoctor diagnose train.log
    """
    for name in logs:
        # a word with hyphens is taken for a log because "-" is one
        if name.startswith("-") and name != "-" and not Path(name).exists():
            raise UsageError(f"there is no option {name}", hint="dsdoctor diagnose --help")
    diagnoses = together([_diagnosed(name) for name in logs or ("-",)])
    findings = _together(diagnoses)
    parts = [
        {
            "name": diagnosis.name,
            "lines": diagnosis.lines,
            "verdict": diagnosis.verdict,
            "outcome": diagnosis.outcome,
            "where": diagnosis.where,
            "activity": diagnosis.activity,
            "facts": diagnosis.facts,
            "findings": diagnosis.findings,
        }
        for diagnosis in diagnoses
    ]
    verdict = verdict_of(diagnoses)
    print_result("diagnose", as_json, _lines(diagnoses, verbose=verbose), findings, verdict=verdict, logs=parts)
    return {LogVerdict.HEALTHY: OK, LogVerdict.FAILED: FOUND, LogVerdict.UNDECIDED: UNDECIDED}[verdict]


def _diagnosed(name: str) -> Diagnosis:
    with _opened(name) as stream:
        try:
            if not is_text(cast(io.BufferedReader, stream).peek(SAMPLE)):
                raise UsageError(
                    f"{name} is no text", hint="give what the program printed; unpack archives other than .gz first"
                )
            return diagnose(raw_lines(stream), name=name)
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(
                f"{name} cannot be read: {error}", hint="give a text file, or one packed by gzip"
            ) from error


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """A log as a stream of bytes. Raises UsageError where there is none to read."""
    if name == "-":
        if sys.stdin.isatty():
            raise UsageError(
                "no log was given", hint="name a file, or pipe it: COMMAND 2>&1 | python -m dsdoctor diagnose -"
            )
        buffered = io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer))
        try:
            yield cast(BinaryIO, buffered)
        finally:
            buffered.detach()
        return
    try:
        with cast(io.BufferedReader, open_regular(Path(name))) as stream:
            packed = stream.peek(2).startswith(GZIP)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror or error}", hint="name a log file, or - for stdin"
        ) from error


def _together(diagnoses: list[Diagnosis]) -> tuple[Finding, ...]:
    """The findings of all logs: those of several ranks are one problem, told once, errors first."""
    told: dict[tuple[str, str], Finding] = {}
    for diagnosis in diagnoses:
        for finding in diagnosis.findings:
            told.setdefault(problem_of(finding, diagnosis), finding)
    order = [Severity.ERROR, Severity.WARNING, Severity.NOTE]
    return tuple(sorted(told.values(), key=lambda finding: order.index(finding.severity)))


def _lines(diagnoses: list[Diagnosis], *, verbose: bool) -> Iterator[str]:
    """What each log comes to; with several, a line for each first."""
    if len(diagnoses) > 1:
        yield from (_summary(diagnosis) for diagnosis in diagnoses)
    told: set[tuple[str, str]] = set()
    for diagnosis in diagnoses:
        shown = [
            finding
            for finding in diagnosis.findings
            if (verbose or finding.severity is not Severity.NOTE) and problem_of(finding, diagnosis) not in told
        ]
        told |= {problem_of(finding, diagnosis) for finding in shown}
        if len(diagnoses) > 1 and shown:
            yield from ("", f"{diagnosis.name}:")
        if len(diagnoses) == 1 and (not shown or diagnosis.outcome is LogOutcome.HEALTHY):
            yield VerdictLine(_summary(diagnosis))
        yield from screen_lines(shown, shows_all="" if verbose else "-v")
        yield from _silent(diagnosis, verbose=verbose)
    if command := first_step(_together(diagnoses)):
        yield next_line(command)


def _silent(diagnosis: Diagnosis, *, verbose: bool) -> Iterator[str]:
    notes = sum(finding.severity is Severity.NOTE for finding in diagnosis.findings)
    if notes and not verbose:
        yield f"· {notes} harmless or consequent {'line' if notes == 1 else 'lines'} not shown (-v shows them)"


def _summary(diagnosis: Diagnosis) -> str:
    first = diagnosis.findings[0] if diagnosis.findings else None
    marks = {LogVerdict.HEALTHY: "✓", LogVerdict.UNDECIDED: "!", LogVerdict.FAILED: "✗"}
    mark = marks[diagnosis.verdict]
    said = first.title if first and first.severity is not Severity.NOTE else SAYINGS[diagnosis.outcome]
    return f"{mark} {'standard input' if diagnosis.name == '-' else diagnosis.name} ({diagnosis.lines} lines): {said}"
