"""Address and port -> a store of torch, rank 0 of a test on the port beside its own, or somebody else. Asked over plain TCP.

torch's client cannot tell: with another program on the port it waits for ever, and before its first connection it asks the name
server for its own address, which takes 6 to 30 seconds where that does not answer.
"""

import contextlib
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

from dsdoctor.comm.mesh.connect import connect
from dsdoctor.comm.results import ConnectOutcome

NONCE = b"who\n"
PROBE = b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x0d" + NONCE
"""What torch's own client sends first (TCPStore.cpp, TCPStoreBackend.hpp): VALIDATE with its magic number, then PING with four
bytes that a store sends back. They end the line here, so that a listener of ours can answer too. torch before 2.2 has no PING."""
LARGEST = 4096


@dataclass(frozen=True, kw_only=True)
class RankZero:
    """Who hears notices: rank 0 of a test, and where its store is."""

    run: str
    world: int
    port: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Listener:
    """What answers on a port. REACHED: a store of torch; STRANGER: what sent ``said``, or closed the connection; SILENT: what
    accepts and sends nothing; ``rank_zero`` is set where it is rank 0 of a test, which listens for notices there. ``here``: the
    connection stayed on this host."""

    outcome: ConnectOutcome
    said: str = ""
    here: bool = False
    rank_zero: RankZero | None = None


def ask(address: str, port: int, *, timeout: float, listen: float) -> Listener:
    """Who listens there: ``timeout`` seconds to connect, ``listen`` seconds to answer."""
    opened = connect(address, port, timeout=timeout)
    if isinstance(opened, ConnectOutcome):
        return Listener(outcome=opened)
    with opened:
        try:
            here = opened.getsockname()[0] == opened.getpeername()[0]
            opened.sendall(PROBE)
            return _told(_answer(opened, listen), here)
        except TimeoutError:
            return Listener(outcome=ConnectOutcome.SILENT, here=here)
        except OSError:
            return Listener(outcome=ConnectOutcome.STRANGER)


def _told(answer: bytes, here: bool) -> Listener:
    if answer == NONCE:
        return Listener(outcome=ConnectOutcome.REACHED, here=here)
    with contextlib.suppress(msgspec.MsgspecError):
        rank_zero = msgspec.json.decode(answer, type=RankZero)
        return Listener(outcome=ConnectOutcome.STRANGER, rank_zero=rank_zero, here=here)
    said = answer[:80].decode("ascii", errors="replace").strip()
    return Listener(outcome=ConnectOutcome.STRANGER, said=said if said.isprintable() else "", here=here)


def _answer(opened: socket.socket, seconds: float) -> bytes:
    """What comes up to the end of a line. Raises TimeoutError where nothing comes."""
    until, text = time.monotonic() + seconds, b""
    while b"\n" not in text and len(text) < LARGEST:
        opened.settimeout(max(until - time.monotonic(), 0.01))
        try:
            part = opened.recv(LARGEST)
        except TimeoutError:
            if not text:
                raise
            break
        if not part:
            break
        text += part
    return text
