"""What build-wheel shows of many targets, and the exit status that they come to."""

import shlex
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dsdoctor.builder.make.make_wheel import refused_ops
from dsdoctor.builder.targets.targets import Target
from dsdoctor.cli.ending import finding_of, print_result
from dsdoctor.commands.build import publish_into
from dsdoctor.commands.build_targets import Talk, TargetOutcome, build_targets
from dsdoctor.core.build_models import BuildOrder
from dsdoctor.core.finding import Finding
from dsdoctor.report.matrix import Prefixed, TargetRow, found_lines, reason, table_lines, tagged
from dsdoctor.report.progress import BuildProgress
from dsdoctor.report.terminal import finding_lines, plan_lines

COMMAND = "build-wheel"


def run_matrix(
    order: BuildOrder, targets: tuple[Target, ...], out: Path, index: Path | None, *, dry_run: bool, as_json: bool
) -> None:
    """Build for every target, or plan for it, show what came of all, and leave with the worst status of them."""
    job = publish_into(index.absolute()) if index and not dry_run else None
    with BuildProgress(Console(stderr=True), quiet=as_json) as progress:
        told = Prefixed(progress)
        talk = Talk(
            say=lambda target, line: told.say(target.name, line), step=lambda target, step: told.step(target.name, step)
        )
        outcomes = build_targets(order, targets, out.absolute(), job=job, talk=talk, dry_run=dry_run)
    if dry_run:
        _show_plans(as_json, outcomes)
    else:
        _show_wheels(as_json, outcomes, out)
    if worst := max(one.status for one in outcomes):
        raise typer.Exit(worst)


def _show_plans(as_json: bool, outcomes: tuple[TargetOutcome, ...]) -> None:
    lines: list[str] = []
    for one in outcomes:
        planned = plan_lines(one.plan) if one.plan else ()
        lines += [f"{one.target.name}:", *(f"  {line}" for line in (*planned, *finding_lines(_findings(one))))]
    parts = tuple({**_named(one), "plan": one.plan, "findings": _findings(one)} for one in outcomes)
    print_result(COMMAND, as_json, lines, _tagged(outcomes), targets=parts)


def _show_wheels(as_json: bool, outcomes: tuple[TargetOutcome, ...], out: Path) -> None:
    lines = [
        *found_lines((one.target.name, _findings(one)) for one in outcomes),
        *table_lines(list(map(_row, outcomes))),
    ]
    if any(one.result and one.result.wheel for one in outcomes):
        lines += [f"$ python -m dsdoctor pick {shlex.quote(str(out))}"]
    print_result(COMMAND, as_json, lines, _tagged(outcomes), targets=tuple(map(_document, outcomes)))


def _row(one: TargetOutcome) -> TargetRow:
    result = one.result
    if result is None or result.wheel is None:
        return TargetRow(target=one.target.name, because=reason(_findings(one)))
    return TargetRow(
        target=one.target.name,
        wheel=Path(result.wheel).name,
        size=one.size,
        seconds=result.seconds,
        cpu_seconds=result.cpu_seconds,
        sha256=one.sha256,
    )


def _document(one: TargetOutcome) -> dict[str, Any]:
    """What the document of a single build has, and whose it is."""
    result, plan = one.result, one.plan
    return {
        **_named(one),
        "wheel": result.wheel if result else None,
        "manifest": result.manifest if result else None,
        "size": one.size,
        "sha256": one.sha256,
        "ops": result.ops if result else refused_ops(plan) if plan else (),
        "toolkit": plan.toolkit if plan else None,
        "seconds": result.seconds if result else None,
        "cpu_seconds": result.cpu_seconds if result else None,
        "log": result.log if result else None,
        "findings": _findings(one),
    }


def _named(one: TargetOutcome) -> dict[str, Any]:
    return {"target": one.target.name, "python": one.python, "torch": one.target.torch, "cuda": one.target.cuda}


def _findings(one: TargetOutcome) -> tuple[Finding, ...]:
    return (*one.findings, *([finding_of(one.error)] if one.error else []))


def _tagged(outcomes: tuple[TargetOutcome, ...]) -> tuple[Finding, ...]:
    return tuple(found for one in outcomes for found in tagged(one.target.name, _findings(one)))
