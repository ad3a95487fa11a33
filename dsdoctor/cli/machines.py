"""The commands about machines and wheels: verify, env, record, compare."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsdoctor.builder.plan.shell import lines_for
from dsdoctor.cli.ending import FOUND, IMPOSSIBLE, ending, print_result
from dsdoctor.cli.options import Arch, Json, MachineFile, Offline, PythonOption, Toolkit, order_of
from dsdoctor.commands.compare import differences
from dsdoctor.commands.env import select
from dsdoctor.commands.observe import write_down
from dsdoctor.commands.verify import verify
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity, has_error
from dsdoctor.report.machines import built_lines, difference_lines
from dsdoctor.report.progress import BuildProgress
from dsdoctor.report.terminal import finding_lines, show

WheelFile = Annotated[Path | None, typer.Argument(metavar="[WHEEL]", help="The wheel to judge.", show_default=False)]
Installed = Annotated[bool, typer.Option("--installed", help="Judge the installed DeepSpeed instead of a wheel.")]
Load = Annotated[bool, typer.Option("--load", help="With --installed: import each op in a process of its own, too.")]
Shell = Annotated[
    str, typer.Option("--shell", metavar="bash|zsh|fish|csh", help="The shell that is to take the lines.")
]
Target = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)]
Files = Annotated[list[Path], typer.Argument(metavar="FILE FILE...", help="Snapshots to compare.", show_default=False)]


def verify_command(
    wheel: WheelFile = None,
    installed: Installed = False,
    load: Load = False,
    python: PythonOption = sys.executable,
    machine: MachineFile = None,
    as_json: Json = False,
) -> None:
    """Say whether a DeepSpeed wheel, anybody's, will work in this environment, before it is installed.

    Reads the wheel's own records and its shared objects: Python, torch and CUDA release, accelerator, ops inside against
    ops claimed, GPU architectures, processor instructions, glibc and libstdc++, digests. Runs nothing of it;
    --installed --load imports each op of the installed DeepSpeed besides.
    """
    with ending("verify", as_json):
        if (wheel is None) == (not installed):
            raise UsageError("name a wheel, or say --installed", hint="dsdoctor verify dist/deepspeed-....whl")
        done = verify(python, machine, wheel, load=load)
        lines = [*built_lines(done.built), *finding_lines(done.findings)]
        unseen = (
            "; its GPU code was not judged: no GPU is visible" if done.built.sm_arch and not done.machine.gpus else ""
        )
        where = "this machine" if machine is None else machine.stem
        doubt = any(finding.severity is not Severity.NOTE for finding in done.findings)
        loads = ", and its ops load" if load and done.built.installed_ops and not done.findings else ""
        lines += [] if doubt else [f"✓ it fits {where}{loads}{unseen}"]
        print_result("verify", as_json, lines, done.findings, built=done.built, machine=done.machine)
        if has_error(done.findings):
            raise typer.Exit(FOUND)


def env_command(
    shell: Shell = "bash",
    arch: Arch = None,
    toolkit: Toolkit = "auto",
    python: PythonOption = sys.executable,
    machine: MachineFile = None,
    as_json: Json = False,
) -> None:
    """Print the lines that select the CUDA toolkit and the compiler which fit this torch.

    bash and zsh: eval "$(dsdoctor env)". fish: dsdoctor env --shell fish | source. csh: eval "`dsdoctor env --shell csh`".
    """
    with ending("env", as_json):
        order = order_of(python, None, None, None, arch, None, toolkit, None, (None, False), True, machine=machine)
        settings, findings = select(order)
        bad = has_error(findings)
        # stdout carries the lines and nothing else: it is meant for eval
        lines = [] if bad else lines_for(shell, settings)
        if not as_json:
            show(Console(stderr=True), finding_lines(findings))
            sys.stdout.write("".join(f"{line}\n" for line in lines))
        else:
            print_result("env", as_json, (), findings, set=settings.values, prepend=settings.prepend, shell=lines)
        if bad:
            raise typer.Exit(IMPOSSIBLE)


def record_command(
    file: Target, python: PythonOption = sys.executable, offline: Offline = False, as_json: Json = False
) -> None:
    """Write this machine down into a file: everything that was asked, and nothing else.

    check, plan, env, verify and compare take it with --machine, on any machine. No token and no unrelated variable is in it, and
    the home folder is written as /home/user.
    """
    with ending("record", as_json), BuildProgress(Console(stderr=True), quiet=as_json) as progress:
        write_down(python, file, offline=offline, say=progress.say)
        print_result("record", as_json, [f"✓ {file}  (look into it before you pass it on)"], (), file=str(file))


def compare_command(files: Files, as_json: Json = False) -> None:
    """Say what differs between recorded machines, the minority first. Exit status 1 when something does."""
    with ending("compare", as_json):
        if len(files) < 2:
            raise UsageError("compare takes two snapshots or more", hint="dsdoctor record FILE writes one")
        found = differences(tuple(files))
        print_result("compare", as_json, difference_lines(found, len(files)), (), differences=found)
        if found:
            raise typer.Exit(FOUND)
