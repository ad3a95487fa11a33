"""The directions between hosts in which nothing gets through, gathered by the host that they share. Judges no cause."""

import enum
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.mesh.matrix import HostPair, Mesh, peers_of
from dsdoctor.comm.mesh.one_address import shared_addresses
from dsdoctor.comm.results import ConnectOutcome

DROPPED = frozenset(
    {ConnectOutcome.TIMED_OUT, ConnectOutcome.NO_ROUTE, ConnectOutcome.UNREACHABLE, ConnectOutcome.REFUSED}
)


class Side(enum.Enum):
    """Which connections fail: those to a host, those from it, both; those between two hosts; or those of most hosts."""

    TO = "to"
    FROM = "from"
    BOTH = "both"
    TWO = "two"
    EVERYWHERE = "everywhere"


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """Directions that fail for one reason: ``host`` is the host that all share (of two: the first), ``peers`` the others."""

    side: Side
    host: str
    peers: tuple[str, ...]
    pairs: tuple[HostPair, ...]


def blocked(mesh: Mesh) -> Iterator[Blocked]:
    """Every direction in which all attempts failed, once, in groups, that of the host that explains most first. Not those to an
    address that is wrong by itself."""
    wrong = misplaced(mesh)
    tried = {pair for pair in mesh.outcomes if pair[0] != pair[1]}
    left = {pair for pair in tried if mesh.way(pair) in DROPPED and not wrong & {*pair}}
    if _is_everywhere(left, tried):
        hosts = sorted({host for pair in left for host in pair})
        yield Blocked(side=Side.EVERYWHERE, host=hosts[0], peers=tuple(hosts[1:]), pairs=tuple(sorted(left)))
        return
    tries = peers_of(tried)
    while left:
        group = _largest(left, tries)
        yield group
        left -= {*group.pairs}


def misplaced(mesh: Mesh) -> set[str]:
    """The hosts that are called at an address which does not lead there: the loopback, one that another host has too, or one
    beside which their other address answers."""
    hosts = {host for those in shared_addresses(mesh).values() for host in those}
    hosts |= {host for host, claim in mesh.first_of.items() if is_loopback(claim.address) and len(mesh.first_of) > 1}
    return hosts | {mesh.hosts(reach)[1] for reach in mesh.reaches if reach.via_other}


def _is_everywhere(left: set[HostPair], tried: set[HostPair]) -> bool:
    """Whether most directions fail, and each of at least three hosts with more than half of the others."""
    if 2 * len(left) <= len(tried):
        return False
    failed, tries = peers_of(left), peers_of(tried)
    return len(tries) > 2 and all(2 * len(failed.get(host, ())) > len(peers) for host, peers in tries.items())


def _largest(left: set[HostPair], tries: dict[str, set[str]]) -> Blocked:
    """The host and side that explains most of what is left, with at least two others and half of those that were tried; else
    the first two hosts. O(directions)."""
    to: dict[str, set[str]] = defaultdict(set)
    of: dict[str, set[str]] = defaultdict(set)
    for source, target in left:
        to[target].add(source)
        of[source].add(target)
    most: tuple[int, str, Side, set[str]] | None = None
    for host in sorted({*to, *of}):
        both = to[host] & of[host]
        for side, peers, count in ((Side.TO, to[host], 1), (Side.FROM, of[host], 1), (Side.BOTH, both, 2)):
            enough = len(peers) > 1 and 2 * len(peers) >= len(tries[host])
            if enough and (most is None or count * len(peers) > most[0]):
                most = (count * len(peers), host, side, peers)
    if most:
        _, host, side, peers = most
        there = {(peer, host) for peer in peers if side is not Side.FROM}
        back = {(host, peer) for peer in peers if side is not Side.TO}
        return Blocked(side=side, host=host, peers=tuple(sorted(peers)), pairs=tuple(sorted(there | back)))
    first, second = sorted(min(left, key=sorted))
    pairs = {(first, second), (second, first)} & left
    return Blocked(side=Side.TWO, host=first, peers=(second,), pairs=tuple(sorted(pairs)))
