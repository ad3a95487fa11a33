"""A machine's findings, weighed by the ops that they affect; on a screen, and as Markdown for an issue.

The screen has a line for each topic, the worst findings, the ops in groups, one verdict and one next step. The Markdown has at most
thirty lines, without what an environment hides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.make.commands import ask_compiler
from dsdoctor.builder.plan.choices import choose_jobs
from dsdoctor.builder.plan.op_table import ASKED, BUILDS, CANNOT, INSTALLED, OpVerdict, judge_ops, without_needs
from dsdoctor.builder.plan.plan import wanted_ops
from dsdoctor.builder.toolkit.choose import toolkit_offers
from dsdoctor.checks import Examined
from dsdoctor.core.build_models import Source
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.redaction import Hidden, urls
from dsdoctor.core.release import __version__
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.text import and_more
from dsdoctor.probe.observe import Observation, Say
from dsdoctor.rules import book
from dsdoctor.ui.screen import counted, first_step, most_harmful, next_line, screen_lines
from dsdoctor.ui.table import table
from dsdoctor.ui.terminal import MARKS, VerdictLine, printable

WORTH_A_LINE = {Severity.WARNING, Severity.ERROR}
MAX_OPS = 8
ALL = "-v"
MIN_INDENT_COLUMNS = 60
"""Columns from which on the table of ops is indented."""

MAX_FINDINGS = 5
MARKDOWN = re.compile(r"([\\`*<\[\]])")
SEVERITIES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The outcome: the machine, each topic with its findings, the op table and whose ops they are."""

    machine: Machine
    topics: tuple[Examined, ...]
    ops: tuple[OpVerdict, ...]
    source: Source | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, in the order of the topics."""
        return tuple(finding for topic in self.topics for finding in topic.findings)


class _Plain:
    """Makes of a text what Markdown shows as it is, without what the environment hides, the home folder and who works here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._hidden = Hidden(environment)
        self._home = environment.get("HOME", "").rstrip("/")
        names = {environment.get("USER", ""), environment.get("LOGNAME", "")} - {"", "root"}
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._names = re.compile(rf"(?<![\w.-])(?:{words})(?![\w.-])") if words else None

    def text(self, text: str) -> str:
        # before anything is escaped: what is hidden is found by its own spelling
        plain = self._hidden.out_of(text)
        if self._home:
            plain = plain.replace(self._home, "~")
        plain = self._names.sub("USER", plain) if self._names else plain
        return MARKDOWN.sub(r"\\\1", printable(plain))


def weighed(
    observation: Observation,
    topics: tuple[Examined, ...],
    source: Source,
    request: BuildRequest,
    compiled: dict[str, str | None],
) -> Checked:
    """The topics with their findings weighed by the op table, and the table; ``compiled`` is the compiler's answer for each op."""
    findings = tuple(finding for topic in topics for finding in topic.findings)
    machine = observation.machine
    offers = toolkit_offers(observation, request)
    table = judge_ops(machine, source, request, findings, cache=observation.cache, compiled=compiled, offers=offers)
    findings_left = iter(table.findings)
    topics_weighed = tuple(
        replace(topic, findings=tuple(next(findings_left) for _ in topic.findings)) for topic in topics
    )
    refused = tuple(findings_left)
    if refused:
        topics_weighed += (Examined(topic="ops", summary="Ops", findings=refused),)
    return Checked(machine=machine, topics=topics_weighed, ops=table.ops, source=source)


def without_table(machine: Machine, topics: tuple[Examined, ...], error: DoctorError | None) -> Checked:
    """The findings alone; where the ops should have been judged and could not, that is a finding."""
    plain = tuple(replace(topic, findings=without_needs(topic.findings)) for topic in topics)
    if error is not None:
        unjudged = book.finding("ops-not-judged", Severity.WARNING, why=urls(error.message), hint=error.hint)
        plain += (Examined(topic="ops", summary="Ops", findings=(unjudged,)),)
    return Checked(machine=machine, topics=plain, ops=(), source=None)


def asked_of_compiler(
    machine: Machine, source: Source, request: BuildRequest, folder: Path, say: Say
) -> dict[str, str | None]:
    """The compiler's answer for each op: an error, or None where it compiles."""
    if machine.torch is None or machine.torch.broken or machine.python is None or not machine.compilers:
        return {}
    facts = wanted_ops(source, request).ops if request.ops else source.ops
    names = tuple(fact.op for fact in facts if fact.sources)
    jobs, _, _ = choose_jobs(machine, request, device_code=True)
    done: list[str] = []

    def on_op(op: str, error: str | None) -> None:
        done.append(op)
        say(f"[{len(done)}/{len(names)}] {op}: {error or 'preprocesses and links'}")

    python = machine.python.executable
    return ask_compiler(LocalHost(), source, names, python=python, jobs=jobs, folder=folder, on_op=on_op)


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


