"""MASTER_ADDR -> its addresses; an address -> how long the name server takes for its name. Bounded, and never an exception."""

import socket
import time

from dsdoctor.comm.local.interfaces import bounded

LOOKUP = 3.0
REVERSE = 10.0
"""Seconds at most for an address, and for a name."""


def addresses_of(master: str) -> tuple[str, ...]:
    """What the name is on this host, () where it is not found in time.

    >>> addresses_of("127.0.0.1")
    ('127.0.0.1',)
    """
    found = bounded(lambda: socket.getaddrinfo(master, None, type=socket.SOCK_STREAM), LOOKUP)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found or ()))


def reverse_lookup(address: str) -> float:
    """Seconds for the name of an address, found or not, as torch asks for it: an IPv4 one in IPv6's form."""
    began = time.monotonic()
    asked = address if ":" in address else f"::ffff:{address}"
    bounded(lambda: socket.getnameinfo((asked, 0), 0), REVERSE)
    return time.monotonic() - began
