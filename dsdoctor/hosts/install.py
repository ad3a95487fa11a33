"""One wheel on every host of a hostfile: sent over ssh, verified there by the host's own dsdoctor, and installed by its pip.

Runs nothing of the wheel. A host that fails stops no other.
"""

import asyncio
import contextlib
import enum
import shlex
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from dsdoctor.core.processes import end_session
from dsdoctor.core.text import and_more, decode
from dsdoctor.hosts.hostfile import read_hosts
from dsdoctor.hosts.ssh import SESSION_OPTIONS, RemoteFinding, ssh_problem
from dsdoctor.rules import book
from dsdoctor.ui.terminal import finding_lines

T = TypeVar("T")
MARK = b"@@dsdoctor "
CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 16 << 20
MAX_STDERR_BYTES = 4000
CONNECT_TIMEOUT_SECONDS = 60.0
"""Seconds for a login and the start of a Python, at most."""
FINAL_SECONDS = 20.0
"""Seconds in which a node that was told to stop must have removed its folder."""
MORE_SPECIFIC = ("differs", "lacks", "another")
"""Messages that say more than the "failed" which follows them."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSTALL_GRACE_SECONDS = 60.0
"""Seconds that an interrupted installation waits for pips that have begun."""
MAX_HOSTS_SHOWN = 4
ERROR = Severity.ERROR


class NodeStep(enum.Enum):
    """The steps on a node."""

    CONNECT = "connect"
    COPY = "copy"
    VERIFY = "verify"
    INSTALL = "install"


@dataclass(frozen=True, kw_only=True)
class Present:
    """The DeepSpeed that an import would take on a node. ``version`` is None where its records are missing."""

    version: str | None
    location: str


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A file that is sent: its path here, its size in bytes, its sha256 in hexadecimal digits."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a node is reached and worked on: ``ssh`` with its arguments up to the host, and its whole ``environment``;
    ``python`` is the interpreter there, ``limit`` the seconds for each step."""

    ssh: tuple[str, ...]
    environment: Mapping[str, str]
    python: str
    limit: float
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class NodeMessage:
    """A message of a node; which fields it has depends on ``say``."""

    say: str
    step: NodeStep = NodeStep.CONNECT
    why: str = ""
    name: str = ""
    names: tuple[str, ...] = ()
    sha256: str = ""
    status: int | None = None
    findings: tuple[RemoteFinding, ...] = ()
    before: Present | None = None
    now: Present | None = None
    asked: bool = False
    already: bool = False
    left: bool = False
    folder: str = ""
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstallOrder:
    """The request: the wheel, perhaps with its manifest, and where it goes. ``python`` is the interpreter on the nodes, ``limit``
    the seconds for each step on a node, ``ssh_options`` are ssh's own arguments."""

    files: tuple[Sent, ...]
    hostfile: Path
    python: str
    dry_run: bool = False
    all_or_nothing: bool = False
    parallel: int = 32
    limit: float = 600.0
    ssh_options: tuple[str, ...] = ()


class NodeState(enum.Enum):
    """The outcome on a node."""

    INSTALLED = "installed"
    VERIFIED = "verified"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """The outcome on one node. ``step`` is the last one that was begun; ``now`` is the DeepSpeed that is there at the end,
    where that is known (``known``); ``already``: this very wheel was there, and pip was not called."""

    host: str
    state: NodeState
    step: NodeStep
    findings: tuple[Finding, ...]
    before: Present | None
    now: Present | None
    known: bool
    already: bool
    seconds: float


class NodeEnded(Exception):
    """The installation stops at this node. ``finding`` says why."""

    def __init__(self, state: NodeState, finding: Finding) -> None:
        super().__init__(finding.title)
        self.state, self.finding = state, finding


@dataclass(frozen=True, kw_only=True)
class InstalledOnHosts:
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


def install_on_hosts(order: InstallOrder, *, say: Callable[[str], None]) -> InstalledOnHosts:
    """Copy, verify and install on every node, at most ``parallel`` at once; one that fails stops no other.

    Raises UsageError for a hostfile that cannot be used, ImpossiblePlan where there is no ssh.
    """
    hosts = read_hosts(order.hostfile)
    host = LocalHost()
    ssh = host.which("ssh")
    if ssh is None:
        title = f"ssh is not on PATH, and {len(hosts)} nodes must be reached with it"
        raise ImpossiblePlan(title, hint="sudo apt-get install openssh-client")
    way = Way(
        # of two options ssh takes the first: ours that forbid password prompts, then the user's, then the rest of ours
        ssh=(ssh, *SESSION_OPTIONS[:3], *order.ssh_options, *SESSION_OPTIONS[3:]),
        environment=host.environment(),
        python=order.python,
        limit=order.limit,
        dry_run=order.dry_run,
    )
    whole = AllNodes(order, [Delivery(name, order.files, way, say) for name in hosts])
    nodes = asyncio.run(whole.run())
    return InstalledOnHosts(sha256=order.files[0].sha256, nodes=nodes, signal=whole.signal)


