"""A wheel is sent to a node over ssh, verified and installed there: data, session, and why a push stops."""

import asyncio
import contextlib
import enum
import shlex
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.core.processes import end_session
from dsdoctor.core.text import and_more, decode
from dsdoctor.hosts.ssh import RemoteFinding
from dsdoctor.rules import book
from dsdoctor.ui.terminal import finding_lines

# The data of a push to a node: what is sent, how the node is reached, its messages, the outcome. Data only.


class NodeState(enum.Enum):
    """The outcome of a push on a node."""

    INSTALLED = "installed"
    VERIFIED = "verified"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    FAILED = "failed"


class NodeStep(enum.Enum):
    """The steps of a push on a node."""

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
    ``python`` is the interpreter there, ``limit`` the seconds for each step. ``unreached`` makes the finding from host,
    ssh's status (None: it did not end in time) and its message."""

    ssh: tuple[str, ...]
    environment: Mapping[str, str]
    python: str
    limit: float
    dry_run: bool
    unreached: Callable[[str, int | None, str], Finding]


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


class NodeEnded(Exception):
    """The push stops at this node. ``finding`` says why."""

    def __init__(self, state: NodeState, finding: Finding) -> None:
        super().__init__(finding.title)
        self.state, self.finding = state, finding


# What a node or ssh said, or a time limit -> a finding that says why the push stops at that node.


ERROR = Severity.ERROR


def failed(host: str, way: Way, message: NodeMessage) -> NodeEnded:
    """A node says that a step failed."""
    if message.say == "differs":
        return _failed(book.finding("wheel-copy-differs", ERROR, name=message.name, sha256=message.sha256[:16]))
    if message.say == "lacks" and message.name == "pip":
        return _failed(book.finding("node-lacks-pip", ERROR, python=way.python, host=host))
    if message.say == "lacks":
        return _failed(book.finding("host-lacks-modules", ERROR, case="push", python=way.python, host=host))
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


def shrunk(file: Sent) -> NodeEnded:
    """A file became shorter while it was sent."""
    return _failed(book.finding("wheel-copy-differs", ERROR, case="shrunk", path=str(file.path)))


def refused_here(error: OSError) -> NodeEnded:
    """This machine did not let us read the wheel or start ssh."""
    return _failed(book.finding("push-refused-here", ERROR, why=error.strerror or str(error)))


def lost(host: str, way: Way, status: int | None, said: str) -> NodeEnded:
    """ssh ended, or (None) was ended, before the node sent a message."""
    tail = tuple(said.splitlines()[-4:])
    if status in {255, None}:
        return NodeEnded(NodeState.UNREACHABLE, way.unreached(host, status, said))
    return _failed(book.finding("host-lacks-python", ERROR, case="push", evidence=tail, python=way.python, host=host))


def cut_off(host: str, way: Way, step: NodeStep, why: str, said: str = "") -> NodeEnded:
    """A node was left in the middle of a step."""
    tail = tuple(said.splitlines()[-4:])
    if step is not NodeStep.INSTALL:
        return _failed(book.finding("node-cut-off", ERROR, evidence=tail, why=why, step=step.value))
    python = way.python
    return _failed(
        book.finding("node-cut-off", ERROR, case="pip-runs", evidence=tail, why=why, python=python, host=host)
    )


def folder_left(host: str, folder: str) -> Finding:
    """A node could not clean up."""
    return book.finding("node-folder-left", Severity.WARNING, folder=folder, host=host)


def _failed(finding: Finding) -> NodeEnded:
    return NodeEnded(NodeState.FAILED, finding)


# The session with a node over ssh: verify there, install there, end. Acts through ssh; judges no wheel itself.


