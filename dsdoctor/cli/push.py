"""The command push: a wheel and a hostfile -> the outcome on every node. Runs nothing of the wheel."""

import asyncio
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts.validators import Number

from dsdoctor.builder.wheel.read import hex_of, read_wheel
from dsdoctor.cli.ending import FAILED, FOUND, interrupted_by, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.files import read_limited
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.options import argument, flag, option, options
from dsdoctor.core.text import and_more
from dsdoctor.hosts import push as problems
from dsdoctor.hosts.hostfile import HOST, parse_hostfile
from dsdoctor.hosts.push import Delivered, Delivery, NodeEnded, NodeState, Sent, Way, findings_of, push_lines
from dsdoctor.hosts.ssh import SESSION_OPTIONS, ssh_problem
from dsdoctor.rules import book
from dsdoctor.ui.progress import BuildProgress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSTALLS_END = 60.0
"""Seconds that an interrupted push waits for pips that have begun."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """The request. ``python`` is the interpreter on the nodes, ``limit`` the seconds for each step on a node,
    ``ssh_options`` are ssh's own arguments."""

    wheel: Path
    hostfile: Path
    python: str
    dry_run: bool = False
    all_or_nothing: bool = False
    parallel: int = 32
    limit: float = 600.0
    ssh_options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The outcome, the nodes in the hostfile's order. ``signal``: the number of the one that ended it, or 0."""

    sha256: str
    nodes: tuple[Delivered, ...]
    signal: int

    @property
    def refused(self) -> bool:
        """Whether a node's verify found an error."""
        return any(node.state is NodeState.REFUSED for node in self.nodes)

    @property
    def failed(self) -> bool:
        """Whether a node could not be reached, or failed in the middle."""
        return any(node.state in {NodeState.FAILED, NodeState.UNREACHABLE} for node in self.nodes)


def push(order: Push, *, say: Callable[[str], None]) -> Pushed:
    """Copy, verify and install on every node, at most ``parallel`` at once; one that fails stops no other.

    Raises UsageError for a wheel or a hostfile that cannot be used, ImpossiblePlan where there is no ssh.
    """
    hosts = hosts_of(order.hostfile)
    files = files_of(order.wheel)
    host = LocalHost()
    ssh = host.which("ssh")
    if ssh is None:
        title = f"ssh is not on PATH, and {len(hosts)} nodes are to be reached with it"
        raise ImpossiblePlan(title, hint="sudo apt-get install openssh-client")
    way = Way(
        # of two options ssh takes the first: ours that forbid password prompts, then the user's, then the rest of ours
        ssh=(ssh, *SESSION_OPTIONS[:3], *order.ssh_options, *SESSION_OPTIONS[3:]),
        environment=host.environment(),
        python=order.python,
        limit=order.limit,
        dry_run=order.dry_run,
        unreached=unreached,
    )
    whole = AllNodes(order, [Delivery(name, files, way, say) for name in hosts])
    nodes = asyncio.run(whole.run())
    return Pushed(sha256=files[0].sha256, nodes=nodes, signal=whole.signal)


def unreached(host: str, status: int | None, said: str) -> Finding:
    """Why ssh could not get there: ``status`` is its own, None where it did not end in time."""
    problem = ssh_problem(host, status, said)
    return book.finding(
        "ssh-fails",
        Severity.ERROR,
        case="push",
        evidence=said.splitlines()[-4:],
        steps=problem.steps,
        what=problem.what,
        fix=problem.fix,
    )


def hosts_of(hostfile: Path) -> tuple[str, ...]:
    """The hosts of a DeepSpeed hostfile. Raises UsageError for one that DeepSpeed refuses, and for invalid names."""
    try:
        read = parse_hostfile(read_limited(hostfile).decode("utf-8", errors="replace"))
    except OSError as error:
        hint = "write one line for each node, as in: node1 slots=8"
        raise UsageError(f"the hostfile {hostfile} cannot be read: {error.strerror}", hint=hint) from None
    # lines that DeepSpeed misreads do no harm here, except a name that ssh would take for something else
    names = {entry.line for entry in read.hosts if not HOST.fullmatch(entry.name)}
    for bad in read.complaints:
        if bad.refused or bad.line in names:
            where = f"{hostfile}, line {bad.line}" if bad.line else str(hostfile)
            raise UsageError(f"{where}: {bad.what}", hint="write one line for each node, as in: node1 slots=8")
    return tuple(entry.name for entry in read.hosts)