def hosts_lines(wheel: str, nodes: tuple[Delivered, ...], *, dry_run: bool) -> Iterator[str]:
    """The outcome on every node, ``wheel`` being the name of its file."""
    width = max((len(node.host) for node in nodes), default=0)
    for node in nodes:
        mark = "✓" if node.state in {NodeState.INSTALLED, NodeState.VERIFIED} else "✗"
        state = "; ".join(filter(None, (_state(node), _left(node))))
        yield f"{mark} {node.host:<{width}}  {state}  ({node.seconds:.0f} s)"
    yield from finding_lines(findings_of(nodes))
    wanted = NodeState.VERIFIED if dry_run else NodeState.INSTALLED
    have = sum(node.state is wanted for node in nodes)
    verb = "fits" if dry_run else "is on"
    every = (
        f"{have} of {len(nodes)} nodes" if have < len(nodes) else f"all {len(nodes)} nodes" if have > 1 else "the node"
    )
    yield f"{'✓' if have == len(nodes) else '✗'} {wheel} {verb} {every}"


def findings_of(nodes: tuple[Delivered, ...]) -> tuple[Finding, ...]:
    """The findings of all nodes, each once, its title with the nodes that have it."""
    hosts: dict[str, list[str]] = {}
    found: dict[str, Finding] = {}
    for node in nodes:
        for finding in node.findings:
            # the nodes of a cluster are alike, so the same problem on many is one finding
            key = f"{finding.rule} {finding.title}"
            found.setdefault(key, finding)
            hosts.setdefault(key, []).append(node.host)
    return tuple(
        replace(finding, title=f"{and_more(hosts[key], MAX_HOSTS_SHOWN)}: {finding.title}")
        for key, finding in found.items()
    )


def _state(node: Delivered) -> str:
    if node.state is NodeState.INSTALLED:
        return "it already exists" if node.already else "installed"
    if node.state is NodeState.REFUSED:
        return "refused: dsdoctor wheel verify finds an error there"
    if node.state is NodeState.VERIFIED:
        return "verified, not installed"
    return node.state.value if node.state is NodeState.UNREACHABLE else f"failed at the step {node.step.value}"


def _left(node: Delivered) -> str:
    """What is there now, or was before."""
    if node.state is NodeState.INSTALLED:
        return "" if node.already else f"before: {_name(node.before)}"
    if node.state is NodeState.UNREACHABLE:
        return ""
    return f"it has {_name(node.now)}" if node.known else "its current state is unknown"


def _name(present: Present | None) -> str:
    if present is None:
        return "no DeepSpeed"
    return (
        f"DeepSpeed {present.version}" if present.version else f"a DeepSpeed without its records in {present.location}"
    )


