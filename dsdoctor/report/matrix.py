"""Builds for several targets -> progress lines with the target's name, and one table at the end."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dsdoctor.core.build_models import OpProgress
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.terminal import finding_lines

MIB = 1 << 20
HEAD = ("target", "MiB", "seconds", "CPU-seconds", "wheel", "sha256")
LEFT = {"target", "wheel", "sha256"}


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """One target in the table: its wheel's file name, or (None) why there is none. ``size`` is in bytes."""

    target: str
    wheel: str | None = None
    size: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    sha256: str | None = None
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class TargetFinding(Finding):
    """A finding with the target that it was found for."""

    target: str


class Prefixed:
    """The progress of several builds as one: each line and each op with the name of its target in front. Thread-safe."""

    def __init__(self, progress: BuildProgress) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def say(self, target: str, line: str) -> None:
        """Print one plain line."""
        with self._lock:
            self._progress.say(f"{target}: {line}")

    def step(self, target: str, step: OpProgress) -> None:
        """Show that an op of a target moved on."""
        with self._lock:
            self._progress.step(replace(step, op=f"{target} {step.op}"))


def table_lines(rows: Sequence[TargetRow]) -> Iterator[str]:
    """One line for each target under one head; in place of the figures stands the reason where there is no wheel."""
    cells = [_cells(row) for row in rows if row.wheel]
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    widths[0] = max(len(row.target) for row in (*rows, TargetRow(target=HEAD[0])))
    if cells:
        yield f"  {_aligned(HEAD, widths)}"
    for row in rows:
        if row.wheel:
            yield f"✓ {_aligned(_cells(row), widths)}"
        else:
            yield f"✗ {row.target:<{widths[0]}}  no wheel: {row.because}"


def _cells(row: TargetRow) -> tuple[str, ...]:
    figures = (f"{(row.size or 0) / MIB:.1f}", f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}")
    return row.target, *figures, row.wheel or "", row.sha256 or ""


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    columns = zip(HEAD, cells, widths, strict=True)
    return "  ".join(
        f"{cell:<{width}}" if head in LEFT else f"{cell:>{width}}" for head, cell, width in columns
    ).rstrip()


def found_lines(found: Iterable[tuple[str, Sequence[Finding]]]) -> Iterator[str]:
    """Findings of several targets, each once; followed by its targets where it is not about all of them."""
    found = tuple(found)
    targets: dict[Finding, list[str]] = {}
    for target, findings in found:
        for finding in findings:
            targets.setdefault(finding, []).append(target)
    for finding, names in targets.items():
        yield from finding_lines((finding,))
        if len(names) < len(found):
            yield f"    of {', '.join(names)}"


def tagged(target: str, findings: Iterable[Finding]) -> tuple[TargetFinding, ...]:
    """Findings with the target they are about, for a document."""
    return tuple(
        TargetFinding(
            target=target,
            rule=finding.rule,
            severity=finding.severity,
            title=finding.title,
            evidence=finding.evidence,
            affects=finding.affects,
            fix=finding.fix,
        )
        for finding in findings
    )


def reason(findings: Iterable[Finding]) -> str:
    """The first error, in one line."""
    return next((finding.title for finding in findings if finding.severity is Severity.ERROR), "it is not known why")
