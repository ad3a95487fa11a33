"""The command that judges a machine: check."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsdoctor.cli.ending import FOUND, ending, print_result
from dsdoctor.cli.options import (
    Accelerator,
    Arch,
    Json,
    MachineFile,
    Offline,
    PythonOption,
    SourceOption,
    Verbose,
    order_of,
)
from dsdoctor.commands.check import check
from dsdoctor.core.build_models import CheckRequest
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.report.progress import BuildProgress

if TYPE_CHECKING:
    from dsdoctor.commands.check_ops import Checked

Rules = Annotated[
    list[str] | None, typer.Argument(metavar="[RULE]...", help="Run these checks only.", show_default=False)
]
Asked = Annotated[
    str | None,
    typer.Option(
        "--op", "--ops", metavar="OP[,OP]", help="Ops that must work: exit status 1 where one of them cannot."
    ),
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Ask the compiler: preprocess every source of every op with its own flags, and link."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings too.")]
Listed = Annotated[bool, typer.Option("--list", help="List the checks and stop.")]


def check_command(
    rules: Rules = None,
    op: Asked = None,
    deep: Deep = False,
    strict: Strict = False,
    listed: Listed = False,
    source: SourceOption = None,
    arch: Arch = None,
    accelerator: Accelerator = None,
    python: PythonOption = sys.executable,
    offline: Offline = False,
    machine: MachineFile = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Say what is wrong with this machine for DeepSpeed, and which ops can be built on it, with the fix of each ill.

    The op table has two columns: what pip or run-time compilation would meet as the environment stands, and what
    build-wheel gets after mending. Without --deep it goes by facts and takes about a second.
    """
    with ending("check", as_json):
        if listed:
            print_result("check", as_json, _listed(), (), checks=_listed())
            return
        order = order_of(python, source, op, None, arch, accelerator, "auto", None, (None, False), offline)
        rules_asked = frozenset(rules or ())
        if rules_asked and (op or deep):
            raise UsageError("RULE runs some checks alone, --op and --deep are about ops", hint="leave out one of them")
        question = CheckRequest(
            python=python, machine=machine, source=source, rules=rules_asked, deep=deep, request=order.request
        )
        with BuildProgress(Console(stderr=True), quiet=as_json) as progress:
            done = check(question, say=progress.say)
        from dsdoctor.report.check import check_lines

        lines = check_lines(done.topics, done.ops, done.source, verbose=verbose)
        print_result("check", as_json, lines, done.findings, machine=done.machine, ops=done.ops, ops_of=ops_of(done))
        bad = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        if any(finding.severity in bad for finding in done.findings):
            raise typer.Exit(FOUND)


def ops_of(done: "Checked") -> dict[str, str] | None:
    """Which DeepSpeed's ops were judged."""
    source = done.source
    if source is None:
        return None
    return {"deepspeed": source.version, "accelerator": source.accelerator, "because": source.because}


def _listed() -> list[str]:
    from dsdoctor import checks

    every = checks.checks()
    width = max(map(len, every))
    return [f"{rule:<{width}}  {checks.manual(one).splitlines()[0]}" for rule, one in every.items()]