class Delivery:
    """One wheel to one node: ``verify``, perhaps ``install``, then ``end`` in any case. Both steps raise NodeEnded."""

    def __init__(self, host: str, files: tuple[Sent, ...], way: Way, say: Callable[[str], None]) -> None:
        self.host, self._files, self._way, self._say = host, files, way, say
        self.state, self.step = NodeState.FAILED, NodeStep.CONNECT
        self.environment: tuple[str, ...] = ()
        self.closed = False
        self._findings: list[Finding] = []
        self._before: Present | None = None
        self._last = NodeMessage(say="")
        self._already = False
        self._folder = ""
        self._began: float | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stderr = b""

    @property
    def installing(self) -> bool:
        """Whether it was told to install."""
        return self.step is NodeStep.INSTALL

    async def verify(self) -> bool:
        """Connect, copy, and let the node's dsdoctor judge; whether it found no error."""
        self._began = time.monotonic()
        await self._within(min(CONNECT_TIMEOUT_SECONDS, self._way.limit), self._connect())
        self._begin(NodeStep.COPY)
        await self._within(self._way.limit, self._copy())
        self._begin(NodeStep.VERIFY)
        # the node has the same limit, and needs some seconds to report when it is over
        message = await self._within(self._way.limit + FINAL_SECONDS, self._heard("verified"))
        findings = tuple(finding.ours() for finding in message.findings)
        self._findings += findings
        refused = has_error(findings)
        if message.status not in {0, 1, 2} or refused != bool(message.status):
            raise no_verdict(self.host, self._way, f"dsdoctor ended with status {message.status}: {message.why}")
        self.state = NodeState.REFUSED if refused else NodeState.VERIFIED
        return not refused

    async def install(self) -> None:
        """Have the verified wheel installed. From here on the node finishes by itself."""
        self._begin(NodeStep.INSTALL)
        self.state = NodeState.FAILED
        await self._write(b"install\n")
        self._already = (await self._within(self._way.limit, self._heard("installed"))).already
        self.state = NodeState.INSTALLED

    def stop(self, ended: NodeEnded) -> None:
        """Note why the installation stops at this node."""
        self.state = ended.state
        self._findings.append(ended.finding)

    def cut_off(self, why: str) -> NodeEnded:
        """The session ends in the middle of a step."""
        return cut_off(self.host, self._way, self.step, why, self._stderr_text())

    async def end(self) -> Delivered:
        """End the session within FINAL_SECONDS, and return the outcome with what is there now."""
        self.closed = True
        if self._process is not None:
            try:
                await self._final_messages()
            finally:
                await self._kill()
        known = self._last.asked or (bool(self.environment) and not self.installing)
        if self._began is not None:
            self._say(f"{self.host}: {self.state.value}")
        return Delivered(
            host=self.host,
            state=self.state,
            step=self.step,
            findings=tuple(self._findings),
            before=self._before,
            now=self._last.now if self._last.asked else self._before if known else None,
            known=known,
            already=self._already,
            seconds=round(time.monotonic() - self._began, 1) if self._began is not None else 0.0,
        )

    async def _connect(self) -> None:
        script = (CHILD_SCRIPTS / "take_wheel.py").read_bytes()
        start = f"import sys;exec(sys.stdin.buffer.read({len(script)}))"
        command = f"exec {shlex.quote(self._way.python)} -I -S -c {shlex.quote(start)}"
        self._process = await asyncio.create_subprocess_exec(
            *(*self._way.ssh, self.host, command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(self._way.environment),
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._keep_stderr())
        files = [{"name": file.path.name, "size": file.size, "sha256": file.sha256} for file in self._files]
        asked = {"python": self._way.python, "files": files, "limit": self._way.limit, "dry_run": self._way.dry_run}
        await self._write(script + msgspec.json.encode(asked) + b"\n")
        message = await self._heard("here")
        self._before, self._folder, self.environment = message.before, message.folder, message.environment

    async def _copy(self) -> None:
        for sent in self._files:
            left = sent.size
            with sent.path.open("rb") as file:
                # never more than was announced, also where the file grows meanwhile
                while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                    left -= len(chunk)
                    await self._write(chunk)
            if left:
                raise _failed(book.finding("wheel-copy-differs", ERROR, case="shrunk", path=str(sent.path)))
        await self._heard("copied")

    async def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # when the other side is gone, its last messages say why
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def _heard(self, wanted: str) -> NodeMessage:
        """The message that is waited for. Raises NodeEnded where the node fails first."""
        while (message := await self._next()) is not None:
            if message.say == wanted:
                return message
            if message.say in MORE_SPECIFIC or message.say == "failed":
                raise failed(self.host, self._way, message)
        raise await self._lost()

    async def _next(self) -> NodeMessage | None:
        """The next message; other lines (a greeting of the login shell) are skipped. None: no more will come."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                _, mark, message = line.rpartition(MARK)
                if mark:
                    return self._noted(decode(message, NodeMessage))
        except (ValueError, msgspec.MsgspecError) as error:
            raise no_verdict(self.host, self._way, f"its message cannot be read: {error}") from None
        return None

    def _noted(self, message: NodeMessage) -> NodeMessage:
        if message.say == "end":
            self._last = message
        if message.say == "removed" and message.left:
            left = book.finding("node-folder-left", Severity.WARNING, folder=self._folder, host=self.host)
            self._findings.append(left)
        return message

    async def _lost(self) -> NodeEnded:
        """Why no more messages come, by what ssh or the shell there wrote."""
        assert self._process is not None
        status = await self._process.wait()
        if self._reading is not None:
            await self._reading
        if self.environment:
            return self.cut_off("the connection ended")
        return lost(self.host, self._way, status, self._stderr_text())

    async def _within(self, seconds: float, step: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(step, seconds)
        except asyncio.TimeoutError:
            if self.environment:
                raise self.cut_off(f"no end within {seconds:g} s") from None
            raise lost(self.host, self._way, None, self._stderr_text()) from None

    def _begin(self, step: NodeStep) -> None:
        self.step = step
        self._say(f"{self.host}: {step.value}")

    def _stderr_text(self) -> str:
        return self._stderr.decode(errors="replace").strip()

    async def _final_messages(self) -> None:
        """Close stdin, which makes the other side stop, and read its final messages."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        # a node that has not sent anything yet has nothing to report
        seconds = FINAL_SECONDS if self.environment else 1.0
        with contextlib.suppress(asyncio.TimeoutError, NodeEnded):
            await asyncio.wait_for(self._read_to_end(), seconds)

    async def _read_to_end(self) -> None:
        assert self._process is not None
        while await self._next() is not None:
            pass
        await self._process.wait()

    async def _kill(self) -> None:
        """End our ssh, if it has not ended by itself."""
        if self._process is not None and self._process.returncode is None:
            end_session(self._process.pid)
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=1)
            self._reading.cancel()

    async def _keep_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(MAX_STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-MAX_STDERR_BYTES:]


