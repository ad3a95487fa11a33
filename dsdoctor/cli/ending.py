"""How every command ends: one result on stdout, or one error with the next step, and a number.

What shows it is imported at the end: every command imports this file before it begins.
"""

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from dsdoctor.core.errors import BuildFailed, DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.finding import Finding

OK, FOUND, USAGE = 0, 1, UsageError.exit_code
IMPOSSIBLE, FAILED = ImpossiblePlan.exit_code, BuildFailed.exit_code

CALLED_AS = ContextVar("CALLED_AS", default="")
"""The name that a command was called by, if it is one of an earlier release: its document has that name, as it had."""


@contextlib.contextmanager
def called_as(name: str) -> Iterator[None]:
    """Documents of commands have this name, unless it is ""."""
    before = CALLED_AS.set(name)
    try:
        yield
    finally:
        CALLED_AS.reset(before)


def print_result(
    command: str, as_json: bool, lines: Iterable[str], findings: tuple[Finding, ...], **parts: Any
) -> None:
    """Show lines, or the one document with the command's own parts."""
    if as_json:
        from dsdoctor.ui.screen import document

        # a reader that has gone changes no status
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(document(CALLED_AS.get() or command, findings, **parts) + "\n")
    else:
        _show(lines)


def end_by_error(command: str, error: DoctorError, *, nothing: Mapping[str, Any], as_json: bool) -> int:
    """One error, the next step, nothing half-made; the exit status."""
    if not (as_json and _told_as_document(command, error, nothing)):
        message, hint = _shown(error)
        _show([f"✗ {message}", *([f"    Fix: {hint}"] if hint else [])], stderr=True)
    return error.exit_code


def _told_as_document(command: str, error: DoctorError, nothing: Mapping[str, Any]) -> bool:
    """Whether stdout took the document of an error, or its reader has gone; a full disk takes none."""
    from dsdoctor.ui.screen import document

    try:
        sys.stdout.write(document(command, (finding_of(error),), **nothing) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    except OSError:
        return False
    return True


def interrupted_by(number: int) -> int:
    """The exit status after a signal, as a shell tells it.

    >>> interrupted_by(signal.SIGINT), interrupted_by(signal.SIGTERM)
    (130, 143)
    """
    return 128 + number


def end_by_interrupt(command: str, error: KeyboardInterrupt, *, nothing: Mapping[str, Any], as_json: bool) -> int:
    """Ctrl-C, or a signal that means the same; the exit status."""
    said = DoctorError("interrupted; partial output removed", hint="rerun to retry")
    if as_json:
        end_by_error(command, said, nothing=nothing, as_json=True)
    else:
        _show([f"✗ {said.message}, {said.hint}"], stderr=True)
    return interrupted_by(error.args[0] if error.args else signal.SIGINT)


def finding_of(error: DoctorError) -> Finding:
    """An error of ours as a document tells it."""
    rule = "usage" if isinstance(error, UsageError) else "dsdoctor"
    message, hint = _shown(error)
    return Finding.error(rule, message, fix=hint)


def columns() -> int | None:
    """How wide stdout is, for what has tables; None where lines are not broken."""
    from dsdoctor.ui.terminal import Stream, screen_width

    return screen_width(Stream())


def _show(lines: Iterable[str], *, stderr: bool = False) -> None:
    from dsdoctor.ui.terminal import Stream, show

    show(Stream(stderr=stderr), lines)


def _shown(error: DoctorError) -> tuple[str, str]:
    """The message and the hint of an error, which may quote a command that failed, without what this environment hides."""
    from dsdoctor.core.host import LocalHost
    from dsdoctor.core.redaction import Hidden

    hidden = Hidden(LocalHost().environment())
    return hidden.out_of(error.message), hidden.out_of(error.hint or "")
