"""The commands that plan and build: plan, build-wheel, prebuild."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsdoctor.builder.make.make_wheel import prepare_out, refused_ops
from dsdoctor.cli.ending import FAILED, IMPOSSIBLE, ending, print_result
from dsdoctor.cli.matrix import run_matrix
from dsdoctor.cli.options import (
    Accelerator,
    Arch,
    Cpu,
    Cudas,
    DebugInfo,
    For,
    Index,
    Jobs,
    Json,
    LocalVersion,
    MachineFile,
    NoCache,
    Nodes,
    NoLocalVersion,
    Offline,
    Ops,
    Out,
    PythonOption,
    Pythons,
    SourceOption,
    Toolkit,
    Torches,
    TorchIndex,
    order_of,
)
from dsdoctor.commands.build import Job, Planned, build, install, list_wheel, planned, publish_into
from dsdoctor.commands.build_targets import targets_of
from dsdoctor.commands.wheel_cache import WheelRequest, keep, request_of, returned
from dsdoctor.core.build_models import BuildOrder, BuildPlan, BuildResult
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.report.progress import BuildProgress
from dsdoctor.report.terminal import finding_lines, install_hint, plan_lines, result_lines, show


def plan_command(
    ops: Ops = None,
    config: For = None,
    arch: Arch = None,
    source: SourceOption = None,
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    accelerator: Accelerator = None,
    cpu: Cpu = None,
    node: Nodes = None,
    debug_info: DebugInfo = False,
    jobs: Jobs = None,
    local_version: LocalVersion = None,
    no_local_version: NoLocalVersion = False,
    offline: Offline = False,
    machine: MachineFile = None,
    as_json: Json = False,
) -> None:
    """Say what build-wheel would do, with the reason of every choice. Compiles nothing."""
    versions, host_code = (local_version, no_local_version), (cpu, node, debug_info)
    with ending("plan", as_json):
        order = order_of(
            python,
            source,
            ops,
            config,
            arch,
            accelerator,
            toolkit,
            jobs,
            versions,
            offline,
            machine=machine,
            host_code=host_code,
        )
        with planned(order) as ready:
            _show_plan("plan", as_json, ready)


def build_wheel_command(
    ops: Ops = None,
    config: For = None,
    arch: Arch = None,
    source: SourceOption = None,
    out: Out = Path("dist"),
    index: Index = None,
    python: Pythons = None,
    torch: Torches = None,
    cuda: Cudas = None,
    torch_index: TorchIndex = None,
    toolkit: Toolkit = "auto",
    accelerator: Accelerator = None,
    cpu: Cpu = None,
    node: Nodes = None,
    debug_info: DebugInfo = False,
    jobs: Jobs = None,
    local_version: LocalVersion = None,
    no_local_version: NoLocalVersion = False,
    no_cache: NoCache = False,
    offline: Offline = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Build a DeepSpeed wheel that fits this environment, prove it, and put it into --out; with --torch, one for each.

    Looks at the machine, chooses ops, GPU architectures, toolkit and compiler, assembles a CUDA toolkit where none
    fits, compiles each op by itself, packs one wheel and proves that every op is in it and loads.
    """
    versions, code = (local_version, no_local_version), (cpu, node, debug_info)
    with ending("build-wheel", as_json):
        order = order_of(
            sys.executable, source, ops, config, arch, accelerator, toolkit, jobs, versions, offline, host_code=code
        )
        targets = targets_of(python or (), torch or (), cuda or (), torch_index)
        order = replace(order, python=targets[0].python, cache=not no_cache)
        if torch or len(targets) > 1:
            run_matrix(order, targets, out, index, dry_run=dry_run, as_json=as_json)
        else:
            _build_one(order, out, index, dry_run=dry_run, as_json=as_json)


