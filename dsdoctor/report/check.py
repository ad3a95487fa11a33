"""What a check found -> lines: one for each topic, details where something is wrong, a count at the end."""

from collections.abc import Iterable, Iterator

from dsdoctor.builder.plan.op_table import BUILDS, CANNOT, OpVerdict
from dsdoctor.checks import Examined
from dsdoctor.core.build_models import Source
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.report.terminal import MARKS, finding_lines

WORTH_A_LINE = {Severity.WARNING, Severity.ERROR}


def check_lines(
    topics: Iterable[Examined], ops: tuple[OpVerdict, ...], source: Source | None, *, verbose: bool
) -> Iterator[str]:
    """The topics, the op table, the count. ``verbose`` shows notes and every op."""
    topics = tuple(topics)
    for topic in topics:
        yield f"{_mark(topic.findings)} {topic.summary}"
        shown = [finding for finding in topic.findings if verbose or finding.severity in WORTH_A_LINE]
        for line in finding_lines(shown):
            yield f"    {line}"
    if source is not None:
        yield from _op_lines(ops, source, verbose=verbose)
    yield from _count(tuple(finding for topic in topics for finding in topic.findings), verbose=verbose)


def _mark(findings: tuple[Finding, ...]) -> str:
    found = {finding.severity for finding in findings}
    return next((MARKS[severity] for severity in (Severity.ERROR, Severity.WARNING) if severity in found), "✓")


def _op_lines(ops: tuple[OpVerdict, ...], source: Source, *, verbose: bool) -> Iterator[str]:
    count = {verdict: sum(op.verdict == verdict for op in ops) for verdict in ("installed", "builds", "cannot")}
    by_build_wheel = sum(op.mended == BUILDS for op in ops)
    mark = "✓" if not count["cannot"] else "!"
    yield (
        f"{mark} Ops of DeepSpeed {source.version} for {source.accelerator} ({source.because}): {count['installed']} installed, "
        f"{count['builds']} build, {count['cannot']} cannot as the environment stands; build-wheel gets {by_build_wheel}"
    )
    width = max((len(op.op) for op in ops), default=0)
    reasons: dict[str | None, list[OpVerdict]] = {}
    for op in ops:
        reasons.setdefault(op.because if op.verdict == CANNOT else op.verdict, []).append(op)
    if verbose:
        yield f"      {'op':<{width}}  {'as it stands':<12}  build-wheel"
        for op in ops:
            because = "; ".join(dict.fromkeys(filter(None, (op.because, op.mended_because))))
            row = f"{op.op:<{width}}  {op.verdict:<12}  {op.mended:<6}  {because}"
            yield f"    {'✗' if op.verdict == CANNOT else '✓'} {row}".rstrip()
        return
    for why, alike in reasons.items():
        cannot = alike[0].verdict == CANNOT
        yield f"    {'✗' if cannot else '✓'} {', '.join(op.op for op in alike)}: {why}"


def _count(findings: tuple[Finding, ...], *, verbose: bool) -> Iterator[str]:
    count = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    errors, warnings, notes = (count[s] for s in (Severity.ERROR, Severity.WARNING, Severity.NOTE))
    hidden = f" (-v shows {notes} {_plural('note', notes)} and every op)" if notes and not verbose else ""
    if not errors and not warnings:
        yield f"✓ nothing is wrong{hidden}"
        return
    mark = MARKS[Severity.ERROR if errors else Severity.WARNING]
    yield f"{mark} {errors} {_plural('error', errors)}, {warnings} {_plural('warning', warnings)}{hidden}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
