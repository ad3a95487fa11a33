"""Every rank connects to every other over plain TCP, on the interface that it would use, and sends a large message.

A caller sends the token, its rank and the rank it wants; the listener answers with its own rank and the address that it sees the
caller at, then with a byte for each piece that came. Nothing that a caller sends is kept or executed.
"""

import contextlib
import errno
import hashlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach

# The largest packet that arrives, found by trying many sizes at the same time. Knows nothing of networks.


MIN_PACKET_BYTES = 576
"""Every network that carries IPv4 lets through so many bytes (RFC 791); IPv6 asks for 1280."""
AT_ONCE = 16


def largest_that_arrives(arrives: Callable[[int], bool], most: int, *, until: float) -> int | None:
    """The most bytes below ``most``, which do not arrive, of which packets arrive; None where none of the first sizes does. The
    search ends early at ``until`` (monotonic), with the largest that was seen to arrive.

    >>> largest_that_arrives(lambda size: size <= 1400, 9000, until=time.monotonic() + 60)
    1400
    """
    low, high = MIN_PACKET_BYTES - 1, most
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while high - low > 1 and time.monotonic() < until:
            sizes = sorted({low + max((high - low) * part // (AT_ONCE + 1), 1) for part in range(1, AT_ONCE + 1)})
            seen = dict(zip(sizes, pool.map(arrives, sizes), strict=True))
            good = [size for size, arrived in seen.items() if arrived]
            if not good and low < MIN_PACKET_BYTES:
                return None
            low = max(good, default=low)
            high = min((size for size, arrived in seen.items() if not arrived and size > low), default=high)
    return low if low >= MIN_PACKET_BYTES else None


# Address and port -> how a plain TCP connection ends, and who listens.
#
# Connects by itself, because torch's messages about addresses cannot be trusted: its socket.cpp prints the address of a pointer
# where a name cannot be found.


NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL})
TCP_INFO = "BBBBBBBB24I"
"""The head of Linux's ``struct tcp_info`` (linux/tcp.h): eight bytes, then 24 counters of 32 bits."""
SND_MSS, PMTU, RTT, TOTAL_RETRANS = 2, 13, 15, 23
DATA_SEGMENTS_OUT, DSACK_DUPS = 156, 216
"""Where tcpi_data_segs_out and tcpi_dsack_dups lie, in bytes; kernels before 4.6 and 4.19 end before them."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What the kernel knows about a connection: largest segment, path MTU, segments sent again that had been lost, segments sent,
    and the smoothed round trip in seconds."""

    mss: int
    pmtu: int
    retransmits: int
    segments: int
    rtt: float | None


def connect(address: str, port: int, *, timeout: float) -> "socket.socket | ConnectOutcome":
    """An open connection, or why there is none. The name is looked up first; a lookup is not bounded by ``timeout``."""
    try:
        return socket.create_connection((address, port), timeout=timeout)
    except OSError as error:
        return outcome_of(error)
    except UnicodeError:
        return ConnectOutcome.NO_NAME  # an empty or too long label, or bytes that are no text: it is not even asked for


def sent_from(address: str, port: int) -> str | None:
    """The address of this host that the kernel sends from to another; None where it has no route there. Connects a UDP socket,
    which sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sender:
            sender.connect(target)
            return str(sender.getsockname()[0]).partition("%")[0]
    except (OSError, UnicodeError):
        return None


def outcome_of(error: OSError) -> ConnectOutcome:
    """The kind of a failed connection.

    >>> outcome_of(ConnectionRefusedError(errno.ECONNREFUSED, "")), outcome_of(OSError(errno.EHOSTUNREACH, ""))
    (<ConnectOutcome.REFUSED: 'refused'>, <ConnectOutcome.NO_ROUTE: 'no route'>)
    """
    if isinstance(error, socket.gaierror):
        return ConnectOutcome.NO_NAME
    if isinstance(error, TimeoutError):
        return ConnectOutcome.TIMED_OUT
    return ConnectOutcome.NO_ROUTE if error.errno in NO_ROUTE else ConnectOutcome.REFUSED


def wire_of(connection: socket.socket) -> Wire | None:
    """The kernel's figures for a connection, None where it gives none."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
    except OSError:
        return None
    return parse_tcp_info(raw)


def parse_tcp_info(raw: bytes) -> Wire | None:
    """Linux's ``struct tcp_info``, None where it is too short. What was sent again and had arrived the first time was not lost: a
    host with more processes than processors confirms late.

    >>> parse_tcp_info(struct.pack("100xI52xI56xI", 9, 700, 8)).retransmits
    1
    """
    size = struct.calcsize(TCP_INFO)
    if len(raw) < size:
        return None
    fields = struct.unpack(TCP_INFO, raw[:size])[8:]
    return Wire(
        mss=fields[SND_MSS],
        pmtu=fields[PMTU],
        retransmits=max(fields[TOTAL_RETRANS] - _counter(raw, DSACK_DUPS), 0),
        segments=_counter(raw, DATA_SEGMENTS_OUT),
        rtt=fields[RTT] / 1e6,
    )


def _counter(raw: bytes, place: int) -> int:
    return int.from_bytes(raw[place : place + 4], sys.byteorder) if len(raw) >= place + 4 else 0


MAGIC = b"DSDC1"
CALL = struct.Struct("!5s16sIIQ")
ANSWER = struct.Struct("!5s16sI46s")
PIECE = 1 << 16
LARGE, SMALL = 1 << 20, 1 << 14
CONNECT_TIMEOUT_SECONDS = 3.0
"""Seconds for a connection, for an answer, and for each next piece of a large message."""
ALL_PAIRS = 64
"""Up to so many ranks every pair is tried."""
GREETING = 1.0
"""Seconds in which a caller must send its request; a caller that does not is no rank of this test."""
SEGMENT = 0.8
"""Seconds in which segments of one size must arrive: time to be sent again twice."""
CALLERS, CALLED = 8, 512


class Callers:
    """Those who are being listened to, so many at most. Of more the one who has said nothing for longest has to go, so that whoever
    calls and says nothing takes nobody's place."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def enter(self, caller: socket.socket) -> socket.socket:
        """One more."""
        with self._lock:
            if len(self._strangers) >= self._most:
                oldest = self._strangers.pop(next(iter(self._strangers)))
                # its thread closes it: another connection may have its number by then
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[id(caller)] = caller
        return caller

    def leave(self, caller: socket.socket) -> None:
        """It has been heard, or is gone."""
        with self._lock:
            self._strangers.pop(id(caller), None)


class MeshListener:
    """Answers callers on one address. Connections wait in the kernel until ``answer`` is given the token."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.address, self.port = address, int(self._socket.getsockname()[1])
        self._strangers, self._slots = Callers(CALLED), threading.Semaphore(CALLED)

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
            self._strangers.enter(caller)
            with contextlib.suppress(RuntimeError):  # there is no room for a thread
                threading.Thread(target=self._attend, args=(caller, digest, rank), daemon=True).start()

    def _attend(self, caller: socket.socket, digest: bytes, rank: int) -> None:
        # a caller that breaks off, or is no rank of this test, gets no answer
        with contextlib.suppress(OSError), caller:
            try:
                caller.settimeout(GREETING)
                magic, token, _, _, size = CALL.unpack(_exactly(caller, CALL.size))
            finally:
                self._strangers.leave(caller)
            if magic == MAGIC and token == digest and size <= LARGE and self._slots.acquire(blocking=False):
                try:
                    _converse(caller, digest, rank, size)
                finally:
                    self._slots.release()


def _converse(caller: socket.socket, digest: bytes, rank: int, size: int) -> None:
    """Answer one caller that is known. Raises OSError where it breaks off."""
    caller.settimeout(2 * CONNECT_TIMEOUT_SECONDS)
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
        return reach(
            me, other, token, size=_size(me, other), timeout=min(CONNECT_TIMEOUT_SECONDS, max(seconds / 3, 0.5))
        )

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
