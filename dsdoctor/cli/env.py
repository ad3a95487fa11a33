"""env: an order -> the lines by which a shell selects toolkit and compiler for other tools."""

import sys
from pathlib import Path
from typing import Annotated

from dsdoctor.builder.plan.choices import working_torch
from dsdoctor.builder.plan.compiler import choose_compiler
from dsdoctor.builder.plan.environment import ShellSettings, lines_for
from dsdoctor.builder.plan.plan import plan_toolkit
from dsdoctor.builder.toolkit.choose import toolkit_offers
from dsdoctor.cli.ending import IMPOSSIBLE, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.build_models import ToolkitPlan
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Compiler
from dsdoctor.core.options import option
from dsdoctor.core.requests import Arch, BuildOrder, BuildRequest, MachineFile, PythonPath, ToolkitChoice
from dsdoctor.probe.observe import Observation, probe_for_build
from dsdoctor.ui.terminal import Stream, finding_lines, show

Shell = Annotated[str, option(metavar="bash|zsh|fish|csh|tcsh", help="Shell to print for. Default: bash.")]


def env_command(
    *,
    shell: Shell = "bash",
    arch: Arch = None,
    toolkit: ToolkitChoice = "auto",
    python: PythonPath = sys.executable,
    machine: MachineFile = None,
    as_json: Json = False,
) -> int:
    """Print shell lines that select the CUDA toolkit and compiler.

    In fish: dsdoctor env --shell fish | source. In csh and tcsh: ``eval "`dsdoctor env --shell csh`"``.

    Example: eval "$(dsdoctor env)"
    """
    request = BuildRequest(arch=arch, toolkit=toolkit, offline=True)
    settings, findings = select(BuildOrder(request=request, python=python, machine=machine))
    bad = has_error(findings)
    lines = [] if bad else lines_for(shell, settings)
    if as_json:
        print_result("env", as_json, (), findings, set=settings.values, prepend=settings.prepend, shell=lines)
    else:
        # stdout carries the lines and nothing else: it is meant for eval
        show(Stream(stderr=True), finding_lines(findings))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return IMPOSSIBLE if bad else OK


def select(order: BuildOrder) -> tuple[ShellSettings, tuple[Finding, ...]]:
    """The settings that select toolkit and compiler for other tools. Raises ImpossiblePlan where they name nothing real."""
    with probe_for_build(order) as observing:
        observation = observing.final()
    machine = observation.machine
    torch = working_torch(machine)
    if torch.cuda is None:
        compiler, _, findings = choose_compiler(machine, None, device_code=False)
        return _settings(observation, None, compiler, ()), findings
    advice = plan_toolkit(machine, order.request, observation.cache, toolkit_offers(observation, order.request))
    if advice.toolkit is not None and advice.toolkit.assemble and not has_error(advice.findings):
        raise ImpossiblePlan(
            f"no complete CUDA toolkit of torch's release {torch.cuda} found; one can be assembled in {advice.toolkit.root}",
            hint="python -m dsdoctor toolkit",
        )
    return _settings(observation, advice.toolkit, advice.compiler, advice.architectures), advice.findings


def _settings(
    observation: Observation, toolkit: ToolkitPlan | None, compiler: Compiler | None, architectures: tuple[str, ...]
) -> ShellSettings:
    values: dict[str, str] = {}
    prepend: dict[str, tuple[str, ...]] = {}
    if compiler is not None and compiler.c_path is not None:
        values |= {"CC": compiler.c_path, "CXX": compiler.path}
    if toolkit is not None:
        values |= {"CUDA_HOME": toolkit.root, "TORCH_CUDA_ARCH_LIST": ";".join(architectures)}
        values |= {"CUDA_PATH": toolkit.root} if observation.machine.variables.get("CUDA_PATH") else {}
        known = next((known for known in observation.machine.toolkits if known.root == toolkit.root), None)
        libraries = [folder for folder in (known.library_dirs if known else ()) if not folder.endswith("/stubs")]
        prepend = {"PATH": (f"{toolkit.root}/bin",), "LD_LIBRARY_PATH": tuple(libraries[:1])}
    named = [*(values[name] for name in ("CUDA_HOME", "CC", "CXX") if name in values), *sum(prepend.values(), ())]
    gone = [path for path in named if observation.is_here and not Path(path).exists()]
    if gone:
        raise ImpossiblePlan(f"{gone[0]} was found, but does not exist", hint="run it again")
    host = LocalHost()
    before = {name: value for name in prepend if (value := host.variable(name))}
    return ShellSettings(values=values, prepend={n: f for n, f in prepend.items() if f}, before=before)
