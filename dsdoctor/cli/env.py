"""The command whose lines a shell evaluates: env."""

import sys
from typing import Annotated

from dsdoctor.builder.plan.environment import lines_for
from dsdoctor.cli.ending import IMPOSSIBLE, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.env import select
from dsdoctor.core.finding import has_error
from dsdoctor.core.options import option
from dsdoctor.core.requests import Arch, BuildOrder, BuildRequest, MachineFile, PythonPath, ToolkitChoice
from dsdoctor.ui.terminal import Stream, finding_lines, show

Shell = Annotated[
    str, option(metavar="bash|zsh|fish|csh|tcsh", help="The shell that is to take the lines. Default: bash.")
]


def env_command(
    *,
    shell: Shell = "bash",
    arch: Arch = None,
    toolkit: ToolkitChoice = "auto",
    python: PythonPath = sys.executable,
    machine: MachineFile = None,
    as_json: Json = False,
) -> int:
    """Print the lines that select the CUDA toolkit and the compiler which fit this torch.

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
