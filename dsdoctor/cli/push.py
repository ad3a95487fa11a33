"""The command push."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts.validators import Number

from dsdoctor.cli.ending import FAILED, FOUND, interrupted_by, print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.push import Push, Pushed, push
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import argument, flag, option, options
from dsdoctor.hosts.push import findings_of, push_lines
from dsdoctor.ui.progress import BuildProgress

Wheel = Annotated[Path, argument(help="The wheel to install on the nodes.")]
Hostfile = Annotated[
    Path,
    option(name="--hostfile", metavar="FILE", help="DeepSpeed's hostfile: a line HOST slots=N for each node."),
]
Python = Annotated[
    str, option(name="--python", metavar="PATH", help="Interpreter on the nodes. Default: the path of the one here.")
]
DryRun = Annotated[bool, flag(name="--dry-run", help="Verify on every node, install nowhere.")]
AllOrNothing = Annotated[
    bool, flag(name="--all-or-nothing", help="Verify on every node first; install nowhere when it fails on one.")
]
Parallel = Annotated[int, option(name="--parallel", validator=Number(gte=1), metavar="N", help="Nodes at once.")]
Timeout = Annotated[float, option(name="--timeout", metavar="SECONDS", help="Limit of each step on a node.")]
Port = Annotated[
    int | None, option(name=["-p", "--port"], validator=Number(gte=1, lte=65535), help="Port of sshd on the nodes.")
]
SshOption = Annotated[
    tuple[str, ...],
    options(
        name="--ssh-option",
        allow_leading_hyphen=True,
        metavar="NAME=VALUE",
        help="An option of ssh_config(5); may be given again.",
    ),
]


def push_command(
    wheel: Wheel,
    /,
    *,
    hostfile: Hostfile,
    python: Python = sys.executable,
    dry_run: DryRun = False,
    all_or_nothing: AllOrNothing = False,
    parallel: Parallel = 32,
    timeout: Timeout = 600.0,
    port: Port = None,
    ssh_option: SshOption = (),
    as_json: Json = False,
) -> int:
    """Install a DeepSpeed wheel on every node of a hostfile, over ssh, where the node's own dsdoctor verify finds no error.

    Each node gets a copy in a private folder, which is compared by sha256 and removed at the end; its dsdoctor judges the
    wheel; its pip installs it without dependencies; then every installed file is compared with the wheel's. A node
    that fails stops no other. ssh is never let ask for a password, and ~/.ssh/config counts.

    Example: dsdoctor push dist/deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl --hostfile hosts --dry-run
    """
    if not 1 <= timeout <= 86_400:
        raise UsageError(f"--timeout {timeout:g} is no time for a step", hint="name 1 to 86400 seconds")
    order = Push(
        wheel=wheel,
        hostfile=hostfile,
        python=python,
        dry_run=dry_run,
        all_or_nothing=all_or_nothing,
        parallel=parallel,
        limit=timeout,
        ssh_options=_ssh_options(port, ssh_option),
    )
    with BuildProgress(quiet=as_json) as progress:
        done = push(order, say=progress.say)
    lines = push_lines(wheel.name, done.nodes, dry_run=dry_run)
    findings = findings_of(done.nodes)
    print_result("push", as_json, lines, findings, wheel=str(wheel), sha256=done.sha256, nodes=done.nodes)
    return _status(done)


def _status(done: Pushed) -> int:
    """What failed weighs more than what was refused: such a node may be without a DeepSpeed."""
    return interrupted_by(done.signal) if done.signal else FAILED if done.failed else FOUND if done.refused else 0


def _ssh_options(port: int | None, options: Sequence[str]) -> tuple[str, ...]:
    """ssh's arguments. Raises UsageError for what is no option of its configuration."""
    for given in options:
        name, equals, _ = given.partition("=")
        if not name.isalnum() or not equals:
            raise UsageError(f"--ssh-option {given!r} is none", hint="name one as in: --ssh-option ProxyJump=gate")
    named = (part for given in options for part in ("-o", given))
    return (*(("-p", str(port)) if port else ()), *named)
