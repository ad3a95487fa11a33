"""The connections that every rank tried over plain TCP -> findings about the hosts and links. Judges, never looks."""

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.mesh.matrix import HostPair, Mesh
from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import Step, step

LOSS = 0.01
"""The share of segments sent again from which a link counts as lossy; healthy links in a data centre lose fewer than 1 in
10,000."""
ENOUGH = 100
DROPPED = frozenset({ConnectOutcome.TIMED_OUT, ConnectOutcome.NO_ROUTE, ConnectOutcome.REFUSED})
RANGE = step("sysctl net.ipv4.ip_local_port_range")
NAME_IT = step("export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}")


def mesh_loopback_address(mesh: Mesh) -> Iterator[Finding]:
    """A rank offers an address that means "this host" on every host.

    Its host's own name resolves to 127.x (Debian writes 127.0.1.1 into /etc/hosts).

    Why it matters: gloo listens on that address and gives it to the others, which then connect to themselves. Where
    gloo happens to open all connections from that host (it does so from the higher address), it works; with another
    host or with NCCL it does not.

    How to fix it: name the interface on that host, or give its name its real address in /etc/hosts.

        $ export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

    Since: 0.1
    """
    hosts = set(mesh.first_of)
    for host, claim in sorted(mesh.first_of.items()) if len(hosts) > 1 else ():
        if not is_loopback(claim.address):
            continue
        called = any(mesh.opens(other, host) for other in hosts - {host})
        yield (Finding.error if called else Finding.warning)(
            "mesh-loopback-address",
            f"rank {claim.rank} ({host}) would listen on {claim.address}, which no other host can reach",
            evidence=_why(claim),
            fix="name the interface on that host, or give its name its real address in /etc/hosts",
            steps=(_name_it(claim),),
        )


def mesh_wrong_interface(mesh: Mesh) -> Iterator[Finding]:
    """The interface that a rank would use is not the one that the others can reach.

    Hosts have several: docker0, a management network, a VPN. gloo uses the one that the host's name resolves to, NCCL
    the first that looks good.

    Why it matters: the address that reaches the master was reached, the chosen one was not, so the first collective
    hangs.

    How to fix it: name the interface that reaches the others.

        $ export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

    Since: 0.1
    """
    wrong = _targets(mesh, (reach for reach in mesh.reaches if reach.via_other))
    for host, (claim, sources) in wrong.items():
        routed = claim.local.routed.name if claim.local and claim.local.routed else "the other one"
        yield Finding.error(
            "mesh-wrong-interface",
            f"rank {claim.rank} ({host}) would use {claim.interface} {claim.address}, which {sources} cannot reach; "
            f"{claim.other} on {routed} they can",
            evidence=_why(claim),
            fix="name the interface that reaches the others",
            steps=(_name_it(claim),),
        )


def mesh_only_master_port(mesh: Mesh) -> Iterator[Finding]:
    """Two hosts reach each other on the master's port, and on no other.

    Why it matters: torch, gloo and NCCL use ports that the kernel picks (net.ipv4.ip_local_port_range). With only
    MASTER_PORT open in the firewall the rendezvous works, and the first collective hangs.

    How to fix it: open the range of ephemeral ports between the hosts, in both directions.

        $ sysctl net.ipv4.ip_local_port_range

    Since: 0.1
    """
    for first, second, ways in _cut_pairs(mesh):
        if mesh.master in {first, second} and set(ways) <= DROPPED:
            yield Finding.error(
                "mesh-only-master-port",
                f"{first} and {second} reach each other on the master's port only: connections to other ports "
                f"{_phrase(ways)}",
                evidence=_examples(mesh, first, second),
                fix="open the range of ephemeral ports between the hosts, in both directions",
                steps=(RANGE,),
            )


