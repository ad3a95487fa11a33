"""A rank that cannot come says why over plain TCP, and rank 0 hears it: neither needs torch or its store.

Rank 0 listens on one of the three ports above the master's. A notice is one line of JSON and is answered by one line; it counts
only for a rank of this run that does not come by itself, and of jobs started by hand, which have no name, only with the same
MASTER_PORT: another port may be another job's, so such a notice is only told where that rank is missing. A rank with
another MASTER_PORT may ask for a store here. Where a firewall leaves only the master's port open nothing is heard.
Rank 0 closes the connection by ending: a launcher that ends all ranks with the first must not do so before rank 0 has reported.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace

import msgspec

from dsdoctor.comm.mesh.mesh import Callers, connect
from dsdoctor.comm.models import Rank
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.text import decode

# Address and port -> a store of torch, rank 0 of a test on the port beside its own, or somebody else. Asked over plain TCP.
#
# torch's client cannot tell: with another program on the port it waits for ever, and before its first connection it asks the name
# server for its own address, which takes 6 to 30 seconds where that does not answer.


NONCE = b"who\n"
PROBE = b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x0d" + NONCE
"""What torch's own client sends first (TCPStore.cpp, TCPStoreBackend.hpp): VALIDATE with its magic number, then PING with four
bytes that a store sends back. They end the line here, so that a listener of ours can answer too. torch before 2.2 has no PING."""
MAX_ANSWER_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class RankZero:
    """Who hears notices: rank 0 of a test, and where its store is. ``at``: what it is doing and for how many ``seconds``, where it
    does not serve its store yet."""

    run: str
    world: int
    port: int
    host: str
    pid: int
    at: str = ""
    seconds: float = 0.0


def rank_zero_of(rank: Rank, pid: int) -> RankZero:
    """Rank 0, on this host."""
    return RankZero(run=rank.run, world=rank.world, port=rank.port, host=socket.gethostname(), pid=pid)


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
        rank_zero = decode(answer, RankZero)
        return Listener(outcome=ConnectOutcome.STRANGER, rank_zero=rank_zero, here=here)
    said = answer[:80].decode("ascii", errors="replace").strip()
    return Listener(outcome=ConnectOutcome.STRANGER, said=said if said.isprintable() else "", here=here)


def _answer(opened: socket.socket, seconds: float) -> bytes:
    """What comes up to the end of a line. Raises TimeoutError where nothing comes."""
    until, text = time.monotonic() + seconds, b""
    while b"\n" not in text and len(text) < MAX_ANSWER_BYTES:
        opened.settimeout(max(until - time.monotonic(), 0.01))
        try:
            part = opened.recv(MAX_ANSWER_BYTES)
        except TimeoutError:
            if not text:
                raise
            break
        if not part:
            break
        text += part
    return text


PORTS = 3
MAX_NOTICE_BYTES = 4096
PATIENCE, CONNECT = 2.0, 0.5
"""Seconds in all for a line, and for a connection: who waits for one looks after ranks meanwhile."""
RETRY = 0.3
UNNAMED = "0"
"""The run of a job that no launcher has named."""
MAX_HELD = MAX_CALLERS = 64
"""Connections that rank 0 keeps open, and callers that it listens to at the same time."""
HEARD = b"dsdoctor: heard\n"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Why a rank of a run cannot come. ``port`` is its MASTER_PORT."""

    run: str
    rank: int
    host: str
    why: str
    port: int = 0


def ports(master_port: int) -> tuple[int, ...]:
    """Where rank 0 may listen for notices.

    >>> ports(29500)
    (29501, 29502, 29503)
    """
    return tuple(port for port in range(master_port + 1, master_port + 1 + PORTS) if port < 1 << 16)


