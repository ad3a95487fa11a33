"""What became of the messages on open connections -> findings about MTUs and lossy links. Judges, never looks."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from statistics import median

from dsdoctor.comm.mesh.blocked_checks import hosts_in_words
from dsdoctor.comm.mesh.matrix import HostPair, Mesh, peers_of
from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Finding, Step, step

LOSS = 0.01
"""The share of segments sent again from which a link counts as lossy; healthy links in a data centre lose fewer than 1 in
10,000."""
ENOUGH = 100
ETHERNET = 1500


def mesh_mtu_hole(mesh: Mesh) -> Iterator[Finding]:
    """Connections open, and the first large message never arrives.

    An interface sends packets larger than something on the path lets through, and no device reports it: jumbo frames over
    a switch without them, a VPN, or a container or tunnel whose MTU is larger than its host's. The largest packet that does
    arrive is measured, with connections that send smaller and smaller segments.

    Why it matters: in training the rendezvous and small messages are well, and the first all_reduce hangs.

    How to fix it: give the interface of the host that is named the MTU that the path has, or have the path let larger
    packets through.

        $ ping -M do -c 1 -s 1472 ADDRESS
        $ sudo ip link set dev INTERFACE mtu 1500

    Since: 0.1
    """
    left: dict[HostPair, list[Reach]] = defaultdict(list)
    for reach in mesh.reaches:
        if reach.outcome is ConnectOutcome.STALLED:
            left[mesh.hosts(reach)].append(reach)
    tried = {pair for pair in mesh.outcomes if pair[0] != pair[1]}
    peers = peers_of(left)
    if _is_everywhere(left, tried):
        what = "large messages" if len(left) == len(tried) else "most large messages"
        stalled = [reach for those in left.values() for reach in those]
        yield _hole(mesh, f"{what} between {hosts_in_words(peers)}", "every host", stalled)
        return
    while left:
        first = next(iter(left))[0]
        host = max(peers, key=lambda name: (len(peers[name]), name == first))
        yield _hole_at(mesh, host, peers[host], [reach for pair in left if host in pair for reach in left[pair]])
        left = {pair: those for pair, those in left.items() if host not in pair}
        for other in peers.pop(host):
            peers.get(other, set()).discard(host)


def _hole_at(mesh: Mesh, host: str, others: set[str], stalled: list[Reach]) -> Finding:
    """The finding on the messages that stall to and from a host."""
    if len(others) > 1:
        what = f"large messages between {host} and each of {hosts_in_words(others)}"
        return _hole(mesh, what, host, stalled, at=host)
    source, target = mesh.hosts(_clearest(stalled))
    return _hole(mesh, f"large messages from {source} to {target}", "both hosts", stalled, at=host)


def _clearest(stalled: list[Reach]) -> Reach:
    """Of messages that stalled the one for which the smallest packet was measured; where none was, the first."""
    return min((reach for reach in stalled if reach.usable), key=lambda reach: reach.usable or 0, default=stalled[0])


def _hole(mesh: Mesh, what: str, whose: str, stalled: list[Reach], *, at: str = "") -> Finding:
    """The finding on messages that stall; ``at``: the host whose MTU is to be set, by default that of the clearest."""
    reach = _clearest(stalled)
    usable, source = reach.usable or None, mesh.hosts(reach)[0]
    mtu = _mtu(mesh.by_rank[reach.source])
    arrives = f": packets of at most {usable} bytes arrive" if usable else ": an MTU on the path is too small"
    return Finding.error(
        "mesh-mtu-hole",
        f"{what} never arrive, small ones do{arrives}"
        + (f", and the interface of {source} sends {mtu}" if usable and mtu else ""),
        evidence=(
            f"{mesh.who(reach.source)} -> {mesh.who(reach.target)} at {reach.address}: the greeting arrived, then nothing of "
            f"1 MB; its interface has MTU {mtu}, the path is taken for {reach.pmtu}, segments of {reach.mss}, "
            f"{reach.retransmits} sent again",
        ),
        fix=f"have the path let larger packets through, or give {whose} its MTU",
        steps=_steps(mesh, mesh.first_of[at or source], reach, usable),
    )


def _steps(mesh: Mesh, claim: Claim, reach: Reach, usable: int | None) -> tuple[Step, ...]:
    """What shows the size that passes, and what sets it on the host of ``claim``."""
    mtu, headers = _mtu(mesh.by_rank[reach.source]) or reach.pmtu or ETHERNET, 48 if ":" in reach.address else 28
    ping = step("ping -M do -c 1 -s {size} {address}", size=(usable or mtu) - headers, address=reach.address)
    if usable is None and mtu <= ETHERNET:
        return (ping,)
    name = {"interface": claim.interface} if claim.interface else {}
    return ping, step("sudo ip link set dev {interface} mtu {mtu}").filled({**name, "mtu": str(usable or ETHERNET)})


def _mtu(claim: Claim) -> int | None:
    interfaces = claim.local.interfaces if claim.local else ()
    return next((interface.mtu for interface in interfaces if interface.address == claim.address), None)


def mesh_lossy(mesh: Mesh) -> Iterator[Finding]:
    """Packets between two hosts are lost and sent again.

    A bad cable or transceiver, a full switch, or a duplex mismatch.

    Why it matters: TCP hides it and becomes slow; a collective is as slow as its slowest pair.

    How to fix it: look at the counters of errors and drops on both ends and on the switch between them.

        $ ip -s link
        $ ethtool -S INTERFACE | grep -E 'err|drop|crc'

    Since: 0.1
    """
    tried = {pair: counts for pair, counts in _sent_again(mesh).items() if counts[1] >= ENOUGH}
    left = {pair: counts for pair, counts in tried.items() if counts[0] / counts[1] >= LOSS}
    while left:
        where, pairs = _most_common_place(left, tried)
        again, segments = (sum(left[pair][count] for pair in pairs) for count in (0, 1))
        yield Finding.warning(
            "mesh-lossy",
            f"{where} loses packets: {again} of {segments} segments were sent again ({again / segments:.1%})",
            evidence=tuple(f"{a} -> {b}: {left[a, b][0]} of {left[a, b][1]}" for a, b in pairs[:4] if len(pairs) > 1),
            fix="look at the counters of errors and drops on both ends and on the switch between",
            steps=(step("ip -s link"), step("ethtool -S {interface} | grep -E 'err|drop|crc'")),
        )
        explained = set(pairs)
        left = {pair: counts for pair, counts in left.items() if pair not in explained}


def _sent_again(mesh: Mesh) -> dict[HostPair, tuple[int, int]]:
    """From host to host: the segments that were sent again, and all."""
    found: dict[HostPair, tuple[int, int]] = {}
    for reach in mesh.reaches:
        pair = mesh.hosts(reach)
        if pair[0] != pair[1]:
            again, segments = found.get(pair, (0, 0))
            found[pair] = (again + reach.retransmits, segments + reach.segments)
    return found


def _most_common_place(lossy: Iterable[HostPair], tried: Iterable[HostPair]) -> tuple[str, list[HostPair]]:
    """Where packets are lost, and the lossy pairs that this explains: everywhere, at one host, else between the first two."""
    lossy, tried, peers = sorted(lossy), set(tried), peers_of(lossy)
    if _is_everywhere(lossy, tried):
        return f"the network between the {len(peers)} hosts", lossy
    first, *others = sorted(peers, key=lambda host: -len(peers[host]))
    at_one = len(peers[first]) > median(len(peers[host]) for host in others)
    if at_one and 2 * len(peers[first]) >= len(peers_of(pair for pair in tried if first in pair)[first]):
        return f"{first}, with {len(peers[first])} other hosts,", [pair for pair in lossy if first in pair]
    return " -> ".join(lossy[0]), lossy[:1]


def _is_everywhere(bad: Collection[HostPair], tried: Collection[HostPair]) -> bool:
    """Whether most directions are bad, and each host has bad ones with more than half of its others."""
    if len(bad) <= 2 or 2 * len(bad) <= len(tried):
        return False
    peers, tries = peers_of(bad), peers_of(tried)
    return all(2 * len(peers.get(host, ())) > len(others) for host, others in tries.items())


CHECKS = (mesh_mtu_hole, mesh_lossy)
