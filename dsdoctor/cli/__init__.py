"""The command line: parse, call, show, exit code. Results go to stdout, talk to stderr."""

import importlib
import io
import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from dsdoctor.core.errors import DoctorError
from dsdoctor.core.version import __version__

COMMANDS = {
    "look": "dsdoctor.cli.look:look_command",
    "check": "dsdoctor.cli.check:check_command",
    "explain": "dsdoctor.cli.explain:explain_command",
    "diagnose": "dsdoctor.cli.diagnose:diagnose_command",
    "env": "dsdoctor.cli.machines:env_command",
    "plan": "dsdoctor.cli.build:plan_command",
    "build-wheel": "dsdoctor.cli.build:build_wheel_command",
    "prebuild": "dsdoctor.cli.build:prebuild_command",
    "toolkit": "dsdoctor.cli.toolkit:toolkit_command",
    "verify": "dsdoctor.cli.machines:verify_command",
    "pick": "dsdoctor.cli.pick:pick_command",
    "push": "dsdoctor.cli.push:push_command",
    "cache": "dsdoctor.cli.cache:app",
    "record": "dsdoctor.cli.machines:record_command",
    "compare": "dsdoctor.cli.machines:compare_command",
    "comm": "dsdoctor.cli.comm:comm_command",
    "trace": "dsdoctor.cli.trace:app",
}
"""Where each command is, or the group of its commands. Only the one that is called is imported: a diagnosis must start fast."""

QUIET_AT_PIPES = ("look", "check", "explain", "diagnose", "env", "verify", "pick", "compare", "trace", "cache")
"""Commands that only read: a reader that goes away ends them as it ends any filter, and not with a verdict."""

HELP = (
    "Gets DeepSpeed built and keeps it running right. Exit status: 0 done, 1 an error was found, 2 usage, "
    "3 impossible plan, 4 build failed, 5 dsdoctor's own failure, 6 slow (comm)."
)


def make_app(only: str | None = None) -> typer.Typer:
    """The command line with all commands, or with one."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=HELP,
    )
    app.callback(invoke_without_command=True)(_root)
    for name, place in COMMANDS.items():
        if only in {None, name}:
            module, _, function = place.partition(":")
            found = getattr(importlib.import_module(module), function)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name)
            else:
                app.command(name)(found)
    return app


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in QUIET_AT_PIPES:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        make_app(first if first in COMMANDS else None)(prog_name="dsdoctor")
    except Exception:
        # a defect of ours: 1 would say that the machine has an error
        traceback.print_exc()
        sys.exit(DoctorError.exit_code)


def _interrupt(*_: object) -> NoReturn:
    """Once is enough: a second Ctrl-C would break off the cleaning up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
