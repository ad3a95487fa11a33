"""The command line: parse, call, show, exit status. Results go to stdout, talk to stderr."""

import io
import signal
import sys
import traceback
from typing import NoReturn

from dsdoctor.core.errors import DoctorError


def main() -> None:
    """Entry point of ``python -m dsdoctor`` and of the ``dsdoctor`` script."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from dsdoctor.cli.app import COMMANDS, run

        if (command := COMMANDS.get("".join(sys.argv[1:2]))) and command.filters:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.exit(run(sys.argv[1:]))
    except Exception:
        # a defect of ours: 1 would say that the machine has an error
        traceback.print_exc()
        sys.exit(DoctorError.exit_code)


def _interrupt(*_: object) -> NoReturn:
    """Once is enough: a second Ctrl-C would break off the cleaning up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
