"""The command that judges a machine: check."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

from dsdoctor.builder.check import check
from dsdoctor.cli.ending import FOUND, OK, columns, print_result
from dsdoctor.cli.options import Json, Verbose
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Fix, Severity, fix_for_python
from dsdoctor.core.options import WHAT, argument, flag, option
from dsdoctor.core.requests import (
    Accelerator,
    Arch,
    BuildRequest,
    CheckRequest,
    MachineFile,
    Offline,
    PythonPath,
    SourceSpec,
    split_names,
)
from dsdoctor.ui.progress import BuildProgress

if TYPE_CHECKING:
    from dsdoctor.builder.checked import Checked


def _rules() -> list[str]:
    from dsdoctor.checks import checks

    return list(checks())


def _ops() -> list[str]:
    from dsdoctor.builder.plan.plan import DEFAULT_OPS
    from dsdoctor.builder.source.op_loads import LOADS
    from dsdoctor.builder.source.ops import OPS

    usual = {name for names in DEFAULT_OPS.values() for name in names}
    return sorted(usual | {op.name for op in OPS if not op.empty} | {load.op for load in LOADS})


Rules = Annotated[str, argument(metavar="RULE", offers=_rules, help="Run only these checks.")]
NeededOps = Annotated[
    tuple[str, ...] | None,
    option(
        name=["--op", "--ops"], converter=split_names, metavar="OP,OP", group=WHAT, offers=_ops,
        help="Ops that must work: exit with status 1 if one cannot.",
    ),
]  # fmt: skip
Deep = Annotated[bool, flag(help="Run the compiler: preprocess every source of every op with its own flags, and link.")]
Strict = Annotated[bool, flag(help="Exit with status 1 for warnings too.")]
Report = Annotated[
    bool,
    flag(name="--report", help="Print up to 30 lines of Markdown for an issue, without your names and tokens."),
]
Listed = Annotated[bool, flag(name="--list", help="List the checks and exit.")]


def check_command(
    *rules: Rules,
    op: NeededOps = None,
    deep: Deep = False,
    strict: Strict = False,
    listed: Listed = False,
    report: Report = False,
    source: SourceSpec = None,
    arch: Arch = None,
    accelerator: Accelerator = None,
    python: PythonPath = sys.executable,
    offline: Offline = False,
    machine: MachineFile = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Check this machine for problems with DeepSpeed, with fixes.

    Ops are grouped: those that can be built in the current environment, required ones that cannot, and optional ones that cannot.
    -v lists all of them, and what build-wheel can build. Without --deep the check runs no compiler and takes about a second.

    Example: dsdoctor check --op fused_adam,async_io
    """
    if listed:
        print_result("check", as_json, _listed(), (), checks=_listed())
        return OK
    if rules and (op or deep):
        raise UsageError("RULE runs only some checks; --op and --deep are about ops", hint="leave out one of them")
    if report and as_json:
        raise UsageError("--report prints Markdown, --json one document", hint="leave out one of them")
    build = BuildRequest(ops=op, arch=arch, accelerator=accelerator, offline=offline)
    request = CheckRequest(
        python=python, machine=machine, source=source, rules=frozenset(rules), deep=deep, request=build
    )
    with BuildProgress() as progress:
        done = check(request, say=progress.say)
    # imported only now: it takes as long as a question to the machine
    from dsdoctor.builder.checked import check_lines, ending_lines, next_step

    if report:
        from dsdoctor.builder.checked import issue_lines

        lines = tuple(issue_lines(done, os.environ))
    else:
        command = next_step(done, arch)
        if command is not None and not machine and python != sys.executable:
            command = fix_for_python(Fix(text="", steps=(command,)), python).steps[0]
        lines = (*check_lines(done, verbose=verbose, width=columns()), *ending_lines(command))
    print_result("check", as_json, lines, done.findings, machine=done.machine, ops=done.ops, ops_of=ops_of(done))
    bad = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return FOUND if any(finding.severity in bad for finding in done.findings) else OK


def ops_of(done: "Checked") -> dict[str, str] | None:
    """Which DeepSpeed's ops were judged."""
    source = done.source
    if source is None:
        return None
    return {"deepspeed": source.version, "accelerator": source.accelerator, "because": source.because}


def _listed() -> list[str]:
    from dsdoctor.rules.book import room_rules

    rules = room_rules("checks")
    width = max(map(len, rules))
    return [f"{rule:<{width}}  {table['means'].splitlines()[0]}" for rule, table in rules.items()]