def files_of(wheel: Path) -> tuple[Sent, ...]:
    """The wheel, and the manifest beside it. Raises UsageError for what is not a complete DeepSpeed wheel."""
    built = read_wheel(wheel)
    if built.altered:
        title = f"{len(built.altered)} files of {wheel} differ from its RECORD: {built.altered[0]}"
        raise UsageError(title, hint="fetch or build it again")
    if built.foreign:
        title = f"{wheel} would put into place what is no part of DeepSpeed: {and_more(built.foreign)}"
        raise UsageError(title, hint="do not install it; build the wheel from DeepSpeed's source")
    if wrong := built.contradictions or built.addresses:
        told = "is not what its file name says" if built.contradictions else "would have pip fetch"
        raise UsageError(
            f"{wheel} {told}: {and_more(wrong)}", hint="do not install it; build the wheel from DeepSpeed's source"
        )
    beside = wheel.with_name(f"{wheel.name}.json")
    paths = (wheel, beside) if beside.is_file() else (wheel,)
    return tuple(Sent(path=path, size=path.stat().st_size, sha256=hex_of(path)) for path in paths)


class AllNodes:
    """All nodes concurrently: at most ``parallel`` at a time, and one pip at a time in an environment.

    With ``all_or_nothing`` nothing is installed before the wheel was verified on all nodes.
    """

    def __init__(self, order: Push, nodes: list[Delivery]) -> None:
        self.signal = 0
        self._order, self._nodes = order, nodes
        self._places = asyncio.Semaphore(order.parallel)
        self._environments: Mapping[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._verdicts: list[bool] = []
        self._all_verified = asyncio.Event()

    async def run(self) -> tuple[Delivered, ...]:
        """The outcome on every node. A signal ends the nodes that do not install yet."""
        tasks = [asyncio.create_task(self._deliver(node)) for node in self._nodes]
        loop = asyncio.get_running_loop()

        def leave(*, also_installs: bool) -> None:
            for task, node in zip(tasks, self._nodes, strict=True):
                if not node.closed and (also_installs or not node.installing):
                    task.cancel()

        def interrupt(number: int) -> None:
            if not self.signal:
                self.signal = number
                leave(also_installs=False)
                loop.call_later(INSTALLS_END, lambda: leave(also_installs=True))

        with _on_signals(loop, interrupt):
            return tuple(await asyncio.gather(*tasks))

    async def _deliver(self, node: Delivery) -> Delivered:
        try:
            async with self._places:
                fits = await self._verified(node)
                if fits and not self._order.all_or_nothing:
                    await self._installed(node)
            if fits and self._order.all_or_nothing:
                await self._all_verified.wait()
                async with self._places:
                    await self._installed(node)
        except NodeEnded as ended:
            node.stop(ended)
        except OSError as error:
            node.stop(problems.refused_here(error))
        except asyncio.CancelledError:
            node.stop(node.cut_off("the push was interrupted"))
        return await node.end()

    async def _verified(self, node: Delivery) -> bool:
        """Whether the wheel fits there; after the last node's verdict the installs may begin."""
        fits = False
        try:
            fits = await node.verify()
        finally:
            self._verdicts.append(fits)
            if len(self._verdicts) == len(self._nodes):
                self._all_verified.set()
        return fits

    async def _installed(self, node: Delivery) -> None:
        """Two nodes with one environment, on a shared file system or by two names, never have two pips in it."""
        wanted = not self._order.dry_run and (not self._order.all_or_nothing or all(self._verdicts))
        if wanted:
            async with self._environments[node.environment]:
                await node.install()


@contextmanager
def _on_signals(loop: asyncio.AbstractEventLoop, interrupt: Callable[[int], None]) -> Iterator[None]:
    """Signals call ``interrupt`` with their number, instead of what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


# The command push.


Wheel = Annotated[Path, argument(help="The wheel to install on the nodes.")]
Hostfile = Annotated[
    Path,
    option(name="--hostfile", metavar="FILE", help="DeepSpeed's hostfile: one line HOST slots=N per node."),
]
Python = Annotated[
    str, option(name="--python", metavar="PATH", help="Interpreter on the nodes. Default: the same path as here.")
]
DryRun = Annotated[bool, flag(name="--dry-run", help="Verify on every node, install nothing.")]
AllOrNothing = Annotated[
    bool, flag(name="--all-or-nothing", help="Verify on every node first; install nothing if one fails.")
]
Parallel = Annotated[int, option(name="--parallel", validator=Number(gte=1), metavar="N", help="Nodes in parallel.")]
Timeout = Annotated[float, option(name="--timeout", metavar="SECONDS", help="Time limit of each step on a node.")]
Port = Annotated[
    int | None, option(name=["-p", "--port"], validator=Number(gte=1, lte=65535), help="Port of sshd on the nodes.")
]
SshOption = Annotated[
    tuple[str, ...],
    options(
        name="--ssh-option",
        allow_leading_hyphen=True,
        metavar="NAME=VALUE",
        help="Option of ssh_config(5). Repeatable.",
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
    """Install a DeepSpeed wheel over ssh on every node of a hostfile whose own dsdoctor verify finds no error.

    Each node gets a copy in a private folder, compared by sha256 and removed at the end. Its dsdoctor verifies the wheel, and its
    pip installs it without dependencies. Then every installed file is compared with the wheel. A node that fails does not stop
    the others. ssh never asks for a password, and reads ~/.ssh/config.

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
    with BuildProgress() as progress:
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
