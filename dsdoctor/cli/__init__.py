"""The command line: parse, call, show, exit status. Results go to stdout, talk to stderr."""

import io
import os
import signal
import sys
from typing import NoReturn

from dsdoctor.cli.aliases import renamed
from dsdoctor.cli.first_words import say_first_words, version_line
from dsdoctor.core.errors import DoctorError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Entry point of ``python -m dsdoctor`` and of the ``dsdoctor`` script."""
    if sys.argv[1:2] == ["run"] or sys.argv[1:] == ["help", "run"]:
        # the script gets this process as it is: its signals, its streams, whatever is closed
        from dsdoctor.cli.run import become_script

        become_script(sys.argv[2:] if sys.argv[1] == "run" else ["--help"])
    _open_closed()
    # until the command begins a signal waits: nothing has been done, and nobody could say so
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    for number in ENDING:
        signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.argv[1:] == ["--version"]:
        print(version_line())
        sys.exit(_flushed(0))
    _, words = renamed(sys.argv[1:])
    say_first_words(words)
    try:
        from dsdoctor.cli.app import is_filter, run

        if is_filter(words):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.exit(_flushed(run(sys.argv[1:], begun=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))))
    except Exception as error:
        import traceback

        # a defect of ours: 1 would say that the machine has an error
        traceback.print_exc()
        sys.exit(_flushed(_told(error)))


def _open_closed() -> None:
    """Nothing that is opened later may become stdin, stdout or stderr: one that was closed (``>&-``) is /dev/null."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )


def _told(error: Exception) -> int:
    """The document of a defect, where one was asked for; the exit status."""
    try:
        from dsdoctor.cli.app import end_by_defect

        return end_by_defect(sys.argv[1:], error)
    except Exception:
        # a part of dsdoctor that cannot be imported, for example: the traceback says all that can be said
        return DoctorError.exit_code


def _flushed(status: int) -> int:
    """Nothing is left for the interpreter to write at its end: what a full disk refuses would be a status of its own."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return status


def _interrupt(number: int, _: object) -> NoReturn:
    """Once is enough: a second Ctrl-C would break off the cleaning up. Raises KeyboardInterrupt with the signal's number."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)