def mesh_one_way(mesh: Mesh) -> Iterator[Finding]:
    """One host can open connections to another, which cannot open any back.

    A firewall on one side, or a network that translates addresses (NAT).

    Why it matters: NCCL opens connections both ways; gloo from the higher address to the lower, so with gloo one way
    may be enough. It is a warning then, and the next set of hosts may hang.

    How to fix it: let the host that is not reached accept connections on all ephemeral ports.

        $ sysctl net.ipv4.ip_local_port_range

    Since: 0.1
    """
    for first, second in _pairs(mesh):
        for source, target in ((first, second), (second, first)):
            way = mesh.way((source, target))
            back = mesh.outcomes.get((target, source), Counter())
            if way in DROPPED and ConnectOutcome.REACHED in back and not _loopback(mesh, first, second):
                yield (Finding.error if mesh.opens(source, target) else Finding.warning)(
                    "mesh-one-way",
                    f"{source} cannot connect to {target} ({way.value}), while {target} can connect to {source}",
                    evidence=_examples(mesh, source, target),
                    fix=f"let {target} accept connections from {source} on all ephemeral ports",
                    steps=(RANGE,),
                )


def mesh_unreached(mesh: Mesh) -> Iterator[Finding]:
    """Two hosts whose ranks both came to the rendezvous do not reach each other.

    Why it matters: both reach the master's host, so a switch, a security group or a route between the two is at fault;
    every collective over both of them hangs.

    How to fix it: look at the route, the switch and the firewall between these two.

    Since: 0.1
    """
    for first, second, ways in _cut_pairs(mesh):
        if mesh.master not in {first, second}:
            yield Finding.error(
                "mesh-unreached",
                f"{first} and {second} do not reach each other: {_phrase(ways)}; both reach {mesh.master}",
                evidence=_examples(mesh, first, second),
                fix="look at the route, the switch and the firewall between these two",
            )


def mesh_rank_unreached(mesh: Mesh) -> Iterator[Finding]:
    """Single ranks are not reached on a host whose other ranks are.

    Why it matters: the process hangs or was stopped, or another program answers at its port; the others would wait for
    it.

    How to fix it: see on that host whether the process still runs, and what its state is.

    Since: 0.1
    """
    for target in sorted({reach.target for reach in mesh.reaches}):
        failed = [
            reach
            for reach in mesh.reaches
            if reach.target == target
            and reach.outcome not in {ConnectOutcome.REACHED, ConnectOutcome.STALLED}
            and not reach.via_other
        ]
        failed = [reach for reach in failed if mesh.way(mesh.hosts(reach)) is None or len(set(mesh.hosts(reach))) == 1]
        if failed and not _loopback(mesh, *mesh.hosts(failed[0])):
            yield Finding.error(
                "mesh-rank-unreached",
                f"{mesh.who(target)} is not reached by {len(failed)} of the others: {failed[0].outcome.value} at "
                f"{failed[0].address}",
                evidence=tuple(f"from {mesh.who(reach.source)}: {reach.outcome.value}" for reach in failed[:4]),
                fix="see on that host whether the process still runs, and what its state is",
            )


def mesh_mtu_hole(mesh: Mesh) -> Iterator[Finding]:
    """Connections open, and the first large message never arrives.

    An interface sends packets larger than something on the path lets through, and no device reports it: jumbo frames over
    a switch without them, or a container or tunnel whose MTU is larger than its host's.

    Why it matters: in training the rendezvous and small messages are well, and the first all_reduce hangs.

    How to fix it: give both hosts the MTU that the whole path has (1500 where nothing else is known).

        $ ping -M do -c 1 -s 1472 ADDRESS
        $ sudo ip link set dev INTERFACE mtu 1500

    Since: 0.1
    """
    seen: set[frozenset[str]] = set()
    for reach in mesh.reaches:
        pair = frozenset(mesh.hosts(reach))
        if reach.outcome is not ConnectOutcome.STALLED or pair in seen:
            continue
        seen.add(pair)
        source, target = mesh.hosts(reach)
        mtu = _mtu(mesh.by_rank[reach.source])
        size, name = (mtu or reach.pmtu or 1500) - 28, mesh.by_rank[reach.source].interface
        yield Finding.error(
            "mesh-mtu-hole",
            f"large messages from {source} to {target} never arrive, small ones do: an MTU on the path is too small",
            evidence=(
                f"{mesh.who(reach.source)} -> {mesh.who(reach.target)} at {reach.address}: the greeting arrived, then nothing of "
                f"1 MB; its interface has MTU {mtu}, the path is taken for {reach.pmtu}, segments of {reach.mss}, "
                f"{reach.retransmits} sent again",
            ),
            fix="give both hosts the MTU that the whole path has (1500 where nothing else is known)",
            steps=(
                step("ping -M do -c 1 -s {size} {address}", size=size, address=reach.address),
                step("sudo ip link set dev {interface} mtu 1500").filled({"interface": name} if name else {}),
            ),
        )


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
        left = {pair: counts for pair, counts in left.items() if pair not in pairs}


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
    lossy, tried = sorted(lossy), set(tried)
    if len(lossy) > 2 and 2 * len(lossy) > len(tried):
        hosts = {host for pair in tried for host in pair}
        if all(2 * len(_peers(host, lossy)) > len(_peers(host, tried)) for host in hosts):
            return f"the network between the {len(hosts)} hosts", lossy
    peers = {host: _peers(host, lossy) for pair in lossy for host in pair}
    first, *others = sorted(peers, key=lambda host: -len(peers[host]))
    at_one = len(peers[first]) > median(len(peers[host]) for host in others)
    if at_one and 2 * len(peers[first]) >= len(_peers(first, tried)):
        return f"{first}, with {len(peers[first])} other hosts,", [pair for pair in lossy if first in pair]
    return " -> ".join(lossy[0]), lossy[:1]