def op_lines(ops: tuple[OpVerdict, ...], source: Source, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """Which ops there are: installed, those that build, and those that cannot, needed or not."""
    yield f"ops of DeepSpeed {source.version} for {source.accelerator} in the current environment ({source.because}):"
    real = [op for op in ops if not op.placeholder]
    if verbose:
        yield from _op_table(real, width)
        return
    yield from _group("✓", "installed", [op for op in real if op.verdict == INSTALLED])
    yield from _group("✓", "can be built", [op for op in real if op.verdict == BUILDS])
    missed = missed_ops(ops)
    if missed:
        yield from _group("✗", f"required {_ops(missed)} cannot be built ({missed[0].needed})", missed)
        for because in dict.fromkeys(op.because for op in missed):
            yield f"    {because}"
    rest = [op for op in real if op.verdict == CANNOT and not op.needed]
    if rest:
        yield from _group("·", f"optional {_ops(rest)} cannot be built ({ALL} shows why)", rest)


def missed_ops(ops: tuple[OpVerdict, ...]) -> list[OpVerdict]:
    """Those that are needed and cannot be built in the current environment."""
    return [op for op in ops if op.verdict == CANNOT and op.needed and not op.placeholder]


def verdict_line(done: Checked, *, verbose: bool) -> str:
    """The one line that says how it is."""
    worth = [finding for finding in done.findings if finding.severity in WORTH_A_LINE]
    notes = len(done.findings) - len(worth)
    missed = missed_ops(done.ops)
    hidden = f" ({ALL} shows {notes} note{'s' * (notes > 1)} and every op)" if notes and not verbose else ""
    if not worth and not missed:
        return f"✓ no problems found{hidden}"
    mark = MARKS[Severity.ERROR if any(f.severity is Severity.ERROR for f in worth) else Severity.WARNING]
    parts = [counted(worth)] if worth else []
    if missed:
        named = and_more([op.op for op in missed], MAX_OPS)
        mended = [op for op in missed if op.mended == BUILDS]
        buildable = "it" if len(missed) == 1 else f"{len(mended)} of them"
        by_build_wheel = f"; build-wheel can build {buildable}" if mended else ""
        parts.append(f"{named} cannot be built in this environment{by_build_wheel}")
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


def issue_lines(done: Checked, environment: Mapping[str, str]) -> Iterator[str]:
    """Verdict, what is here, the worst problems, the ops. ``environment`` is this process's, with the name of its user."""
    plain = _Plain(environment).text
    yield f"**`dsdoctor check`: {plain(verdict_line(done, verbose=True))}**"
    yield ""
    yield f"- dsdoctor {__version__}"
    yield from (f"- {plain(topic.summary)}" for topic in done.topics)
    worth = most_harmful(finding for finding in done.findings if finding.severity in WORTH_A_LINE)
    if worth:
        yield ""
        for finding in worth[:MAX_FINDINGS]:
            yield from _problem(finding, plain)
        if left := worth[MAX_FINDINGS:]:
            yield f"- and {counted(left)}: {', '.join(f'`{finding.rule}`' for finding in left)}"
    if done.source is not None:
        head, *groups = op_lines(done.ops, done.source, verbose=False)
        yield ""
        yield f"{plain(head)[:1].upper()}{plain(head)[1:]}"
        yield ""
        yield from (f"- {plain(line)}" for line in groups if not line.startswith(" "))


def _mark(findings: tuple[Finding, ...]) -> str:
    found = {finding.severity for finding in findings}
    return next((MARKS[severity] for severity in (Severity.ERROR, Severity.WARNING) if severity in found), "✓")


def _op_table(ops: Sequence[OpVerdict], width: int | None) -> Iterator[str]:
    """An op a row; below, why some cannot, each reason once."""
    rows = [("  op", "now", "build-wheel")]
    why: dict[str, list[str]] = {}
    for op in ops:
        mark = "✓" if op.verdict != CANNOT else "✗" if op.needed else "·"
        rows.append((f"{mark} {op.op}", op.verdict, op.mended))
        for because in dict.fromkeys(filter(None, (op.because, op.mended_because))):
            why.setdefault(because, []).append(op.op)
    indent = " " * 4 if width is None or width >= MIN_INDENT_COLUMNS else ""
    yield from (f"{indent}{line}".rstrip() for line in table(rows, "<<<", width=width and width - len(indent)))
    if why:
        yield "  why:"
    for because, those in why.items():
        yield f"    - {because}" if len(those) == 1 and those[0] in because else f"    - {because}: {', '.join(those)}"


def _group(mark: str, words: str, ops: Sequence[OpVerdict]) -> Iterator[str]:
    if ops:
        yield f"{mark} {len(ops)} {words}: {and_more([op.op for op in ops], MAX_OPS)}"


def _ops(ops: Sequence[OpVerdict]) -> str:
    return "op" if len(ops) == 1 else "ops"


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


def _problem(finding: Finding, plain: Callable[[str], str]) -> Iterator[str]:
    yield f"- {SEVERITIES[finding.severity]} `{finding.rule}`: {plain(finding.title)}"
    if finding.evidence:
        yield f"  {plain(finding.evidence[0])}"
