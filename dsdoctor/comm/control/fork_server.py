"""A fork server: a process that has imported torch and done nothing else, and every data process is a fork of it.

A new data process so takes milliseconds, and inherits no thread, no connection and no CUDA context.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import msgspec

from dsdoctor.comm.control.exchange_process import exchange, stack_file
from dsdoctor.comm.control.messages import Do, ExchangeMessage, Join
from dsdoctor.comm.results import SkippedStep
from dsdoctor.core.processes import ending_of, fork

LARGEST = 1 << 20
SOON = timedelta(seconds=2)
"""For a connection to this very process."""
REAPING = 0.05


class Data:
    """A data process as its control process sees it: ``step`` and ``at`` are from its last message."""

    def __init__(self, pid: int, join: Join, channel: socket.socket, fork_server: "ForkServer") -> None:
        self.pid, self.group, self.folder = pid, join.prefix, join.folder
        self._channel, self._fork_server = channel, fork_server
        self._rest = b""
        self.step, self.at, self.moved = 0, "starting", time.monotonic()
        self.left_out: tuple[SkippedStep, ...] = ()

    def do(self, work: Do) -> None:
        """Give it its next work. A process that is dead already is noticed by ``ended``."""
        if work.phase is not None:
            self.left_out = ()
        try:
            self._channel.sendall(msgspec.json.encode(work) + b"\n")
        except OSError:
            return

    def messages(self) -> Iterator[ExchangeMessage]:
        """The messages that came since the last call."""
        while select.select([self._channel], [], [], 0)[0]:
            try:
                part = self._channel.recv(LARGEST)
            except OSError:
                return
            if not part:
                return
            *lines, self._rest = (self._rest + part).split(b"\n")
            for line in lines:
                message = msgspec.json.decode(line, type=ExchangeMessage)
                self.moved = time.monotonic()
                if message.at:
                    self.step, self.at = message.step, message.at
                if message.skipped:
                    self.left_out += (SkippedStep(step=message.step, at=self.at, reason=message.skipped),)
                yield message

    def ended(self) -> str | None:
        """How it died, None while it lives."""
        return self._fork_server.ending(self.pid)

    def ask_stack(self) -> None:
        """Have it write its Python stacks and the flight recorder to the folder, which takes about a tenth of a second."""
        self.do(Do())
        try:
            os.kill(self.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return

    def stack(self) -> tuple[str, ...]:
        """The stack of its main thread, innermost first, as far as it was written."""
        try:
            text = stack_file(self.folder, self.pid).read_text(errors="replace")
        except OSError:
            return ()
        _, _, main = text.rpartition("(most recent call first):\n")
        return tuple(line.strip() for line in main.splitlines() if line.strip())

    def kill(self) -> None:
        """End it."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._channel.close()


class ForkServer:
    """Made by a control process after it has imported torch and before it opens anything."""

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._endings: dict[int, int] = {}
        self.pid = fork(lambda: _serve(theirs, self._mine))
        theirs.close()

    def start(self, join: Join) -> Data:
        """A new data process. Raises ConnectionError where the fork server is gone."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._mine, [msgspec.json.encode(join)], [theirs.fileno()])
        while True:
            pid, status = self._receive()
            if status is None:
                return Data(pid, join, mine, self)

    def ending(self, pid: int) -> str | None:
        """How a data process ended, None while it lives."""
        while select.select([self._mine], [], [], 0)[0]:
            self._receive()
        if pid not in self._endings:
            return None
        return ending_of(self._endings[pid]) or "it ended with exit status 0"

    def _receive(self) -> tuple[int, int | None]:
        message = self._mine.recv(256)
        if not message:
            raise ConnectionError("the process that starts data processes is gone")
        pid, status = msgspec.json.decode(message, type=tuple[int, int | None])
        if status is not None:
            self._endings[pid] = status
        return pid, status


def _ask_name_server() -> None:
    """Have torch ask the name server now, once for all data processes: it does so before the first connection of a process, which
    takes longer than a rank may stand still where no name server answers. A store that is not needed is opened for that."""
    with contextlib.suppress(Exception):
        # torch raises another type in each release
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        TCPStore(loopback(), 0, None, True, SOON, wait_for_workers=False)


def loopback() -> str:
    """The loopback address of this network namespace: one may have IPv6 alone. torch tries the other for as long as it may."""
    with contextlib.suppress(OSError), socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return "127.0.0.1"
    return "::1"


def _serve(channel: socket.socket, other: socket.socket) -> None:
    """The fork server's main loop: fork on request, and report which process ended and how."""
    other.close()
    _ask_name_server()
    alive: set[int] = set()
    while True:
        if select.select([channel], [], [], REAPING if alive else None)[0]:
            message, handles, _, _ = socket.recv_fds(channel, LARGEST, 1)
            if not message:
                return
            join, given = msgspec.json.decode(message, type=Join), socket.socket(fileno=handles[0])

            def child(join: Join = join, given: socket.socket = given) -> None:
                channel.close()
                exchange(join, given)

            pid = fork(child)
            given.close()
            alive.add(pid)
            channel.send(msgspec.json.encode((pid, None)))
        for pid in tuple(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                channel.send(msgspec.json.encode((pid, status)))
