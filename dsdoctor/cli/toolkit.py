"""The command that prints a CUDA_HOME, made where there is none: toolkit."""

import sys

import typer
from rich.console import Console

from dsdoctor.cli.ending import IMPOSSIBLE, ending, print_result
from dsdoctor.cli.options import Arch, Json, Offline, PythonOption, Toolkit, order_of
from dsdoctor.commands.toolkit import assemble_toolkit
from dsdoctor.report.progress import BuildProgress
from dsdoctor.report.terminal import finding_lines, show


def toolkit_command(
    arch: Arch = None,
    python: PythonOption = sys.executable,
    toolkit: Toolkit = "auto",
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Print a CUDA_HOME that fits torch: one that is here and whole, else one assembled from parts."""
    with ending("toolkit", as_json):
        order = order_of(python, None, None, None, arch, None, toolkit, None, (None, False), offline)
        talk = Console(stderr=True)
        root, findings = assemble_toolkit(order, say=BuildProgress(talk, quiet=as_json).say)
        if as_json:
            print_result("toolkit", as_json, (), findings, toolkit=root)
        else:
            # stdout carries the folder and nothing else: it is meant for $(...)
            show(talk, finding_lines(findings))
            show(Console(), [root] if root else [])
        if root is None:
            raise typer.Exit(IMPOSSIBLE)