def _build_one(order: BuildOrder, out: Path, index: Path | None, *, dry_run: bool, as_json: bool) -> None:
    """One wheel for an environment as it is; the one that is there where nothing has changed since."""
    request = None if dry_run else request_of(order)
    if request is not None and _show_returned(request, out.absolute(), index, as_json):
        return
    with planned(order) as ready:
        if dry_run:
            _show_plan("build-wheel", as_json, ready)
            return
        result = _build("build-wheel", ready, out, as_json, job=publish_into(index.absolute()) if index else None)
        if request is not None:
            keep(request, result, ready.plan)
        if result.wheel and not as_json:
            show(Console(), [install_hint(result)])


def _show_returned(request: WheelRequest, out: Path, index: Path | None, as_json: bool) -> bool:
    """Return the finished wheel of an order, if there is one: says whether."""
    prepare_out(out)
    found = returned(request, out)
    if found is None:
        return False
    result = found.result
    if index is not None:
        prepare_out(index.absolute(), "--index")
        result = replace(result, findings=(*result.findings, *list_wheel(index.absolute(), result)))
    if not as_json:
        show(Console(stderr=True), ["* nothing that this wheel is made of has changed: it is taken from the cache"])
    _show_build("build-wheel", as_json, result, (*found.plan.findings, *result.findings), found.plan)
    if has_error(result.findings):
        raise typer.Exit(FAILED)
    if not as_json:
        show(Console(), [install_hint(result)])
    return True


def prebuild_command(
    ops: Ops = None,
    config: For = None,
    arch: Arch = None,
    source: SourceOption = None,
    out: Out = Path("dist"),
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    accelerator: Accelerator = None,
    cpu: Cpu = None,
    node: Nodes = None,
    debug_info: DebugInfo = False,
    jobs: Jobs = None,
    no_cache: NoCache = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Build the wheel as build-wheel does, then install it into the environment (without its dependencies)."""
    with (
        ending("prebuild", as_json),
        planned(
            order_of(
                python,
                source,
                ops,
                config,
                arch,
                accelerator,
                toolkit,
                jobs,
                (None, False),
                offline,
                host_code=(cpu, node, debug_info),
                cache=not no_cache,
            )
        ) as ready,
    ):
        result = _build("prebuild", ready, out, as_json, job=install)
        if not as_json:
            show(Console(), [f"✓ installed for {ready.plan.python}: {Path(result.wheel or '').name}"])


def _build(command: str, ready: Planned, out: Path, as_json: bool, job: Job | None = None) -> BuildResult:
    """Refuse an impossible plan, else build, do the job on the wheel, show and leave with the right status."""
    if has_error(ready.plan.findings):
        _show_build(command, as_json, None, ready.plan.findings, ready.plan)
        raise typer.Exit(IMPOSSIBLE)
    console = Console(stderr=True)
    if not as_json:
        show(console, [*plan_lines(ready.plan), *finding_lines(ready.plan.findings)])
    with BuildProgress(console, quiet=as_json) as progress:
        result = build(ready, out.absolute(), say=progress.say, watch=progress.step)
    if result.wheel and job:
        result = replace(result, findings=(*result.findings, *job(ready, result)))
    _show_build(command, as_json, result, (*ready.plan.findings, *result.findings), ready.plan)
    if not result.wheel or has_error(result.findings):
        raise typer.Exit(FAILED)
    return result


def _show_build(
    command: str, as_json: bool, result: BuildResult | None, findings: tuple[Finding, ...], plan: BuildPlan
) -> None:
    lines = [*result_lines(result), *finding_lines(result.findings)] if result else list(finding_lines(findings))
    ops = result.ops if result else refused_ops(plan)
    print_result(
        command,
        as_json,
        lines,
        findings,
        wheel=result.wheel if result else None,
        manifest=result.manifest if result else None,
        ops=ops,
        toolkit=plan.toolkit,
        seconds=result.seconds if result else None,
        cpu_seconds=result.cpu_seconds if result else None,
        log=result.log if result else None,
    )


def _show_plan(command: str, as_json: bool, ready: Planned) -> None:
    plan = ready.plan
    print_result(command, as_json, [*plan_lines(plan), *finding_lines(plan.findings)], plan.findings, plan=plan)
    if has_error(plan.findings):
        raise typer.Exit(IMPOSSIBLE)
