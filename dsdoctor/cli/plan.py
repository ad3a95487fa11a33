"""The command that decides and compiles nothing: plan."""

import sys
from collections.abc import Iterable
from dataclasses import replace

from dsdoctor.builder.build import build_command, prepare_plan
from dsdoctor.cli.ending import IMPOSSIBLE, OK, print_result
from dsdoctor.cli.options import Json, Verbose
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.finding import Step, has_error, with_options
from dsdoctor.core.requests import BuildOrder, MachineFile, PythonPath
from dsdoctor.probe.observe import probe_for_build
from dsdoctor.ui.screen import plan_end_lines, plan_lines


def plan_command(
    *,
    order: BuildOrder | None = None,
    python: PythonPath = sys.executable,
    machine: MachineFile = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Show what build-wheel would do, with the reason for each choice. Compiles nothing.

    Example: dsdoctor plan --for ds_config.json
    """
    return show_plan(
        "plan", replace(order or BuildOrder(), python=python, machine=machine), as_json=as_json, verbose=verbose
    )


def show_plan(
    command: str, order: BuildOrder, *, as_json: bool, verbose: bool = False, more: Iterable[Step] = ()
) -> int:
    """Plan, show the plan, and say by the exit status whether it can be carried out. ``more``: options of build-wheel alone."""
    plan = _decided(order)
    lines = [*plan_lines(plan), *plan_end_lines(plan, verbose=verbose, build=with_options(build_command(order), more))]
    print_result(command, as_json, lines, plan.findings, plan=plan)
    return IMPOSSIBLE if has_error(plan.findings) else OK


def _decided(order: BuildOrder) -> BuildPlan:
    with probe_for_build(order) as observing:
        observation = observing.final()
    with prepare_plan(order, observation) as ready:
        return ready.plan