T = TypeVar("T")
MARK = b"@@dsdoctor "
CHUNK = 1 << 20
MAX_LINE_BYTES = 16 << 20
TAIL = 4000
FIRST_MESSAGE = 60.0
"""Seconds for a login and the start of a Python, at most."""
FINAL_SECONDS = 20.0
"""Seconds in which a node that was told to stop must have removed its folder."""
MORE_SPECIFIC = ("differs", "lacks", "another")
"""Messages that say more than the "failed" which follows them."""


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
        await self._within(min(FIRST_MESSAGE, self._way.limit), self._connect())
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
        """Note why the push stops at this node."""
        self.state = ended.state
        self._findings.append(ended.finding)

    def cut_off(self, why: str) -> NodeEnded:
        """The session ends in the middle of a step."""
        return cut_off(self.host, self._way, self.step, why, self._said())

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
        told = {"python": self._way.python, "files": files, "limit": self._way.limit, "dry_run": self._way.dry_run}
        await self._write(script + msgspec.json.encode(told) + b"\n")
        message = await self._heard("here")
        self._before, self._folder, self.environment = message.before, message.folder, message.environment

    async def _copy(self) -> None:
        for sent in self._files:
            left = sent.size
            with sent.path.open("rb") as file:
                # never more than was announced, also where the file grows meanwhile
                while left and (chunk := file.read(min(CHUNK, left))):
                    left -= len(chunk)
                    await self._write(chunk)
            if left:
                raise shrunk(sent)
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
                _, mark, said = line.rpartition(MARK)
                if mark:
                    return self._noted(decode(said, NodeMessage))
        except (ValueError, msgspec.MsgspecError) as error:
            raise no_verdict(self.host, self._way, f"its message cannot be read: {error}") from None
        return None

    def _noted(self, message: NodeMessage) -> NodeMessage:
        if message.say == "end":
            self._last = message
        if message.say == "removed" and message.left:
            self._findings.append(folder_left(self.host, self._folder))
        return message

    async def _lost(self) -> NodeEnded:
        """Why no more messages come, by what ssh or the shell there wrote."""
        assert self._process is not None
        status = await self._process.wait()
        if self._reading is not None:
            await self._reading
        if self.environment:
            return self.cut_off("the connection ended")
        return lost(self.host, self._way, status, self._said())

    async def _within(self, seconds: float, step: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(step, seconds)
        except asyncio.TimeoutError:
            if self.environment:
                raise self.cut_off(f"no end within {seconds:g} s") from None
            raise lost(self.host, self._way, None, self._said()) from None

    def _begin(self, step: NodeStep) -> None:
        self.step = step
        self._say(f"{self.host}: {step.value}")

    def _said(self) -> str:
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
        while chunk := await self._process.stderr.read(TAIL):
            self._stderr = (self._stderr + chunk)[-TAIL:]


# The outcome of a push on each node -> lines: one for each node, each finding once with its nodes, the count.


MARKS = {NodeState.INSTALLED: "✓", NodeState.VERIFIED: "✓"}
FEW = 4


def push_lines(wheel: str, nodes: tuple[Delivered, ...], *, dry_run: bool) -> Iterator[str]:
    """The outcome of a push, ``wheel`` being the name of its file."""
    width = max((len(node.host) for node in nodes), default=0)
    for node in nodes:
        mark = MARKS.get(node.state, "✗")
        told = "; ".join(filter(None, (_state(node), _left(node))))
        yield f"{mark} {node.host:<{width}}  {told}  ({node.seconds:.0f} s)"
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
        replace(finding, title=f"{and_more(hosts[key], FEW)}: {finding.title}") for key, finding in found.items()
    )


def _state(node: Delivered) -> str:
    if node.state is NodeState.INSTALLED:
        return "it is there already" if node.already else "installed"
    if node.state is NodeState.REFUSED:
        return "refused: dsdoctor verify finds an error there"
    if node.state is NodeState.VERIFIED:
        return "verified, not installed"
    return node.state.value if node.state is NodeState.UNREACHABLE else f"failed at the step {node.step.value}"


def _left(node: Delivered) -> str:
    """What is there now, or was before."""
    if node.state is NodeState.INSTALLED:
        return "" if node.already else f"before: {_name(node.before)}"
    if node.state is NodeState.UNREACHABLE:
        return ""
    return f"it has {_name(node.now)}" if node.known else "what it has now is not known"


def _name(present: Present | None) -> str:
    if present is None:
        return "no DeepSpeed"
    return (
        f"DeepSpeed {present.version}" if present.version else f"a DeepSpeed without its records in {present.location}"
    )