class NoticeListener:
    """Hears notices in a thread that ends with the process. Without a free port it hears none."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._who = rank_zero_of(rank, os.getppid())
        self._heard: dict[int, Notice] = {}
        self._perhaps: dict[int, Notice] = {}
        self._held: list[socket.socket] = []
        self._callers = Callers(MAX_CALLERS)
        if (listening := _listening(rank)) is not None:
            threading.Thread(target=self._serve, args=(listening,), daemon=True).start()

    @property
    def heard(self) -> dict[int, Notice]:
        """The notices by rank, the first of each."""
        return dict(self._heard)

    @property
    def perhaps(self) -> dict[int, Notice]:
        """Those of ranks with another MASTER_PORT, of this job or of another one."""
        return dict(self._perhaps)

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                caller, _ = listening.accept()
            except OSError:  # no descriptor is left, or the caller is gone
                time.sleep(RETRY)
                continue
            # who says nothing keeps none of the others waiting; RuntimeError: there is no room for a thread
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._hear, args=(self._callers.enter(caller),), daemon=True).start()

    def _hear(self, caller: socket.socket) -> None:
        # who breaks off, sends something else or belongs to another run is not heard
        with contextlib.suppress(OSError, msgspec.MsgspecError), contextlib.ExitStack() as unless_held:
            unless_held.enter_context(caller)
            unless_held.callback(self._callers.leave, caller)
            if self._attend(caller) and len(self._held) < MAX_HELD:
                self._callers.leave(caller)
                unless_held.pop_all()
                self._held.append(caller)

    def _attend(self, caller: socket.socket) -> bool:
        """Read a notice and answer it; whether it counts. Who looks for a store here is told who this is."""
        line = read_line(caller)
        if line == PROBE:
            caller.sendall(msgspec.json.encode(self._who) + b"\n")
            return False
        notice = decode(line, Notice)
        if notice.run != self._rank.run or not 0 <= notice.rank < self._rank.world:
            return False
        ours = notice.run != UNNAMED or notice.port == self._rank.port
        (self._heard if ours else self._perhaps).setdefault(notice.rank, notice)
        caller.sendall(HEARD)
        return ours


def _listening(rank: Rank) -> socket.socket | None:
    """A port on the master's address where that is one of this host's, else on all, as for the store."""
    family = socket.AF_INET6 if ":" in rank.master else socket.AF_INET
    for address in (rank.master, ""):
        for port in ports(rank.port):
            with contextlib.suppress(OSError):
                return socket.create_server((address, port), family=family, backlog=1024)
    return None


def read_line(caller: socket.socket) -> bytes:
    """What a caller sends up to the end of its line, or as far as it comes in the time that it has in all."""
    until, text = time.monotonic() + PATIENCE, b""
    while b"\n" not in text and len(text) < MAX_NOTICE_BYTES and (left := until - time.monotonic()) > 0:
        caller.settimeout(left)
        part = caller.recv(MAX_NOTICE_BYTES)
        if not part:
            break
        text += part
    return text


def send_notice(master: str, port: int, notice: Notice, *, seconds: float, stay: float = 0.0) -> bool:
    """Tell rank 0, at the master's address and port, why a rank cannot come, again until it hears or the time is over; whether it
    heard. Then wait until rank 0 has ended, for ``stay`` seconds at most."""
    line = msgspec.json.encode(replace(notice, why=notice.why[: MAX_NOTICE_BYTES // 2])) + b"\n"
    until = time.monotonic() + seconds
    while True:
        if any(_sent(master, listening, line, stay) for listening in ports(port)):
            return True
        if time.monotonic() + RETRY > until:
            return False
        time.sleep(RETRY)


def _sent(master: str, port: int, line: bytes, stay: float) -> bool:
    opened = connect(master, port, timeout=CONNECT)
    if isinstance(opened, ConnectOutcome):
        return False
    with contextlib.suppress(OSError), opened:
        opened.settimeout(PATIENCE)
        opened.sendall(line)
        if opened.recv(len(HEARD)) != HEARD:
            return False
        if stay > 0:
            with contextlib.suppress(OSError):
                opened.settimeout(stay)
                opened.recv(1)
        return True
    return False