class AllNodes:
    """All nodes concurrently: at most ``parallel`` at a time, and one pip at a time in an environment.

    With ``all_or_nothing`` nothing is installed before the wheel was verified on all nodes.
    """

    def __init__(self, order: InstallOrder, nodes: list[Delivery]) -> None:
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
                loop.call_later(INSTALL_GRACE_SECONDS, lambda: leave(also_installs=True))

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
            node.stop(refused_here(error))
        except asyncio.CancelledError:
            node.stop(node.cut_off("the installation was interrupted"))
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


def failed(host: str, way: Way, message: NodeMessage) -> NodeEnded:
    """A node says that a step failed."""
    if message.say == "differs":
        return _failed(book.finding("wheel-copy-differs", ERROR, name=message.name, sha256=message.sha256[:16]))
    if message.say == "lacks" and message.name == "pip":
        return _failed(book.finding("node-lacks-pip", ERROR, python=way.python, host=host))
    if message.say == "lacks":
        return _failed(book.finding("host-lacks-modules", ERROR, case="install", python=way.python, host=host))
    if message.say == "another":
        return _failed(book.finding("node-has-another", ERROR, names=message.names, python=way.python, host=host))
    if message.step is NodeStep.INSTALL:
        return _failed(book.finding("node-not-installed", ERROR, why=message.why))
    if message.step is NodeStep.COPY:
        return _failed(book.finding("node-took-no-copy", ERROR, why=message.why, host=host))
    return no_verdict(host, way, message.why)


def no_verdict(host: str, way: Way, why: str) -> NodeEnded:
    """A node did not say whether the wheel fits."""
    return _failed(book.finding("node-not-verified", ERROR, why=why, python=way.python, host=host))


def refused_here(error: OSError) -> NodeEnded:
    """This machine did not let us read the wheel or start ssh."""
    return _failed(book.finding("push-refused-here", ERROR, why=error.strerror or str(error)))


def lost(host: str, way: Way, status: int | None, stderr: str) -> NodeEnded:
    """ssh ended, or (None) was ended, before the node sent a message."""
    tail = tuple(stderr.splitlines()[-4:])
    if status in {255, None}:
        problem = ssh_problem(host, status, stderr)
        unreached = book.finding(
            "ssh-fails", ERROR, case="install", evidence=tail, steps=problem.steps, what=problem.what, fix=problem.fix
        )
        return NodeEnded(NodeState.UNREACHABLE, unreached)
    return _failed(
        book.finding("host-lacks-python", ERROR, case="install", evidence=tail, python=way.python, host=host)
    )


def cut_off(host: str, way: Way, step: NodeStep, why: str, stderr: str = "") -> NodeEnded:
    """A node was left in the middle of a step."""
    tail = tuple(stderr.splitlines()[-4:])
    if step is not NodeStep.INSTALL:
        return _failed(book.finding("node-cut-off", ERROR, evidence=tail, why=why, step=step.value))
    python = way.python
    return _failed(
        book.finding("node-cut-off", ERROR, case="pip-runs", evidence=tail, why=why, python=python, host=host)
    )


def _failed(finding: Finding) -> NodeEnded:
    return NodeEnded(NodeState.FAILED, finding)
