"""Between nodes: a node's supervisor hands what it saw to the one on rank 0's host, by plain TCP. Nothing is asked of the
job's store.

The one that listens greets with a random word; a report is JSON behind a length and an HMAC over that word and the text, with
the run's secret. What does not bear it, is too long or too slow is dropped. While all is well a node sends a few words now and
then, so that one that falls silent is known by its name.
"""

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

from dsdoctor.core.text import decode, encode
from dsdoctor.hang.models import RankView
from dsdoctor.hang.run_identity import RunIdentity

GREETING, MAC = 16, 32
HEAD = struct.Struct("<I32s")
LARGEST = 64 << 20
SLOWEST = 3.0


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node saw of its ranks. ``still``: seconds since any of them moved. ``views``: only when nothing moves."""

    host: str
    still: float
    ranks: tuple[int, ...] = ()
    views: tuple[RankView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What rank 0's node says to a report: who it is, whether it has told of this hang, and whether all ranks are to end."""

    host: str
    ranks: tuple[int, ...] = ()
    told: bool = False
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What became of a report: the answer to it; or there was no way to the host; or nobody of this run listens there."""

    answer: Answer | None = None
    unreachable: bool = False


class Listener:
    """The listening end, on rank 0's host. ``port`` is None where none of the run's ports was free."""

    def __init__(self, run: RunIdentity) -> None:
        self._secret = run.secret
        self._socket = _bound(run.ports)
        self.port = self._socket.getsockname()[1] if self._socket else None

    def reports(self, seconds: float, answer: Answer, *, enough: int = 1 << 20) -> list[NodeReport]:
        """The reports that come in this time, until they cover so many ranks. ``answer``: what is said to each."""
        found: list[NodeReport] = []
        last = time.monotonic() + seconds
        while self._socket and sum(len(report.views) for report in found) < enough:
            self._socket.settimeout(max(0.001, last - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except OSError:
                break
            with connection, contextlib.suppress(OSError, msgspec.DecodeError, ValueError):
                found.append(_received(connection, self._secret, answer))
        return found

    def close(self) -> None:
        """Listen no more."""
        if self._socket:
            self._socket.close()


def send_report(run: RunIdentity, report: NodeReport) -> Sent:
    """Hand a report to the supervisor on rank 0's host."""
    for port in run.ports:
        try:
            with socket.create_connection((run.master, port), timeout=SLOWEST) as connection:
                answer = _sent(connection, run.secret, encode(report))
                if answer is not None:
                    return Sent(answer=answer)
        except ConnectionRefusedError:
            continue
        except OSError:
            # no way to that host: the other ports would take as long
            return Sent(unreachable=True)
    return Sent()


def _sent(connection: socket.socket, secret: bytes, text: bytes) -> Answer | None:
    """Send one report, and read the answer; None where another program listens there."""
    connection.settimeout(SLOWEST)
    try:
        greeting = _exactly(connection, GREETING)
        connection.sendall(HEAD.pack(len(text), _mac(secret, greeting, text)) + text)
        return decode(_message(connection, secret, greeting + b"answer"), Answer)
    except (OSError, ValueError):
        return None


def _received(connection: socket.socket, secret: bytes, answer: Answer) -> NodeReport:
    """One report. Raises OSError or ValueError for what is not of this run."""
    connection.settimeout(SLOWEST)
    greeting = os.urandom(GREETING)
    connection.sendall(greeting)
    report = decode(_message(connection, secret, greeting), NodeReport)
    text = encode(answer)
    connection.sendall(HEAD.pack(len(text), _mac(secret, greeting + b"answer", text)) + text)
    return report


def _message(connection: socket.socket, secret: bytes, greeting: bytes) -> bytes:
    """A text that bears the run's secret. Raises OSError or ValueError."""
    length, mac = HEAD.unpack(_exactly(connection, HEAD.size))
    if length > LARGEST:
        raise ValueError("too long")
    text = _exactly(connection, length)
    if not hmac.compare_digest(mac, _mac(secret, greeting, text)):
        raise ValueError("of another run")
    return text


def _mac(secret: bytes, greeting: bytes, text: bytes) -> bytes:
    return hmac.new(secret, greeting + text, hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError where the other end stops before, OSError where it takes too long."""
    last = time.monotonic() + SLOWEST
    parts = bytearray()
    while len(parts) < count:
        if time.monotonic() > last:
            raise TimeoutError
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("closed")
        parts += part
    return bytes(parts)


def _bound(ports: tuple[int, ...]) -> socket.socket | None:
    for port in ports:
        listening = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listening.family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind(("", port))
            listening.listen(1024)
            return listening
        except OSError:
            listening.close()
    return None
