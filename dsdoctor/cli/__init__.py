"""The command line: parse, call, show, exit code. Results go to stdout, talk to stderr."""

import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from dsdoctor import __version__
from dsdoctor.cli.build import build_wheel_command, plan_command, prebuild_command, toolkit_command
from dsdoctor.cli.check import check_command, explain_command
from dsdoctor.cli.ending import ending, print_result
from dsdoctor.cli.machines import compare_command, env_command, record_command, verify_command
from dsdoctor.cli.options import Json, PythonOption
from dsdoctor.errors import DoctorError
from dsdoctor.report.terminal import machine_lines
from dsdoctor.work import Order, look

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Gets DeepSpeed built and keeps it running right. Exit status: 0 done, 2 usage, 3 impossible plan, "
    "4 build failed, 5 dsdoctor's own failure.",
)


def look_command(python: PythonOption = sys.executable, as_json: Json = False) -> None:
    """Show what is here: toolkits, compilers, GPUs, torch, DeepSpeed, libraries. Judges nothing."""
    with ending("look", as_json):
        machine = look(Order(python=python)).machine
        print_result("look", as_json, machine_lines(machine), (), machine=machine)


COMMANDS: dict[str, Callable[..., None]] = {
    "look": look_command,
    "check": check_command,
    "explain": explain_command,
    "env": env_command,
    "verify": verify_command,
    "record": record_command,
    "compare": compare_command,
    "plan": plan_command,
    "build-wheel": build_wheel_command,
    "prebuild": prebuild_command,
    "toolkit": toolkit_command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print dsdoctor's version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of ``python -m dsdoctor`` and of the ``dsdoctor`` script."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        app(prog_name="dsdoctor")
    except Exception:
        # a defect of ours: 1 would say that the machine has an error
        traceback.print_exc()
        sys.exit(DoctorError.exit_code)


def _interrupt(*_: object) -> NoReturn:
    """Once is enough: a second Ctrl-C would break off the cleaning up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
