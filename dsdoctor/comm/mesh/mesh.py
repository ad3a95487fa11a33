"""Every rank connects to every other over plain TCP, on the interface that it would use, and sends a large message.

A caller sends the token, its rank and the rank it wants; the listener answers with its own rank and the address that it sees the
caller at, then with a byte for each piece that came. Nothing that a caller sends is kept or executed.
"""

import contextlib
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dsdoctor.comm.mesh.connect import Wire, connect, sent_from, wire_of
from dsdoctor.comm.mesh.packet_size import largest_that_arrives
from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach

MAGIC = b"DSDC1"
CALL = struct.Struct("!5s16sIIQ")
ANSWER = struct.Struct("!5s16sI46s")
PIECE = 1 << 16
LARGE, SMALL = 1 << 20, 1 << 14
PATIENCE = 3.0
"""Seconds for a connection, for an answer, and for each next piece of a large message."""
ALL_PAIRS = 64
"""Up to so many ranks every pair is tried."""
GREETING = 1.0
"""Seconds in which a caller must send its request; a caller that does not is no rank of this test."""
SEGMENT = 0.8
"""Seconds in which segments of one size must arrive: time to be sent again twice."""
CALLERS, CALLED = 8, 512


class MeshListener:
    """Answers callers on one address. Connections wait in the kernel until ``answer`` is given the token."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self._slots = threading.Semaphore(CALLED)

    def answer(self, token: str, rank: int) -> None:
        """Answer from now on, in a thread that ends with the process."""
        threading.Thread(target=self._serve, args=(_digest(token), rank), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _serve(self, digest: bytes, rank: int) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._attend, args=(caller, digest, rank), daemon=True).start()
            else:
                caller.close()

    def _attend(self, caller: socket.socket, digest: bytes, rank: int) -> None:
        try:
            # a caller that breaks off, or is no rank of this test, gets no answer
            with contextlib.suppress(OSError), caller:
                _converse(caller, digest, rank)
        finally:
            self._slots.release()


def _converse(caller: socket.socket, digest: bytes, rank: int) -> None:
    """Answer one caller. Raises OSError where it breaks off."""
    caller.settimeout(GREETING)
    magic, token, _, _, size = CALL.unpack(_exactly(caller, CALL.size))
    if magic != MAGIC or token != digest or size > LARGE:
        return
    caller.settimeout(2 * PATIENCE)
    caller.sendall(ANSWER.pack(MAGIC, digest, rank, _address(caller.getpeername()).encode()))
    for piece in _pieces(size):
        _exactly(caller, piece)
        caller.sendall(b".")


def peers(rank: int, world: int) -> tuple[int, ...]:
    """The ranks that a rank connects to: all, and above 64 ranks those at distances 1, 2, 4, 8 ..., so that the traffic
    grows with world x log2(world) and still joins all ranks.

    >>> peers(1, 4), len(peers(0, 1024))
    ((2, 3, 0), 10)
    """
    distances = range(1, world) if world <= ALL_PAIRS else [1 << bit for bit in range((world - 1).bit_length())]
    return tuple((rank + distance) % world for distance in distances)


def reach_all(me: Claim, others: Sequence[Claim], token: str, *, seconds: float) -> tuple[Reach, ...]:
    """Connect to the others, a few at a time, within ``seconds``. Ranks for which no time is left are not in the result."""
    until = time.monotonic() + seconds

    def attempt(other: Claim) -> Reach | None:
        if time.monotonic() > until:
            return None
        return reach(me, other, token, size=_size(me, other), timeout=min(PATIENCE, max(seconds / 3, 0.5)))

    with ThreadPoolExecutor(CALLERS) as pool:
        reaches = tuple(found for found in pool.map(attempt, others) if found is not None)
    stalled = next((found for found in reaches if found.outcome is ConnectOutcome.STALLED and found.pmtu), None)
    if stalled is None:
        return reaches
    other = next(other for other in others if other.rank == stalled.target)
    usable = _usable(me, other, token, stalled.pmtu or 0, until)
    return tuple(replace(found, usable=usable) if found is stalled else found for found in reaches)


def _usable(me: Claim, other: Claim, token: str, most: int, until: float) -> int | None:
    """The bytes of the largest packet that arrives at another rank, found with connections that send no larger segments."""
    headers = 60 if ":" in other.address else 40

    def arrives(size: int) -> bool:
        with socket.socket(socket.AF_INET6 if headers == 60 else socket.AF_INET) as tried:
            tried.settimeout(SEGMENT)
            # what did not arrive is not sent again after the end
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                tried.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size - headers)
                tried.connect((other.address, other.port))
                # exactly one segment: of more, virtual networks hand on the whole as one
                segment = tried.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            except OSError:
                return False
            greeted, _ = _greet(tried, me.rank, other.rank, _digest(token), segment)
            return greeted is ConnectOutcome.REACHED and _push(tried, segment)[0] == segment

    return largest_that_arrives(arrives, most, until=until)


def _size(me: Claim, other: Claim) -> int:
    """The size of the message: large between hosts for ranks with the same local rank, because the interfaces are tested."""
    return LARGE if me.host != other.host and me.local_rank == other.local_rank else SMALL


def reach(me: Claim, other: Claim, token: str, *, size: int, timeout: float) -> Reach:
    """One attempt; where the address that a rank would use does not answer, its other one is tried too."""
    first = _attempt(me, other, (other.address, other.port), token, size, timeout)
    if first.outcome is ConnectOutcome.REACHED or other.other is None or other.other_port is None:
        return first
    second = _attempt(me, other, (other.other, other.other_port), token, SMALL, timeout)
    if second.outcome is not ConnectOutcome.REACHED:
        return first
    return replace(first, via_other=True)


def _attempt(me: Claim, other: Claim, where: tuple[str, int], token: str, size: int, timeout: float) -> Reach:
    began = time.monotonic()
    opened = connect(*where, timeout=timeout)
    if isinstance(opened, ConnectOutcome):
        return _failed(me, other, where, opened, time.monotonic() - began)
    with opened:
        opened.settimeout(timeout)
        mine = _address(opened.getsockname())
        outcome, seen_as = _greet(opened, me.rank, other.rank, _digest(token), size)
        greeted = time.monotonic()
        passed, broke = _push(opened, size) if outcome is ConnectOutcome.REACHED else (0, False)
        took = time.monotonic() - greeted
        wire = wire_of(opened) or Wire(mss=0, pmtu=0, retransmits=0, segments=0, rtt=None)
    return Reach(
        source=me.rank,
        target=other.rank,
        outcome=_end(outcome, size, passed, broke=broke),
        address=where[0],
        seconds=greeted - began,
        bandwidth=passed / took if passed and size == LARGE else None,
        mss=wire.mss or None,
        pmtu=wire.pmtu or None,
        retransmits=wire.retransmits,
        segments=wire.segments,
        rtt=wire.rtt,
        sent_from=mine if mine != me.address else "",
        seen_as=seen_as if seen_as != mine else "",
    )


def _failed(me: Claim, other: Claim, where: tuple[str, int], outcome: ConnectOutcome, seconds: float) -> Reach:
    """An attempt that opened no connection. The kernel's answer to a firewall that rejects is that of a missing route; where this
    host has a route, it was the network that said no."""
    mine = sent_from(*where)
    if outcome is ConnectOutcome.NO_ROUTE and mine:
        outcome = ConnectOutcome.UNREACHABLE
    return Reach(
        source=me.rank,
        target=other.rank,
        outcome=outcome,
        address=where[0],
        seconds=seconds,
        sent_from=mine if mine and mine != me.address else "",
    )


def _end(outcome: ConnectOutcome, size: int, passed: int, *, broke: bool) -> ConnectOutcome:
    """How an attempt ended, by its greeting and its message. A message that is only slow has passed in part."""
    if outcome is not ConnectOutcome.REACHED:
        return outcome
    if broke:
        return ConnectOutcome.CUT_OFF
    return ConnectOutcome.STALLED if size and not passed else ConnectOutcome.REACHED


def _greet(opened: socket.socket, rank: int, wanted: int, digest: bytes, size: int) -> tuple[ConnectOutcome, str]:
    """How the greeting ended, and the address at which the other side sees this one."""
    try:
        opened.sendall(CALL.pack(MAGIC, digest, rank, wanted, size))
        magic, token, found, seen_as = ANSWER.unpack(_exactly(opened, ANSWER.size))
    except TimeoutError:
        return ConnectOutcome.SILENT, ""
    except OSError:
        return ConnectOutcome.STRANGER, ""
    if (magic, token, found) != (MAGIC, digest, wanted):
        return ConnectOutcome.STRANGER, ""
    return ConnectOutcome.REACHED, seen_as.rstrip(b"\0").decode("ascii", errors="replace")


def _address(name: tuple[str, int]) -> str:
    """The address of a socket's name, without its interface."""
    return name[0].partition("%")[0]


def _push(opened: socket.socket, size: int) -> tuple[int, bool]:
    """The bytes of a message that the other side confirmed, less than ``size`` where the rest did not pass in time; and whether
    the other side broke off."""
    passed = 0
    try:
        for piece in _pieces(size):
            opened.sendall(bytes(piece))
            passed += piece * len(_exactly(opened, 1))
    except TimeoutError:
        return passed, False
    except OSError:
        return passed, True
    return passed, False


def _pieces(size: int) -> list[int]:
    return [min(PIECE, size - start) for start in range(0, size, PIECE)]


def _exactly(opened: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError where the other side closes first."""
    parts = []
    while size:
        part = opened.recv(min(size, PIECE))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _digest(token: str) -> bytes:
    """A digest that is sent instead of the token: 16 bytes."""
    return hashlib.sha256(token.encode()).digest()[:16]
