"""What build-wheel shows of many targets, and the exit status that they come to."""

import shlex
from pathlib import Path
from typing import Any

from dsdoctor.builder.build import publish_into
from dsdoctor.builder.build_targets import Talk, TargetOutcome, build_targets
from dsdoctor.builder.make.make_wheel import refused_ops
from dsdoctor.builder.targets import Target
from dsdoctor.cli.ending import finding_of, print_result
from dsdoctor.core.files import check_folder
from dsdoctor.core.finding import Finding
from dsdoctor.core.requests import BuildOrder
from dsdoctor.report.matrix import Prefixed, TargetRow, found_lines, reason, table_lines, tagged
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.terminal import finding_lines, plan_lines

COMMAND = "build-wheel"


def run_matrix(
    order: BuildOrder, targets: tuple[Target, ...], out: Path, index: Path | None, *, dry_run: bool, as_json: bool
) -> int:
    """Build for every target, or plan for it, show what came of all, and return the worst status of them."""
    check_folder(out, "--out")
    after = publish_into(index) if index and not dry_run else None
    with BuildProgress(quiet=as_json) as progress:
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
        lines += [f"$ python -m dsdoctor pick {shlex.quote(str(out))}"]
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
