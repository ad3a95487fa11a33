"""Address and port -> how a plain TCP connection ends, and who listens.

Connects by itself, because torch's messages about addresses cannot be trusted: its socket.cpp prints the address of a pointer
where a name cannot be found.
"""

import errno
import socket
import struct
import sys
from dataclasses import dataclass

from dsdoctor.comm.results import ConnectOutcome

NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL})
TCP_INFO = "BBBBBBBB24I"
"""The head of Linux's ``struct tcp_info`` (linux/tcp.h): eight bytes, then 24 counters of 32 bits."""
SND_MSS, PMTU, RTT, TOTAL_RETRANS = 2, 13, 15, 23
DATA_SEGMENTS_OUT, DSACK_DUPS = 156, 216
"""Where tcpi_data_segs_out and tcpi_dsack_dups lie, in bytes; kernels before 4.6 and 4.19 end before them."""


@dataclass(frozen=True, kw_only=True)
class ConnectResult:
    """How it ended, and the first text of a listener that sends something by itself (such as ssh)."""

    outcome: ConnectOutcome
    banner: str = ""


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


def ask_listener(address: str, port: int, *, timeout: float = 3.0, listen: float = 1.0) -> ConnectResult:
    """Connect, and wait ``listen`` seconds for what the other side sends first."""
    opened = connect(address, port, timeout=timeout)
    if isinstance(opened, ConnectOutcome):
        return ConnectResult(outcome=opened)
    with opened:
        opened.settimeout(listen)
        try:
            banner = opened.recv(80).decode("ascii", errors="replace").strip()
        except OSError:
            banner = ""
    return ConnectResult(outcome=ConnectOutcome.STRANGER if banner else ConnectOutcome.SILENT, banner=banner)


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
