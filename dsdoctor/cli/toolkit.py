"""The command that prints a CUDA_HOME, made where there is none: toolkit."""

import sys

from rich.console import Console

from dsdoctor.cli.ending import IMPOSSIBLE, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.toolkit import assemble_toolkit
from dsdoctor.core.requests import Arch, BuildOrder, BuildRequest, Offline, PythonPath, ToolkitChoice
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.terminal import Stream, finding_lines, show


def toolkit_command(
    *,
    arch: Arch = None,
    python: PythonPath = sys.executable,
    toolkit: ToolkitChoice = "auto",
    offline: Offline = False,
    as_json: Json = False,
) -> int:
    """Print a CUDA_HOME that fits torch: one that is here and whole, else one assembled from parts.

    Example: dsdoctor toolkit --offline
    """
    order = BuildOrder(request=BuildRequest(arch=arch, toolkit=toolkit, offline=offline), python=python)
    talk = Console(stderr=True)
    made = assemble_toolkit(order, say=BuildProgress(talk, quiet=as_json).say)
    if as_json:
        print_result("toolkit", as_json, (), made.findings, toolkit=made.root, plan=made.plan, choices=made.choices)
    else:
        # stdout carries the folder and nothing else: it is meant for $(...)
        show(talk, finding_lines(made.findings))
        show(Stream(), [made.root] if made.root else [])
    return IMPOSSIBLE if made.root is None else OK
