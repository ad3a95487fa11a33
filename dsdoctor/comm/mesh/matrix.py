"""The directions between hosts in which nothing gets through, gathered by the host that they share. Judges no cause."""

import enum
import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach

# The connections between all ranks, arranged by hosts. Data only.


HostPair = tuple[str, str]


@dataclass(frozen=True)
class ConnectionMatrix:
    """Which ranks are there and which reached which. ``master`` is the host of rank 0; ``before`` are the attempts of an earlier
    mesh of the same ranks, ``fallen`` those to ranks that do not answer any more."""

    claims: tuple[Claim, ...]
    reaches: tuple[Reach, ...]
    before: tuple[Reach, ...] = ()
    fallen: tuple[Reach, ...] = ()

    @cached_property
    def by_rank(self) -> dict[int, Claim]:
        """The claim of each rank."""
        return {claim.rank: claim for claim in self.claims}

    def opens(self, source: str, target: str) -> bool:
        """Whether the backend opens connections from one host to another: NCCL both ways, gloo (tried with torch 2.13) from the
        higher address to the lower."""
        mine, theirs = self.first_of[source], self.first_of[target]
        return mine.backend != "gloo" or _number(mine.address) >= _number(theirs.address)

    @cached_property
    def first_of(self) -> dict[str, Claim]:
        """One rank of each host; the other ranks there have the same address."""
        return {claim.host: claim for claim in reversed(self.claims)}

    @cached_property
    def worked(self) -> set[HostPair]:
        """The directions between hosts that an earlier mesh found open."""
        return {self.hosts(reach) for reach in self.before if reach.outcome is ConnectOutcome.REACHED}

    @property
    def master(self) -> str:
        """The host of rank 0."""
        return self.by_rank[0].host if 0 in self.by_rank else ""

    @cached_property
    def outcomes(self) -> dict[HostPair, Counter[ConnectOutcome]]:
        """How the attempts from each host to each other ended."""
        found: dict[HostPair, Counter[ConnectOutcome]] = defaultdict(Counter)
        for reach in self.reaches:
            found[self.hosts(reach)][reach.outcome] += 1
        return found

    def hosts(self, reach: Reach) -> HostPair:
        """From which host to which."""
        return self.by_rank[reach.source].host, self.by_rank[reach.target].host

    def way(self, pair: HostPair) -> ConnectOutcome | None:
        """How *all* attempts from a host to another failed; None where an attempt got through, or none was made."""
        seen = self.outcomes.get(pair, Counter())
        if not seen or ConnectOutcome.REACHED in seen or ConnectOutcome.STALLED in seen:
            return None
        return seen.most_common(1)[0][0]

    def who(self, rank: int) -> str:
        """A rank with its host."""
        return f"rank {rank} ({self.by_rank[rank].host})"


def peers_of(pairs: Iterable[HostPair]) -> dict[str, set[str]]:
    """By host: the others with which it is in a pair."""
    peers: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        peers[one].add(other)
        peers[other].add(one)
    return peers


def _number(address: str) -> tuple[int, bytes]:
    """Addresses in the order in which gloo compares them."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return 0, b""
    return known.version, known.packed


# The addresses that several hosts offer and that do not lead to all of them. Judges no cause.
#
# Several host names may stand for one network stack (containers with the host's network): each rank then answers at its own port.


ARRIVED = frozenset({ConnectOutcome.REACHED, ConnectOutcome.STALLED})
"""How an attempt ends that was answered by the very rank that was wanted."""


def shared_addresses(mesh: ConnectionMatrix) -> dict[str, tuple[str, ...]]:
    """The addresses that ranks offer, which several hosts have, and at which one of those was not reached, with those hosts. A
    host that reaches another at the address that it has itself is on the same network stack. One that a host has beside the one
    that it offers, as of a bridge of containers, is the same everywhere: no fault where the other address of the rank answers."""
    offered: dict[str, set[str]] = {}
    for claim in mesh.claims:
        if claim.address and not is_loopback(claim.address):
            offered.setdefault(claim.address, set()).add(claim.host)
    beside = {mesh.by_rank[reach.target].address for reach in mesh.reaches if reach.via_other}
    for host, claim in mesh.first_of.items():
        for interface in claim.local.interfaces if claim.local else ():
            if interface.address in offered and interface.address not in beside:
                offered[interface.address].add(host)
    tried: dict[str, list[Reach]] = {address: [] for address, hosts in offered.items() if len(hosts) > 1}
    for reach in (*mesh.reaches, *mesh.fallen) if tried else ():
        if (address := mesh.by_rank[reach.target].address) in tried:
            tried[address].append(reach)
    return {
        address: tuple(sorted(offered[address]))
        for address, reaches in tried.items()
        if _is_misrouted(mesh, offered[address], reaches)
    }


def _is_misrouted(mesh: ConnectionMatrix, hosts: set[str], reaches: Iterable[Reach]) -> bool:
    """Whether an attempt to an address failed, among those that tell whether its hosts are one network stack."""
    among, from_others, fallen = [], [], []
    gone = {reach.target for reach in mesh.fallen}
    for reach in reaches:
        source, target = mesh.hosts(reach)
        arrived = reach.outcome in ARRIVED
        if source == target:
            continue
        if reach.target in gone and not arrived:
            fallen.append(arrived)
        elif source in hosts:
            among.append((frozenset((source, target)), arrived))
        else:
            from_others.append(arrived)
    joined = _groups(hosts, (pair for pair, arrived in among if arrived))
    if any(not arrived and joined[min(pair)] != joined[max(pair)] for pair, arrived in among):
        return True
    one_stack = len({*joined.values()}) < len(hosts)
    # whoever does not answer on a network stack that is known to be one has ended, or hangs
    return not one_stack and (not all(from_others) or bool(fallen))


def _groups(hosts: Iterable[str], pairs: Iterable[frozenset[str]]) -> dict[str, str]:
    """By host: the first of the hosts with which it is joined by pairs."""
    first = {host: host for host in hosts}

    def root(host: str) -> str:
        while first[host] != host:
            first[host] = first[first[host]]
            host = first[host]
        return host

    for pair in pairs:
        one, other = sorted(map(root, pair))
        first[other] = one
    return {host: root(host) for host in first}


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


def blocked(mesh: ConnectionMatrix) -> Iterator[Blocked]:
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


def misplaced(mesh: ConnectionMatrix) -> set[str]:
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
