"""The conversation with one node over ssh: verify there, install there, hang up. Acts through ssh; judges no wheel itself."""

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
from dsdoctor.push import errors as problems
from dsdoctor.push.models import Delivered, NodeEnded, NodeMessage, NodeState, NodeStep, Present, Sent, Way

T = TypeVar("T")
MARK = b"@@dsdoctor "
CHUNK = 1 << 20
LONGEST_LINE = 16 << 20
TAIL = 4000
FIRST_WORD = 60.0
"""Seconds for a login and the start of a Python, at most."""
LAST_WORDS = 20.0
"""Seconds in which a node that was told to stop must have removed its folder."""
SAID_FIRST = ("differs", "lacks", "another")
"""Words that say more than the "failed" which follows them."""


class Delivery:
    """One wheel to one node: ``verify``, perhaps ``install``, then ``end``, whatever came before. Both steps raise Ended."""

    def __init__(self, host: str, files: tuple[Sent, ...], way: Way, say: Callable[[str], None]) -> None:
        self.host, self._files, self._way, self._say = host, files, way, say
        self.state, self.step = NodeState.FAILED, NodeStep.CONNECT
        self.environment: tuple[str, ...] = ()
        self.hung_up = False
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
        await self._within(min(FIRST_WORD, self._way.limit), self._connect())
        self._begin(NodeStep.COPY)
        await self._within(self._way.limit, self._copy())
        self._begin(NodeStep.VERIFY)
        # the node has the same limit, and a word to say when it is over
        word = await self._within(self._way.limit + LAST_WORDS, self._heard("verified"))
        self._findings += word.findings
        refused = has_error(word.findings)
        if word.status not in {0, 1, 2} or refused != bool(word.status):
            raise problems.no_verdict(f"dsdoctor ended with status {word.status}: {word.why}")
        self.state = NodeState.REFUSED if refused else NodeState.VERIFIED
        return not refused

    async def install(self) -> None:
        """Have it installed where it was verified. From here on the node comes to an end by itself."""
        self._begin(NodeStep.INSTALL)
        self.state = NodeState.FAILED
        await self._write(b"install\n")
        self._already = (await self._within(self._way.limit, self._heard("installed"))).already
        self.state = NodeState.INSTALLED

    def stop(self, ended: NodeEnded) -> None:
        """Note why it comes no further."""
        self.state = ended.state
        self._findings.append(ended.finding)

    def cut_off(self, why: str) -> NodeEnded:
        """It is left in the middle."""
        return problems.cut_off(self.host, self._way, self.step, why, self._said())

    async def end(self) -> Delivered:
        """Hang up, hear what is there now, and give the outcome: within LAST_WORDS seconds."""
        self.hung_up = True
        if self._process is not None:
            try:
                await self._last_word()
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
        word = await self._heard("here")
        self._before, self._folder, self.environment = word.before, word.folder, word.environment

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
        # where nobody reads any more, what was said tells why
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def _heard(self, wanted: str) -> NodeMessage:
        """The word that is waited for. Raises Ended where another end comes first."""
        while (word := await self._next()) is not None:
            if word.say == wanted:
                return word
            if word.say in SAID_FIRST or word.say == "failed":
                raise problems.failed(self.host, self._way, word)
        raise await self._lost()

    async def _next(self) -> NodeMessage | None:
        """The next word; lines of others (a greeting of the login shell) are passed over. None: it says no more."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                _, mark, said = line.rpartition(MARK)
                if mark:
                    return self._learnt(msgspec.json.decode(said, type=NodeMessage))
        except (ValueError, msgspec.MsgspecError) as error:
            raise problems.no_verdict(f"its words make no sense here: {error}") from None
        return None

    def _learnt(self, word: NodeMessage) -> NodeMessage:
        if word.say == "end":
            self._last = word
        if word.say == "removed" and word.left:
            self._findings.append(problems.folder_left(self._folder))
        return word

    async def _lost(self) -> NodeEnded:
        """The words ended: by what ssh, or the shell there, said."""
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

    async def _last_word(self) -> None:
        """Close stdin, which tells the other side to stop, and hear it out."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        # one that has not said a word yet has nothing to tell
        seconds = LAST_WORDS if self.environment else 1.0
        with contextlib.suppress(asyncio.TimeoutError, NodeEnded):
            await asyncio.wait_for(self._hear_out(), seconds)

    async def _hear_out(self) -> None:
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
