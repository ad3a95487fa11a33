"""What a check found -> one screen: a line for each topic, the worst findings, the ops in groups, one verdict, one next step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsdoctor.builder.plan.op_table import ASKED, BUILDS, CANNOT, INSTALLED, OpVerdict
from dsdoctor.commands.check_ops import Checked
from dsdoctor.core.build_models import Source
from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.core.text import and_more
from dsdoctor.ui.screen import counted, first_step, next_line, screen_lines
from dsdoctor.ui.table import table
from dsdoctor.ui.terminal import MARKS, VerdictLine

WORTH_A_LINE = {Severity.WARNING, Severity.ERROR}
MOST_OPS = 8
ALL = "-v"
INDENTED = 60
"""Columns from which on the table of ops is indented."""


def check_lines(done: Checked, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """The screen. ``verbose``: every finding, and every op with its reasons. ``width``: of the terminal, where lines are broken."""
    for topic in done.topics:
        yield f"{_mark(topic.findings)} {topic.summary}"
    nothing = {op.op for op in done.ops if op.placeholder}
    shown = [
        replace(finding, affects=tuple(op for op in finding.affects if op not in nothing))
        for finding in done.findings
        if verbose or finding.severity in WORTH_A_LINE
    ]
    if shown:
        yield ""
        yield from screen_lines(shown, shows_all="" if verbose else ALL)
    if done.source is not None:
        yield ""
        yield from op_lines(done.ops, done.source, verbose=verbose, width=width)
    yield ""
    yield VerdictLine(verdict_line(done, verbose=verbose))


def ending_lines(command: Step | None) -> Iterator[str]:
    """The next step, where there is one."""
    if command is not None:
        yield next_line(command)


def _mark(findings: tuple[Finding, ...]) -> str:
    found = {finding.severity for finding in findings}
    return next((MARKS[severity] for severity in (Severity.ERROR, Severity.WARNING) if severity in found), "✓")


def op_lines(ops: tuple[OpVerdict, ...], source: Source, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """Which ops there are: installed, those that build, and those that cannot, needed or not."""
    yield f"ops of DeepSpeed {source.version} for {source.accelerator} ({source.because}), as the environment stands:"
    real = [op for op in ops if not op.placeholder]
    if verbose:
        yield from _op_table(real, width)
        return
    yield from _group("✓", "installed", [op for op in real if op.verdict == INSTALLED])
    yield from _group("✓", "build", [op for op in real if op.verdict == BUILDS])
    missed = missed_ops(ops)
    if missed:
        yield from _group("✗", f"cannot, and you need {_them(missed)} ({missed[0].needed})", missed)
        for because in dict.fromkeys(op.because for op in missed):
            yield f"    {because}"
    rest = [op for op in real if op.verdict == CANNOT and not op.needed]
    if rest:
        yield from _group("·", f"cannot, and you do not need {_them(rest)} ({ALL} says why)", rest)


def _op_table(ops: Sequence[OpVerdict], width: int | None) -> Iterator[str]:
    """An op a row; below, why some cannot, each reason once."""
    rows = [("  op", "as it stands", "build-wheel")]
    why: dict[str, list[str]] = {}
    for op in ops:
        mark = "✓" if op.verdict != CANNOT else "✗" if op.needed else "·"
        rows.append((f"{mark} {op.op}", op.verdict, op.mended))
        for because in dict.fromkeys(filter(None, (op.because, op.mended_because))):
            why.setdefault(because, []).append(op.op)
    indent = " " * 4 if width is None or width >= INDENTED else ""
    yield from (f"{indent}{line}".rstrip() for line in table(rows, "<<<", width=width and width - len(indent)))
    if why:
        yield "  why:"
    for because, those in why.items():
        yield f"    - {because}" if len(those) == 1 and those[0] in because else f"    - {because}: {', '.join(those)}"


def _group(mark: str, words: str, ops: Sequence[OpVerdict]) -> Iterator[str]:
    if ops:
        yield f"{mark} {len(ops)} {words}: {and_more([op.op for op in ops], MOST_OPS)}"


def _them(ops: Sequence[OpVerdict]) -> str:
    return "it" if len(ops) == 1 else "them"


def missed_ops(ops: tuple[OpVerdict, ...]) -> list[OpVerdict]:
    """Those that are needed and cannot be had as the environment stands."""
    return [op for op in ops if op.verdict == CANNOT and op.needed and not op.placeholder]


def verdict_line(done: Checked, *, verbose: bool) -> str:
    """The one line that says how it is."""
    worth = [finding for finding in done.findings if finding.severity in WORTH_A_LINE]
    notes = len(done.findings) - len(worth)
    missed = missed_ops(done.ops)
    hidden = f" ({ALL} shows {notes} note{'s' * (notes > 1)} and every op)" if notes and not verbose else ""
    if not worth and not missed:
        return f"✓ nothing is wrong{hidden}"
    mark = MARKS[Severity.ERROR if any(f.severity is Severity.ERROR for f in worth) else Severity.WARNING]
    parts = [counted(worth)] if worth else []
    if missed:
        named = and_more([op.op for op in missed], MOST_OPS)
        mended = [op for op in missed if op.mended == BUILDS]
        gets = f"; build-wheel gets {'it' if len(missed) == 1 else f'{len(mended)} of them'}" if mended else ""
        parts.append(f"{named} cannot be built as the environment stands{gets}")
    return f"{mark} {': '.join(parts)}{hidden}"


def next_step(done: Checked, arch: str | None = None) -> Step | None:
    """What to do next: build what is missed where that can be had, else what mends the worst finding. ``arch``: as was asked."""
    missed = missed_ops(done.ops)
    asked = ",".join(op.op for op in done.ops if op.needed == ASKED and op.mended == BUILDS)
    if any(op.mended == BUILDS for op in missed):
        return _build(asked, arch)
    found = first_step(done.findings)
    if found is not None or missed or done.source is None or done.machine.deepspeed is not None:
        return found
    return step("python -m dsdoctor install --ops {ops}", ops=asked) if asked else step("python -m dsdoctor install")


def _build(ops: str, arch: str | None) -> Step:
    if ops and arch:
        return step("python -m dsdoctor build-wheel --ops {ops} --arch {arch}", ops=ops, arch=arch)
    if ops:
        return step("python -m dsdoctor build-wheel --ops {ops}", ops=ops)
    return (
        step("python -m dsdoctor build-wheel --arch {arch}", arch=arch)
        if arch
        else step("python -m dsdoctor build-wheel")
    )
