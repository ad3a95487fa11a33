"""How every command ends: one result on stdout, or one error with the next step, and a number."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.report.document import document
from dsdoctor.report.terminal import show

FOUND, IMPOSSIBLE, FAILED, INTERRUPTED = 1, 3, 4, 130
NO_WHEEL: dict[str, Any] = {"wheel": None, "manifest": None, "ops": (), "toolkit": None}
NOTHING_MADE: dict[str, dict[str, Any]] = {
    "look": {"machine": None},
    "check": {"machine": None, "ops": (), "ops_of": None},
    "verify": {"built": None, "machine": None},
    "pick": {"wheel": None, "wheels": ()},
    "push": {"wheel": None, "sha256": None, "nodes": ()},
    "env": {"set": {}, "prepend": {}, "shell": ()},
    "record": {"file": None},
    "compare": {"differences": ()},
    "diagnose": {"logs": ()},
    "explain": {"manual": None},
    "plan": {"plan": None},
    "build-wheel": NO_WHEEL,
    "prebuild": NO_WHEEL,
    "toolkit": {"toolkit": None},
    "comm": {"report": None},
    "cache ls": {"folder": None, "limit": None, "size": None, "entries": ()},
    "cache prune": {"folder": None, "limit": None, "size": None, "removed": ()},
    "cache verify": {"folder": None, "limit": None, "whole": None},
    "trace show": {"traces": (), "lines": ()},
    "trace compare": {"comparison": None, "a": (), "b": ()},
    "trace plot": {"file": None, "dtype": None},
    "trace headroom": {"traces": (), "headroom": None},
}
"""The parts of each command's document when an error of ours left nothing to show."""


def print_result(
    command: str, as_json: bool, lines: Iterable[str], findings: tuple[Finding, ...], **parts: Any
) -> None:
    """Show lines, or the one document with the command's own parts."""
    if as_json:
        sys.stdout.write(document(command, findings, **parts) + "\n")
    else:
        show(Console(), lines)


@contextmanager
def ending(command: str, as_json: bool) -> Iterator[None]:
    """Turn our own errors into text and a number: one error, the next step, nothing half-made."""
    try:
        yield
    except (DoctorError, OSError) as cause:
        error = cause if isinstance(cause, DoctorError) else _system_error(cause)
        if as_json:
            with contextlib.suppress(OSError):
                sys.stdout.write(document(command, (finding_of(error),), **NOTHING_MADE.get(command, {})) + "\n")
        else:
            lines = [f"✗ {error.message}", *([f"    Fix: {error.hint}"] if error.hint else [])]
            show(Console(stderr=True), lines)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        show(Console(stderr=True), ["✗ interrupted; what was half-made is removed, run the same command again"])
        raise typer.Exit(INTERRUPTED) from None


def _system_error(error: OSError) -> DoctorError:
    place = f": {error.filename}" if error.filename else ""
    return DoctorError(f"the system refused: {error.strerror or error}{place}", hint="mend that, then run it again")


def finding_of(error: DoctorError) -> Finding:
    """An error of ours as a document tells it."""
    rule = "usage" if isinstance(error, UsageError) else "dsdoctor"
    fix = Fix(text=error.hint) if error.hint else None
    return Finding(rule=rule, severity=Severity.ERROR, title=error.message, fix=fix)
