"""The command that only looks."""

import sys

from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.requests import MachineFile, PythonPath
from dsdoctor.probe.observe import observe
from dsdoctor.ui.screen import machine_lines


def look_command(*, python: PythonPath = sys.executable, machine: MachineFile = None, as_json: Json = False) -> None:
    """Show the toolkits, compilers, GPUs, torch, DeepSpeed and libraries on this machine, without judging them.

    Example: dsdoctor machine look
    """
    seen = observe(python, machine, whole=True).machine
    print_result("machine look", as_json, machine_lines(seen), (), machine=seen)