def _peers(host: str, pairs: Iterable[HostPair]) -> set[str]:
    return {other for pair in pairs if host in pair for other in pair} - {host}


def _pairs(mesh: Mesh) -> list[HostPair]:
    return sorted({(first, second) for first, second in mesh.outcomes if first < second})


def _cut_pairs(mesh: Mesh) -> Iterator[tuple[str, str, tuple[ConnectOutcome, ConnectOutcome]]]:
    """The hosts of which none reaches the other, and how the attempts ended."""
    for first, second in _pairs(mesh):
        there, back = mesh.way((first, second)), mesh.way((second, first))
        if there and back and not _loopback(mesh, first, second):
            yield first, second, (there, back)


def _targets(mesh: Mesh, reaches: Iterable[Reach]) -> dict[str, tuple[Claim, str]]:
    """By host: a rank that is the target, and the ranks that tried it."""
    sources: dict[str, tuple[Claim, list[int]]] = {}
    for reach in reaches:
        claim = mesh.by_rank[reach.target]
        sources.setdefault(claim.host, (claim, []))[1].append(reach.source)
    return {host: (claim, ", ".join(mesh.who(rank) for rank in ranks[:3])) for host, (claim, ranks) in sources.items()}


def _loopback(mesh: Mesh, *hosts: str) -> bool:
    return (
        any(claim.host in hosts and claim.address.startswith("127.") for claim in mesh.claims) and len(set(hosts)) > 1
    )


def _mtu(claim: Claim) -> int | None:
    interfaces = claim.local.interfaces if claim.local else ()
    return next((interface.mtu for interface in interfaces if interface.address == claim.address), None)


def _why(claim: Claim) -> tuple[str, ...]:
    chosen = claim.local.chosen if claim.local else None
    return (f"it takes {chosen.name} {chosen.address} because {chosen.because}",) if chosen else ()


def _name_it(claim: Claim) -> Step:
    """The step that names the interface by which a rank reaches the master."""
    routed = claim.local.routed if claim.local else None
    return NAME_IT.filled({"interface": routed.name} if routed else {})


def _phrase(ways: Iterable[ConnectOutcome]) -> str:
    return " and ".join(sorted({way.value for way in ways}))


def _examples(mesh: Mesh, *hosts: str) -> tuple[str, ...]:
    failed = [reach for reach in mesh.reaches if set(mesh.hosts(reach)) == set(hosts) and reach.outcome in DROPPED]
    return tuple(
        f"{mesh.who(reach.source)} -> {mesh.who(reach.target)} at {reach.address}: {reach.outcome.value}"
        for reach in failed[:4]
    )


CHECKS = (
    mesh_loopback_address,
    mesh_wrong_interface,
    mesh_only_master_port,
    mesh_one_way,
    mesh_unreached,
    mesh_rank_unreached,
    mesh_mtu_hole,
    mesh_lossy,
)
