"""The command that judges a built DeepSpeed: verify."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from dsdoctor.builder.verify import Verified, built_lines, verify, verify_listed
from dsdoctor.builder.wheel.index import is_url
from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json, Verbose
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity, has_error, step
from dsdoctor.core.options import argument, flag
from dsdoctor.core.requests import MachineFile, PythonPath
from dsdoctor.ui.screen import counted, first_step, next_line, screen_lines
from dsdoctor.ui.terminal import Stream, VerdictLine, show_talk

WheelFile = Annotated[str | None, argument(help="The wheel to verify: a file, a URL, or a package index.")]
Installed = Annotated[bool, flag(help="Verify the installed DeepSpeed instead of a wheel.")]
Load = Annotated[bool, flag(help="With --installed: also import each op in a separate process.")]


def verify_command(
    wheel: WheelFile = None,
    /,
    *,
    installed: Installed = False,
    load: Load = False,
    python: PythonPath = sys.executable,
    machine: MachineFile = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Verify that a DeepSpeed wheel from any source will work in this environment, before you install it.

    Reads the wheel's records and shared objects: Python, torch and CUDA release, accelerator, contained and claimed ops, GPU
    architectures, processor instructions, glibc and libstdc++, digests. Runs nothing in it. With --installed --load, each op
    of the installed DeepSpeed is imported too.

    Example: dsdoctor wheel verify --installed --load
    """
    if (wheel is None) == (not installed):
        raise UsageError("name a wheel, or say --installed", hint="dsdoctor wheel verify dist/deepspeed-....whl")
    done = _verified(wheel, machine, python, load=load)
    fits = _fits(done, "this machine" if machine is None else machine.stem, load=load)
    shown = list(screen_lines(done.findings, shows_all="" if verbose else "-v"))
    lines = [*built_lines(done.built), "", *shown, *([""] if shown else []), *fits, *_next(done, wheel)]
    print_result("wheel verify", as_json, lines, done.findings, built=done.built, machine=done.machine)
    return FOUND if has_error(done.findings) else OK


def _next(done: Verified, wheel: str | None) -> list[str]:
    """The one next step: what mends the worst finding, else what a note asks for, else to install the wheel."""
    asked = (command for finding in done.findings if finding.fix for command in finding.fix.steps)
    command = first_step(done.findings) or next(asked, None)
    if command is None and wheel is not None and Path(wheel).is_file():
        command = step("python -m pip install {wheel}", wheel=wheel)
    return [next_line(command)] if command else []


def _verified(wheel: str | None, machine: Path | None, python: str, *, load: bool) -> Verified:
    if wheel is not None and is_url(wheel) and not load:
        say = partial(show_talk, Stream(stderr=True))
        return verify_listed(python, machine, wheel, say=say)
    return verify(python, machine, Path(wheel) if wheel is not None else None, load=load)


def _fits(done: Verified, where: str, *, load: bool) -> list[str]:
    """The line that says that nothing speaks against it, and what was not judged."""
    bad = tuple(finding for finding in done.findings if finding.severity is not Severity.NOTE)
    if bad:
        says = "✗ it does not work on" if has_error(bad) else "! it may not work on"
        return [VerdictLine(f"{says} {where}: {counted(bad)}")]
    unseen = "; its GPU code was not judged: no GPU is visible" if done.built.sm_arch and not done.machine.gpus else ""
    empty = any(finding.rule == "wheel-without-ops" for finding in done.findings)
    runs = ", for runs that need no op or compile it at its first use" if empty else ""
    loads = ", and its ops load" if load and done.built.installed_ops and not done.findings else ""
    return [VerdictLine(f"✓ it fits {where}{runs}{loads}{unseen}")]
