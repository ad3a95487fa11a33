"""toolkit: print a CUDA_HOME that fits this torch, assembled where there is none."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dsdoctor.builder.plan.plan import plan_toolkit
from dsdoctor.builder.toolkit.assemble import assemble
from dsdoctor.builder.toolkit.choose import toolkit_offers
from dsdoctor.builder.toolkit.parts import refuse_altered
from dsdoctor.cli.ending import IMPOSSIBLE, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.build_models import Choice, ToolkitPlan
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.requests import Arch, BuildOrder, BuildRequest, Offline, PythonPath, ToolkitChoice
from dsdoctor.core.workspace import cache_folder, private_folder
from dsdoctor.probe.observe import Say, probe_for_build
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.terminal import Stream, finding_lines, show


@dataclass(frozen=True, kw_only=True)
class ToolkitMade:
    """A toolkit that fits this torch, and why it is this one; ``root`` is None, with findings, where there can be none."""

    root: str | None
    plan: ToolkitPlan | None
    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]


def toolkit_command(
    *,
    arch: Arch = None,
    python: PythonPath = sys.executable,
    toolkit: ToolkitChoice = "auto",
    offline: Offline = False,
    as_json: Json = False,
) -> int:
    """Print a CUDA_HOME that fits torch.

    It's a complete toolkit of this machine, else one assembled from parts.

    Example: dsdoctor toolkit --offline
    """
    order = BuildOrder(request=BuildRequest(arch=arch, toolkit=toolkit, offline=offline), python=python)
    talk = Console(stderr=True)
    made = assemble_toolkit(order, say=BuildProgress(talk).say)
    if as_json:
        print_result("toolkit", as_json, (), made.findings, toolkit=made.root, plan=made.plan, choices=made.choices)
    else:
        # stdout carries the folder and nothing else: it is meant for $(...)
        show(talk, finding_lines(made.findings))
        show(Stream(), [made.root] if made.root else [])
    return IMPOSSIBLE if made.root is None else OK


def assemble_toolkit(order: BuildOrder, *, say: Say) -> ToolkitMade:
    """A toolkit that fits this torch, made when there is none; findings where that cannot be."""
    with probe_for_build(order) as observing:
        observation = observing.final()
    machine = observation.machine
    private_folder(cache_folder(LocalHost()))
    advice = plan_toolkit(machine, order.request, observation.cache, toolkit_offers(observation, order.request))
    toolkit, compiler = advice.toolkit, advice.compiler
    if has_error(advice.findings) or toolkit is None or compiler is None or compiler.c_path is None:
        return ToolkitMade(root=None, plan=toolkit, choices=advice.choices, findings=advice.findings)
    if toolkit.assemble:
        assert machine.python is not None
        python, architectures = machine.python.executable, advice.architectures
        for choice in advice.choices:
            say(f"{choice.what}: {choice.value}, because {choice.because}")
        assemble(LocalHost(), toolkit, python=python, architectures=architectures, compiler=compiler.c_path, say=say)
    else:
        refuse_altered(Path(toolkit.root))
    return ToolkitMade(root=toolkit.root, plan=toolkit, choices=advice.choices, findings=advice.findings)
