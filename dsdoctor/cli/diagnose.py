"""The command that explains a failed log."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.statuses import UNDECIDED
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.options import argument, flag
from dsdoctor.diagnosis.files import diagnose_file, logs_in
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome, LogVerdict, problem_of, together, verdict_of
from dsdoctor.ui.screen import first_step, next_line, screen_lines
from dsdoctor.ui.terminal import VerdictLine

MAX_NAMED = 4
"""More logs that come to the same share one line."""
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
        help="Log files (also .gz) or folders of them, one per rank if there are several; - is stdin.",
    ),
]  # fmt: skip
Follow = Annotated[
    bool,
    flag(
        name=["-f", "--follow"],
        help="Keep reading while LOG grows, and report a failure as soon as it happens. Stop with Ctrl-C.",
    ),
]
Verbose = Annotated[bool, flag(name=["-v", "--verbose"], help="Also show harmless lines and consequences.")]


def diagnose_command(*logs: Logs, follow: Follow = False, as_json: Json = False, verbose: Verbose = False) -> int:
    """Find the cause of a failed build or run in its log.

    Reads the log of an install, build, JIT load, launch or training, and names the cause, its line and the fix.
    A folder is read as one job: all logs in it, such as torchrun's --log-dir or a job's Slurm files.

    Example: dsdoctor diagnose train.log
    """
    for name in logs:
        # a word with hyphens is taken for a log because "-" is one
        if name.startswith("-") and name != "-" and not Path(name).exists():
            raise UsageError(f"no such option: {name}", hint="dsdoctor diagnose --help")
    folders = [name for name in logs if name != "-" and Path(name).is_dir()]
    names = [log for name in logs or ("-",) for log in (logs_in(Path(name)) if name in folders else (name,))]
    if follow and (folders or len(names) > 1):
        raise UsageError("--follow reads one log, but several were given", hint="name one file, or - for stdin")
    diagnoses = together([diagnose_file(name, tell=_tell, follow=follow) for name in names])
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
    verdict = verdict_of(diagnoses, one_job=bool(folders))
    print_result("diagnose", as_json, _lines(diagnoses, verbose=verbose), findings, verdict=verdict, logs=parts)
    return {LogVerdict.HEALTHY: OK, LogVerdict.FAILED: FOUND, LogVerdict.UNDECIDED: UNDECIDED}[verdict]


def _tell(diagnosis: Diagnosis) -> None:
    """A failure in a log that is still being written. It's no result yet, so it goes to stderr."""
    first = diagnosis.findings[0]
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {_summary(diagnosis)}", *first.evidence[:1], sep="\n    ", file=sys.stderr)


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
        yield from _summaries(diagnoses)
    told: set[tuple[str, str]] = set()
    speak = [diagnosis for diagnosis in diagnoses if not diagnosis.silent]
    for diagnosis in (speak or diagnoses) if len(diagnoses) > MAX_NAMED else diagnoses:
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
        if shown or len(diagnoses) <= MAX_NAMED:
            yield from _silent(diagnosis, verbose=verbose)
    if command := first_step(_together(diagnoses)):
        yield next_line(command)


def _silent(diagnosis: Diagnosis, *, verbose: bool) -> Iterator[str]:
    notes = sum(finding.severity is Severity.NOTE for finding in diagnosis.findings)
    if notes and not verbose:
        yield f"· {notes} harmless or follow-on {'line' if notes == 1 else 'lines'} not shown (-v shows them)"


def _summaries(diagnoses: list[Diagnosis]) -> Iterator[str]:
    """A line for each log, or for all that come to the same."""
    alike: dict[tuple[str, str], list[Diagnosis]] = {}
    for diagnosis in diagnoses:
        alike.setdefault(_verdict_words(diagnosis), []).append(diagnosis)
    for (mark, words), logs in alike.items():
        if len(logs) <= MAX_NAMED:
            yield from map(_summary, logs)
        else:
            yield f"{mark} {len(logs)} logs ({logs[0].name}, {logs[1].name}, ...): {words}"


def _summary(diagnosis: Diagnosis) -> str:
    mark, words = _verdict_words(diagnosis)
    return f"{mark} {'standard input' if diagnosis.name == '-' else diagnosis.name} ({diagnosis.lines} lines): {words}"


def _verdict_words(diagnosis: Diagnosis) -> tuple[str, str]:
    first = diagnosis.findings[0] if diagnosis.findings else None
    marks = {LogVerdict.HEALTHY: "✓", LogVerdict.UNDECIDED: "!", LogVerdict.FAILED: "✗"}
    mark = marks[diagnosis.verdict]
    if diagnosis.follows and first and first.severity is Severity.NOTE:
        return "·", "only consequences of a failure in another log"
    words = first.title if first and first.severity is not Severity.NOTE else SAYINGS[diagnosis.outcome]
    more = f"; {diagnosis.activity}" if diagnosis.outcome is LogOutcome.HEALTHY and diagnosis.activity else ""
    return mark, f"{words}{more}"
