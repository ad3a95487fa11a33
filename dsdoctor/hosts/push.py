"""The session with a node over ssh: verify there, install there, end. Acts through ssh; judges no wheel itself."""

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.core.processes import end_session
from dsdoctor.core.text import decode
from dsdoctor.push import errors as problems
from dsdoctor.push.models import Delivered, NodeEnded, NodeMessage, NodeState, NodeStep, Present, Sent, Way

T = TypeVar("T")
MARK = b"@@dsdoctor "
CHUNK = 1 << 20
LONGEST_LINE = 16 << 20
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
            raise problems.no_verdict(f"dsdoctor ended with status {message.status}: {message.why}")
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
        return problems.cut_off(self.host, self._way, self.step, why, self._said())

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
            limit=LONGEST_LINE,
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
                raise problems.shrunk(sent)
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
                raise problems.failed(self.host, self._way, message)
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
            raise problems.no_verdict(f"its message cannot be read: {error}") from None
        return None

    def _noted(self, message: NodeMessage) -> NodeMessage:
        if message.say == "end":
            self._last = message
        if message.say == "removed" and message.left:
            self._findings.append(problems.folder_left(self._folder))
        return message

    async def _lost(self) -> NodeEnded:
        """Why no more messages come, by what ssh or the shell there wrote."""
        assert self._process is not None
        status = await self._process.wait()
        if self._reading is not None:
            await self._reading
        if self.environment:
            return self.cut_off("the connection ended")
        return problems.lost(self.host, self._way, status, self._said())

    async def _within(self, seconds: float, step: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(step, seconds)
        except asyncio.TimeoutError:
            if self.environment:
                raise self.cut_off(f"no end within {seconds:g} s") from None
            raise problems.lost(self.host, self._way, None, self._said()) from None

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
