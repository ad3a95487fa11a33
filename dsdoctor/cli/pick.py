"""The command pick."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsdoctor.cli.ending import FOUND, ending, print_result
from dsdoctor.cli.options import Json, MachineFile, PythonOption
from dsdoctor.commands.pick import pick
from dsdoctor.report.machines import candidate_lines

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder of wheels, or an index of --index.", show_default=False)
]
Op = Annotated[str | None, typer.Option("--op", metavar="OP,OP", help="Ops that the wheel must hold.")]


def pick_command(
    folder: Folder,
    op: Op = None,
    python: PythonOption = sys.executable,
    machine: MachineFile = None,
    as_json: Json = False,
) -> None:
    """Name the DeepSpeed wheel of a folder or an index that fits this machine, or why none does.

    Each wheel is judged as verify judges it: Python and platform, torch and CUDA release, GPU architectures, processor
    instructions, glibc, the libraries it links. Nothing of a wheel is run. Exit status 1 when none fits.
    """
    with ending("pick", as_json):
        ops = tuple(name.strip() for name in (op or "").split(",") if name.strip())
        found = pick(python, machine, folder, ops)
        best = found[0] if found[0].fits else None
        interpreter = "python" if python == sys.executable else shlex.quote(python)
        install = f"{interpreter} -m pip install {shlex.quote(best.wheel)}" if best else None
        findings = () if best else tuple(finding for one in found for finding in one.findings)
        lines = candidate_lines([(one.wheel, one.fits, one.findings) for one in found], install)
        print_result("pick", as_json, lines, findings, wheel=best.wheel if best else None, wheels=found)
        if best is None:
            raise typer.Exit(FOUND)
