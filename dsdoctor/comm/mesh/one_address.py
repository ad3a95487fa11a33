"""The addresses that several hosts offer and that do not lead to all of them. Judges no cause.

Several host names may stand for one network stack (containers with the host's network): each rank then answers at its own port.
"""

from collections.abc import Iterable

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.mesh.matrix import Mesh
from dsdoctor.comm.results import ConnectOutcome, Reach

ARRIVED = frozenset({ConnectOutcome.REACHED, ConnectOutcome.STALLED})
"""How an attempt ends that was answered by the very rank that was wanted."""


def shared_addresses(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The addresses that ranks of several hosts offer and at which one of those was not reached, with those hosts. A host that
    reaches another at the address that it has itself is on the same network stack."""
    offered: dict[str, set[str]] = {}
    for claim in mesh.claims:
        if claim.address and not is_loopback(claim.address):
            offered.setdefault(claim.address, set()).add(claim.host)
    tried: dict[str, list[Reach]] = {address: [] for address, hosts in offered.items() if len(hosts) > 1}
    for reach in (*mesh.reaches, *mesh.fallen) if tried else ():
        if (address := mesh.by_rank[reach.target].address) in tried:
            tried[address].append(reach)
    return {
        address: tuple(sorted(offered[address]))
        for address, reaches in tried.items()
        if _leads_astray(mesh, offered[address], reaches)
    }


def _leads_astray(mesh: Mesh, hosts: set[str], reaches: Iterable[Reach]) -> bool:
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
