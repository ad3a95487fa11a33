"""The command that leads to an installed DeepSpeed whose ops load, here or on every node of a hostfile: install."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from cyclopts import Group
from cyclopts.validators import Number

from dsdoctor.builder.build import BuildScreen
from dsdoctor.builder.install import InstallAction, Installed, files_to_send, install
from dsdoctor.cli.build_wheel import show_plan_of
from dsdoctor.cli.ending import FAILED, FOUND, IMPOSSIBLE, OK, interrupted_by, print_result
from dsdoctor.cli.options import Json, NoCache, Out
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import check_folder
from dsdoctor.core.finding import Severity, has_error, step
from dsdoctor.core.options import TARGET, WHERE, argument, flag, option, options
from dsdoctor.core.requests import BuildOrder, check_interpreter
from dsdoctor.hosts.install import InstalledOnHosts, InstallOrder, NodeState, findings_of, hosts_lines, install_on_hosts
from dsdoctor.ui.progress import BuildProgress
from dsdoctor.ui.screen import result_lines
from dsdoctor.ui.terminal import VerdictLine, finding_lines

Indexes = Annotated[
    tuple[str, ...],
    options(
        name="--index-url", metavar="URL|DIR", group=WHERE,
        help="Package index or folder with DeepSpeed wheels. Repeatable. If a wheel fits, it is installed and nothing is built.",
    ),
]  # fmt: skip
Build = Annotated[bool, flag(name="--build", help="Build, even if an installed DeepSpeed or a listed wheel fits.")]
NODES = Group("Every node of a hostfile", sort_key=5)
Wheel = Annotated[Path | None, argument(metavar="[WHEEL]", help="With --hostfile: the wheel to install on the nodes.")]
Hostfile = Annotated[
    Path | None,
    option(
        name="--hostfile", metavar="FILE", group=NODES,
        help="Install WHEEL over ssh on every node of DeepSpeed's hostfile: one line HOST slots=N per node.",
    ),
]  # fmt: skip
Python = Annotated[
    str,
    option(
        name="--python", metavar="PATH", group=TARGET,
        help="Python of the environment, here or on the nodes. Default: this one; on the nodes, the same path.",
    ),
]  # fmt: skip
DryRun = Annotated[bool, flag(name="--dry-run", group=NODES, help="Verify on every node, install nothing.")]
AllOrNothing = Annotated[
    bool,
    flag(name="--all-or-nothing", group=NODES, help="Verify on every node first; install nothing if one fails."),
]
Parallel = Annotated[
    int | None,
    option(
        name="--parallel", validator=Number(gte=1), metavar="N", group=NODES, help="Nodes in parallel. Default: 32."
    ),
]
Timeout = Annotated[
    float | None,
    option(name="--timeout", metavar="SECONDS", group=NODES, help="Time limit of each step on a node. Default: 600."),
]
Port = Annotated[
    int | None,
    option(name=["-p", "--port"], validator=Number(gte=1, lte=65535), group=NODES, help="Port of sshd on the nodes."),
]
SshOption = Annotated[
    tuple[str, ...],
    options(name="--ssh-option", metavar="NAME=VALUE", group=NODES, help="Option of ssh_config(5). Repeatable."),
]
DEFAULT_OUT = Path("dist")
MAX_STEP_SECONDS = 86_400


def install_command(
    wheel: Wheel = None,
    /,
    *,
    order: BuildOrder | None = None,
    index_url: Indexes = (),
    build: Build = False,
    out: Out = DEFAULT_OUT,
    python: Python = sys.executable,
    no_cache: NoCache = False,
    hostfile: Hostfile = None,
    dry_run: DryRun = False,
    all_or_nothing: AllOrNothing = False,
    parallel: Parallel = None,
    timeout: Timeout = None,
    port: Port = None,
    ssh_option: SshOption = (),
    as_json: Json = False,
) -> int:
    """Install DeepSpeed with compiled ops that load.

    An installed DeepSpeed is kept if it fits this machine and has the ops of --ops or --for. Otherwise the newest wheel in the
    indexes that passes `dsdoctor wheel verify` is installed. If none passes, one is built as with build-wheel. Then each op is
    loaded. torch is never changed. An installed DeepSpeed keeps its version unless --source names another.
    Build options (--arch, --cpu, --accelerator, --node, --toolkit, ...) start a build at once.

    With --hostfile, WHEEL goes to every node over ssh, into a private folder. The dsdoctor there verifies it, and pip installs it
    without dependencies. Then every installed file is compared with the wheel. A node that fails does not stop the others. ssh
    never asks for a password, and reads ~/.ssh/config.

    Example: dsdoctor install --for ds_config.json
    """
    node_options = {
        "--dry-run": dry_run,
        "--all-or-nothing": all_or_nothing,
        "--parallel": parallel is not None,
        "--timeout": timeout is not None,
        "--port": port is not None,
        "--ssh-option": bool(ssh_option),
    }
    if hostfile is not None:
        build_options = {
            "--index-url": bool(index_url),
            "--build": build,
            "--out": out != DEFAULT_OUT,
            "--no-cache": no_cache,
            "a build option": order is not None,
        }
        _refuse(build_options, "--hostfile installs a finished wheel on the nodes", hint="leave it out")
        if wheel is None:
            raise UsageError("--hostfile needs a wheel", hint="dsdoctor install dist/WHEEL --hostfile FILE")
        request = InstallOrder(
            files=files_to_send(wheel),
            hostfile=hostfile,
            python=python,
            dry_run=dry_run,
            all_or_nothing=all_or_nothing,
            parallel=parallel or 32,
            limit=_limit(timeout),
            ssh_options=_ssh_options(port, ssh_option),
        )
        return _install_on_hosts(wheel, request, as_json)
    _refuse(node_options, "only --hostfile installs on nodes", hint="add --hostfile FILE")
    if wheel is not None:
        folder = str(wheel.parent)
        raise UsageError(
            "WHEEL needs --hostfile; without it, install chooses the wheel itself",
            hint=step("dsdoctor install --index-url {folder}", folder=folder).line,
        )
    order = replace(order or BuildOrder(), python=check_interpreter(python), cache=not no_cache)
    check_folder(out, "--out")
    with BuildProgress() as progress:
        screen = BuildScreen(say=progress.say, plan=lambda plan: show_plan_of(plan, as_json), step=progress.step)
        done = install(order, index_url, out.absolute(), screen=screen, build_anew=build)
    show_installed("install", done, as_json)
    return status_of(done)


def _install_on_hosts(wheel: Path, request: InstallOrder, as_json: bool) -> int:
    """What failed weighs more than what was refused: such a node may be without a DeepSpeed."""
    with BuildProgress() as progress:
        done = install_on_hosts(request, say=progress.say)
    print_result(
        "install",
        as_json,
        hosts_lines(wheel.name, done.nodes, dry_run=request.dry_run),
        findings_of(done.nodes),
        did=_did(done),
        version=None,
        wheel=str(wheel),
        ops=(),
        untried=(),
        candidates=(),
        sha256=done.sha256,
        nodes=done.nodes,
    )
    return interrupted_by(done.signal) if done.signal else FAILED if done.failed else FOUND if done.refused else OK


def show_installed(command: str, done: Installed, as_json: bool) -> None:
    """What was done and what the environment has now; the last line names the ops that load."""
    print_result(
        command,
        as_json,
        installed_lines(done),
        done.findings,
        did=done.did,
        version=done.version,
        wheel=done.wheel,
        ops=done.ops,
        untried=done.untried,
        candidates=done.candidates,
        sha256=None,
        nodes=(),
    )


def installed_lines(done: Installed) -> Iterator[str]:
    """Wheels that were not taken with the reason, the build, the findings, and how it ended."""
    for candidate in done.candidates:
        if not candidate.fits:
            yield f"· {unquote(candidate.wheel.rpartition('/')[2])}"
            yield from (f"    {finding.title}" for finding in candidate.findings if finding.severity is Severity.ERROR)
    if done.built is not None and done.built.result is not None:
        yield from result_lines(done.built.result)
    yield from finding_lines(done.findings)
    how = {
        InstallAction.KEPT: "already installed and fits",
        InstallAction.INSTALLED: f"from {done.wheel}",
        InstallAction.BUILT: "built here",
    }
    if done.did is InstallAction.NOTHING or done.version is None:
        yield VerdictLine("✗ nothing was installed")
        return
    yield f"{'✗' if has_error(done.findings) else '·'} DeepSpeed {done.version}, {how[done.did]}"
    if done.untried:
        yield f"! {', '.join(done.untried)} could not be tried here"
    if done.ops:
        yield VerdictLine(f"✓ {', '.join(done.ops)} {'load' if len(done.ops) > 1 else 'loads'}")


def _did(done: InstalledOnHosts) -> InstallAction:
    some = any(node.state is NodeState.INSTALLED for node in done.nodes)
    return InstallAction.INSTALLED if some else InstallAction.NOTHING


def _refuse(given: Mapping[str, bool], why: str, *, hint: str) -> None:
    """Raise UsageError for the first option that was given."""
    for name in (name for name, is_given in given.items() if is_given):
        raise UsageError(f"{why}, and {name} was given", hint=hint)


def _limit(timeout: float | None) -> float:
    """The seconds for each step on a node."""
    seconds = 600.0 if timeout is None else timeout
    if not 1 <= seconds <= MAX_STEP_SECONDS:
        raise UsageError(f"--timeout {seconds:g} is not a time limit", hint=f"name 1 to {MAX_STEP_SECONDS} seconds")
    return seconds


def _ssh_options(port: int | None, options: Sequence[str]) -> tuple[str, ...]:
    """ssh's arguments. Raises UsageError for what is no option of its configuration."""
    for given in options:
        name, equals, _ = given.partition("=")
        if not name.isalnum() or not equals:
            raise UsageError(
                f"--ssh-option {given!r} is not an ssh option", hint="name one as in: --ssh-option ProxyJump=gate"
            )
    named = (part for given in options for part in ("-o", given))
    return (*(("-p", str(port)) if port else ()), *named)


def status_of(done: Installed) -> int:
    """The exit status: nothing could be planned, a build failed, an op does not load, or all is well."""
    if done.did is InstallAction.NOTHING:
        return IMPOSSIBLE if done.built is not None and done.built.result is None else FAILED
    return FOUND if has_error(done.findings) else OK
