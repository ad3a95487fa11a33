"""build-wheel for several targets: progress lines with the name of each, one table at the end, and one exit status."""

import shlex
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsdoctor.builder.build import publish_into
from dsdoctor.builder.build_targets import Talk, TargetOutcome, build_targets
from dsdoctor.builder.make.make_wheel import refused_ops
from dsdoctor.builder.targets import Target
from dsdoctor.cli.ending import finding_of, print_result
from dsdoctor.core.build_models import OpProgress
from dsdoctor.core.files import check_folder
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.requests import BuildOrder
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.screen import plan_lines
from dsdoctor.ui.terminal import finding_lines

MIB = 1 << 20
HEAD = ("target", "MiB", "seconds", "CPU-seconds", "wheel", "sha256")
LEFT = {"target", "wheel", "sha256"}
COMMAND = "build-wheel"


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
            ranks=finding.ranks,
            fix=finding.fix,
        )
        for finding in findings
    )


def reason(findings: Iterable[Finding]) -> str:
    """The first error, in one line."""
    return next((finding.title for finding in findings if finding.severity is Severity.ERROR), "reason unknown")


def run_matrix(
    order: BuildOrder, targets: tuple[Target, ...], out: Path, index: Path | None, *, dry_run: bool, as_json: bool
) -> int:
    """Build for every target, or plan for it, show what came of all, and return the worst status of them."""
    check_folder(out, "--out")
    after = publish_into(index) if index and not dry_run else None
    with BuildProgress() as progress:
        told = Prefixed(progress)
        talk = Talk(
            say=lambda target, line: told.say(target.name, line), step=lambda target, step: told.step(target.name, step)
        )
        outcomes = build_targets(order, targets, out, after=after, talk=talk, dry_run=dry_run)
    if dry_run:
        _show_plans(as_json, outcomes)
    else:
        _show_wheels(as_json, outcomes, out)
    return max(outcome.status for outcome in outcomes)


def _cells(row: TargetRow) -> tuple[str, ...]:
    figures = (f"{(row.size or 0) / MIB:.1f}", f"{row.seconds:.0f}", f"{row.cpu_seconds:.0f}")
    return row.target, *figures, row.wheel or "", row.sha256 or ""


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    columns = zip(HEAD, cells, widths, strict=True)
    return "  ".join(
        f"{cell:<{width}}" if head in LEFT else f"{cell:>{width}}" for head, cell, width in columns
    ).rstrip()


def _show_plans(as_json: bool, outcomes: tuple[TargetOutcome, ...]) -> None:
    lines: list[str] = []
    for outcome in outcomes:
        planned = plan_lines(outcome.plan) if outcome.plan else ()
        lines += [f"{outcome.target.name}:", *(f"  {line}" for line in (*planned, *finding_lines(_findings(outcome))))]
    parts = tuple({**_named(outcome), "plan": outcome.plan, "findings": _findings(outcome)} for outcome in outcomes)
    print_result(COMMAND, as_json, lines, _tagged(outcomes), targets=parts)


def _show_wheels(as_json: bool, outcomes: tuple[TargetOutcome, ...], out: Path) -> None:
    lines = [
        *found_lines((outcome.target.name, _findings(outcome)) for outcome in outcomes),
        *table_lines(list(map(_row, outcomes))),
    ]
    if any(outcome.result and outcome.result.wheel for outcome in outcomes):
        lines += [f"$ python -m dsdoctor wheel pick {shlex.quote(str(out))}"]
    print_result(COMMAND, as_json, lines, _tagged(outcomes), targets=tuple(map(_document, outcomes)))


def _row(outcome: TargetOutcome) -> TargetRow:
    result = outcome.result
    if result is None or result.wheel is None:
        return TargetRow(target=outcome.target.name, because=reason(_findings(outcome)))
    return TargetRow(
        target=outcome.target.name,
        wheel=Path(result.wheel).name,
        size=outcome.size,
        seconds=result.seconds,
        cpu_seconds=result.cpu_seconds,
        sha256=outcome.sha256,
    )


def _document(outcome: TargetOutcome) -> dict[str, Any]:
    """What the document of a single build has, and whose it is."""
    result, plan = outcome.result, outcome.plan
    return {
        **_named(outcome),
        "wheel": result.wheel if result else None,
        "manifest": result.manifest if result else None,
        "size": outcome.size,
        "sha256": outcome.sha256,
        "ops": result.ops if result else refused_ops(plan) if plan else (),
        "toolkit": plan.toolkit if plan else None,
        "seconds": result.seconds if result else None,
        "cpu_seconds": result.cpu_seconds if result else None,
        "log": result.log if result else None,
        "findings": _findings(outcome),
    }


def _named(outcome: TargetOutcome) -> dict[str, Any]:
    return {
        "target": outcome.target.name,
        "python": outcome.python,
        "torch": outcome.target.torch,
        "cuda": outcome.target.cuda,
    }


def _findings(outcome: TargetOutcome) -> tuple[Finding, ...]:
    return (*outcome.findings, *([finding_of(outcome.error)] if outcome.error else []))


def _tagged(outcomes: tuple[TargetOutcome, ...]) -> tuple[Finding, ...]:
    return tuple(found for outcome in outcomes for found in tagged(outcome.target.name, _findings(outcome)))
