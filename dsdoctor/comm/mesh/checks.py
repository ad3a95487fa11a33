"""The connections that every rank tried over plain TCP -> findings about the hosts and links. Judges, never looks."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.mesh.matrix import (
    ARRIVED,
    Blocked,
    ConnectionMatrix,
    HostPair,
    Side,
    blocked,
    misplaced,
    peers_of,
    shared_addresses,
)
from dsdoctor.comm.models import Claim, Interface, by_rank, named
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.ranks.nodelist import in_words
from dsdoctor.rules import book

MAX_NAMED = 4


def mesh_only_master_port(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """Hosts reach the host of rank 0 on the master's port, and on no other."""
    return (_of_the_master(case) for case in _cases(mesh) if case.only_master_port)


def mesh_one_way(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """A host cannot open connections to another, or to any, which can open some to it."""
    return (_of_one_way(case) for case in _cases(mesh) if not case.only_master_port and not case.both_ways)


def mesh_unreached(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """Hosts whose ranks all came to the rendezvous do not reach each other."""
    return (_of_both_ways(case) for case in _cases(mesh) if not case.only_master_port and case.both_ways)


@dataclass(frozen=True, kw_only=True)
class Detour:
    """A way that is not the rank's own, in words, and the address to which it leads."""

    said: str
    address: str


def detour(claim: Claim, reach: Reach) -> Interface | None:
    """The interface by which a rank's kernel sent, where that is not the rank's own; None where it is, or is not known."""
    known = {one.address: one for one in claim.local.interfaces} if claim.local else {}
    way = known.get(reach.sent_from)
    return way if way and way.name != claim.interface else None


def _routed(claim: Claim) -> str:
    return claim.local.routed.name if claim.local and claim.local.routed else ""


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A group of directions with what else is known of it."""

    mesh: ConnectionMatrix
    group: Blocked
    failed: tuple[Reach, ...]

    @property
    def both_ways(self) -> bool:
        return bool({(b, a) for a, b in self.group.pairs} & {*self.group.pairs})

    @property
    def only_master_port(self) -> bool:
        """Whether what fails leads to the master's host, whose port all ranks reached, or is between it and one other."""
        group, master = self.group, self.mesh.master
        if self.limited or self.translated or self.detours:
            return False
        if group.side is Side.EVERYWHERE:
            return True
        leads_there = any(target == master for _, target in group.pairs)
        return leads_there and group.side is not Side.FROM and all(master in pair for pair in group.pairs)

    @property
    def limited(self) -> bool:
        """Whether all of it worked before."""
        return set(self.group.pairs) <= self.mesh.worked

    @property
    def translated(self) -> Reach | None:
        """A connection of the host that is not reached, which the others see come from another address than it left from."""
        hosts = {target for _, target in self.group.pairs}
        return next(
            (reach for reach in self.mesh.reaches if reach.seen_as and self.mesh.hosts(reach)[0] in hosts), None
        )

    @cached_property
    def detours(self) -> dict[str, Detour]:
        """By host: the interface by which its kernel sends to one that it does not reach, where it is not the rank's own. What did
        arrive on the way back tells it too: the answers to what fails take the same way, and a kernel drops what comes by another
        way than it would send (rp_filter)."""
        back = {(target, source) for source, target in self.group.pairs}
        arrived = [reach for reach in self.mesh.reaches if reach.outcome in ARRIVED and self.mesh.hosts(reach) in back]
        ways = [(reach, False) for reach in self.failed] + [(reach, True) for reach in arrived]
        found: dict[str, Detour] = {}
        for reach, is_answer in ways:
            claim = self.mesh.by_rank[reach.source]
            if (way := detour(claim, reach)) and (is_answer or way.name != _routed(claim)):
                link = "" if way.up else ", which has no link"
                said = (
                    f"{claim.host} sends to {reach.address} by {way.name} {way.address}{link}, not by {claim.interface}"
                )
                found.setdefault(claim.host, Detour(said=said, address=reach.address))
        return found

    @property
    def outcomes(self) -> str:
        """How the attempts ended."""
        return " and ".join(sorted({outcome_words(reach.outcome) for reach in self.failed}))

    @property
    def address(self) -> str:
        """Where to look which way the kernel takes: that of a way that is not the rank's own, if there is one."""
        detour = next(iter(self.detours.values()), None)
        return detour.address if detour else self.failed[0].address

    @property
    def peers(self) -> str:
        return hosts_in_words(self.group.peers)

    @property
    def grave(self) -> bool:
        """Whether the backend opens a connection in one of the directions."""
        return any(self.mesh.opens(*pair) for pair in self.group.pairs)

    @property
    def evidence(self) -> tuple[str, ...]:
        return tuple(
            f"{self.mesh.who(reach.source)} -> {self.mesh.who(reach.target)} at {reach.address}: {reach.outcome.value}"
            for reach in self.failed[:MAX_NAMED]
        )


def _cases(mesh: ConnectionMatrix) -> Iterator[_Case]:
    for group in blocked(mesh):
        pairs = set(group.pairs)
        failed = tuple(reach for reach in mesh.reaches if mesh.hosts(reach) in pairs)
        yield _Case(mesh=mesh, group=group, failed=failed)


def _of_the_master(case: _Case) -> Finding:
    master, group = case.mesh.master, case.group
    severity = Severity.ERROR if case.grave else Severity.WARNING
    if group.side is Side.EVERYWHERE:
        every = len(group.pairs) == sum(one != other for one, other in case.mesh.outcomes)
        return book.finding(
            "mesh-only-master-port",
            severity,
            case="everywhere" if every else "nearly-everywhere",
            evidence=case.evidence,
            hosts=hosts_in_words((group.host, *group.peers)),
            master=master,
            outcomes=case.outcomes,
        )
    return book.finding(
        "mesh-only-master-port",
        severity,
        case="" if case.both_ways else "one-way",
        evidence=case.evidence,
        others=hosts_in_words(host for host in (group.host, *group.peers) if host != master),
        master=master,
        outcomes=case.outcomes,
    )


def _of_one_way(case: _Case) -> Finding:
    group, (source, target) = case.group, case.group.pairs[0]
    if group.side in {Side.TO, Side.FROM}:
        source, target = (case.peers, group.host) if group.side is Side.TO else (group.host, case.peers)
    nat, detour = case.translated, next(iter(case.detours.values()), None)
    host = case.mesh.hosts(nat)[0] if nat else next(iter(case.detours), None)
    return book.finding(
        "mesh-one-way",
        Severity.ERROR if case.grave else Severity.WARNING,
        case="limited"
        if case.limited
        else "nat"
        if nat
        else "detour"
        if detour
        else "from-one-host"
        if group.side is Side.FROM
        else "",
        evidence=(*(way.said for way in tuple(case.detours.values())[1:]), *case.evidence),
        sources=source,
        targets=target,
        outcomes=case.outcomes,
        host=host,
        address=case.mesh.by_rank[nat.source].address if nat and not case.limited else case.address,
        seen=nat.seen_as if nat else None,
        detour=detour.said if detour else None,
    )


def _of_both_ways(case: _Case) -> Finding:
    group, master = case.group, case.mesh.master
    sender, detour = next(iter(case.detours.items()), (None, None))
    reaches = master not in {group.host, *group.peers}
    return book.finding(
        "mesh-unreached",
        Severity.ERROR,
        case="limited"
        if case.limited
        else "detour"
        if detour
        else ("pair-reaches-master" if reaches else "pair")
        if group.side is Side.TWO
        else "everywhere"
        if group.side is Side.EVERYWHERE
        else "",
        evidence=(*(way.said for way in tuple(case.detours.values())[1:]), *case.evidence),
        host=group.host,
        peers=case.peers,
        outcomes=case.outcomes,
        master=master,
        targets=hosts_in_words({target for _, target in group.pairs}),
        sender=sender,
        detour=detour.said if detour else None,
        address=case.address,
    )


def outcome_words(outcome: ConnectOutcome) -> str:
    """How attempts ended, in words."""
    return book.phrase("comm", "port-unreachable") if outcome is ConnectOutcome.UNREACHABLE else outcome.value


def hosts_in_words(hosts: Iterable[str]) -> str:
    """A few hosts one by one, many in short.

    >>> hosts_in_words(["n1"]), hosts_in_words(["n1", "n2", "n3"]), hosts_in_words(f"n{number}" for number in range(9))
    ('n1', 'n1, n2 and n3', 'n[0-8]')
    """
    names = sorted(hosts)
    if len(names) > MAX_NAMED:
        return in_words(names)
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


LOSSY_SHARE = 0.01
"""The share of segments sent again from which a link counts as lossy; healthy links in a data centre lose fewer than 1 in
10,000."""
MIN_SEGMENTS = 100
ETHERNET = 1500


def mesh_mtu_hole(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """Connections open, and the first large message never arrives."""
    left: dict[HostPair, list[Reach]] = defaultdict(list)
    for reach in mesh.reaches:
        if reach.outcome is ConnectOutcome.STALLED:
            left[mesh.hosts(reach)].append(reach)
    tried = {pair for pair in mesh.outcomes if pair[0] != pair[1]}
    peers = peers_of(left)
    if _is_everywhere(left, tried):
        messages = "large messages" if len(left) == len(tried) else "most large messages"
        stalled = [reach for those in left.values() for reach in those]
        yield _hole(mesh, f"{messages} between {hosts_in_words(peers)}", "every host", stalled)
        return
    while left:
        first = next(iter(left))[0]
        host = max(peers, key=lambda name: (len(peers[name]), name == first))
        yield _hole_at(mesh, host, peers[host], [reach for pair in left if host in pair for reach in left[pair]])
        left = {pair: those for pair, those in left.items() if host not in pair}
        for other in peers.pop(host):
            peers.get(other, set()).discard(host)


def _hole_at(mesh: ConnectionMatrix, host: str, others: set[str], stalled: list[Reach]) -> Finding:
    """The finding on the messages that stall to and from a host."""
    if len(others) > 1:
        messages = f"large messages between {host} and each of {hosts_in_words(others)}"
        return _hole(mesh, messages, host, stalled, at=host)
    source, target = mesh.hosts(_clearest(stalled))
    return _hole(mesh, f"large messages from {source} to {target}", "both hosts", stalled, at=host)


def _clearest(stalled: list[Reach]) -> Reach:
    """Of messages that stalled the one for which the smallest packet was measured; where none was, the first."""
    return min((reach for reach in stalled if reach.usable), key=lambda reach: reach.usable or 0, default=stalled[0])


def _hole(mesh: ConnectionMatrix, messages: str, hosts: str, stalled: list[Reach], *, at: str = "") -> Finding:
    """The finding on messages that stall; ``at``: the host whose MTU is to be set, by default that of the clearest."""
    reach = _clearest(stalled)
    usable, source = reach.usable or None, mesh.hosts(reach)[0]
    mtu = _mtu(mesh.by_rank[reach.source])
    return book.finding(
        "mesh-mtu-hole",
        Severity.ERROR,
        case=("larger-mtu" if mtu else "measured") if usable else "",
        evidence=(
            f"{mesh.who(reach.source)} -> {mesh.who(reach.target)} at {reach.address}: the greeting arrived, then nothing of "
            f"1 MB; its interface has MTU {mtu}, the path is taken for {reach.pmtu}, segments of {reach.mss}, "
            f"{reach.retransmits} sent again",
        ),
        steps=_steps(mesh, mesh.first_of[at or source], reach, usable),
        messages=messages,
        bytes=usable,
        source=source,
        mtu=mtu,
        hosts=hosts,
    )


def _steps(mesh: ConnectionMatrix, claim: Claim, reach: Reach, usable: int | None) -> tuple[Step, ...]:
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


def mesh_lossy(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """Packets between two hosts are lost and sent again."""
    tried = {pair: counts for pair, counts in _sent_again(mesh).items() if counts[1] >= MIN_SEGMENTS}
    left = {pair: counts for pair, counts in tried.items() if counts[0] / counts[1] >= LOSSY_SHARE}
    while left:
        place, pairs = _most_common_place(left, tried)
        again, segments = (sum(tried[pair][count] for pair in pairs) for count in (0, 1))
        yield book.finding(
            "mesh-lossy",
            Severity.WARNING,
            evidence=tuple(f"{a} -> {b}: {tried[a, b][0]} of {tried[a, b][1]}" for a, b in pairs[:4] if len(pairs) > 1),
            place=place,
            again=again,
            segments=segments,
            share=f"{again / segments:.1%}",
        )
        explained = set(pairs)
        left = {pair: counts for pair, counts in left.items() if pair not in explained}


def _sent_again(mesh: ConnectionMatrix) -> dict[HostPair, tuple[int, int]]:
    """From host to host: the segments that were sent again, and all."""
    found: dict[HostPair, tuple[int, int]] = {}
    for reach in mesh.reaches:
        pair = mesh.hosts(reach)
        if pair[0] != pair[1]:
            again, segments = found.get(pair, (0, 0))
            found[pair] = (again + reach.retransmits, segments + reach.segments)
    return found


SentAgain = dict[HostPair, tuple[int, int]]


def _most_common_place(lossy: SentAgain, tried: SentAgain) -> tuple[str, list[HostPair]]:
    """Where packets are lost, and the directions in which this shows: everywhere, at one host, else between the first two."""
    pairs, peers = sorted(lossy), peers_of(lossy)
    if _is_everywhere(pairs, tried):
        return f"the network between the {len(peers)} hosts", pairs
    first, *others = sorted(peers, key=lambda host: -len(peers[host]))
    at_one = len(peers[first]) > median(len(peers[host]) for host in others)
    if at_one and 2 * len(peers[first]) >= len(peers_of(pair for pair in tried if first in pair)[first]):
        return f"{first}, with {len(peers[first])} other hosts,", [pair for pair in pairs if first in pair]
    if host := _common_host(peers, tried):
        here = [
            pair
            for pair in sorted(tried)
            if host in pair and (pair in lossy or _share(tried, [pair]) >= LOSSY_SHARE / 2)
        ]
        count = len(peers_of(here)[host])
        return host + (f", with {count} other hosts," if count > 1 else ""), here
    one, other = pairs[0]
    if (other, one) in lossy:
        return f"the path between {one} and {other}", [(one, other), (other, one)]
    return f"{one} -> {other}", pairs[:1]


def _common_host(hosts: Iterable[str], tried: SentAgain) -> str | None:
    """The one host without which no packets are lost: a share of a few percent does not show in each of its directions. None where
    it may be another one as well."""
    found = []
    for host in hosts:
        rest = [pair for pair in tried if host not in pair]
        if (
            rest
            and _share(tried, rest) < LOSSY_SHARE / 5
            and _share(tried, [pair for pair in tried if host in pair]) >= LOSSY_SHARE / 2
        ):
            found.append(host)
    return found[0] if len(found) == 1 else None


def _share(tried: SentAgain, pairs: Iterable[HostPair]) -> float:
    """The part of the segments that were sent again."""
    counts = [tried[pair] for pair in pairs]
    return sum(again for again, _ in counts) / sum(segments for _, segments in counts)


def _is_everywhere(bad: Collection[HostPair], tried: Collection[HostPair]) -> bool:
    """Whether most directions are bad, and each host has bad ones with more than half of its others."""
    if len(bad) <= 2 or 2 * len(bad) <= len(tried):
        return False
    peers, tries = peers_of(bad), peers_of(tried)
    return all(2 * len(peers.get(host, ())) > len(others) for host, others in tries.items())


def mesh_loopback_address(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """A rank offers an address that means "this host" on every host."""
    hosts = set(mesh.first_of)
    alike: dict[tuple[bool, str, str], list[Claim]] = {}
    for host, claim in sorted(mesh.first_of.items()) if len(hosts) > 1 else ():
        if is_loopback(claim.address):
            called = any(mesh.opens(other, host) for other in hosts - {host})
            called = called or any(mesh.hosts(reach)[1] == host for reach in mesh.reaches if reach.via_other)
            alike.setdefault((called, _way(claim), claim.address), []).append(claim)
    for (called, *_), those in alike.items():
        yield book.finding(
            "mesh-loopback-address",
            Severity.ERROR if called else Severity.WARNING,
            case="" if len(those) == 1 else "several",
            evidence=_why(those),
            ranks=_ranks(mesh, those),
            address=those[0].address,
            interface=_way(those[0]),
        )


def mesh_wrong_interface(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """The interface that a rank would use is not the one that the others can reach."""
    sources: dict[str, set[int]] = {}
    for reach in mesh.reaches:
        host = mesh.hosts(reach)[1]
        if reach.via_other and not is_loopback(mesh.first_of[host].address):
            sources.setdefault(host, set()).add(reach.source)
    alike: dict[tuple[object, ...], list[Claim]] = {}
    for host in sources:
        claim = mesh.first_of[host]
        alike.setdefault((claim.interface, _way(claim), _rule(claim)), []).append(claim)
    for those in alike.values():
        first, turned = those[0], tuple(_turned(mesh, those))
        if len(those) == 1:
            yield book.finding(
                "mesh-wrong-interface",
                Severity.ERROR,
                case="rerouted" if turned else "",
                evidence=(*turned[:4], *_why(those)),
                ranks=_ranks(mesh, those),
                interface=first.interface,
                address=first.address,
                others=[mesh.who(rank) for rank in sorted(sources[first.host])[:3]],
                other_address=first.other,
                other=_way(first),
                routed=_way(first),
            )
        else:
            yield book.finding(
                "mesh-wrong-interface",
                Severity.ERROR,
                case="several-rerouted" if turned else "several",
                evidence=(*turned[:4], *_why(those)),
                ranks=_ranks(mesh, those),
                interface=first.interface,
                other=_way(first),
                routed=_way(first),
            )


def mesh_address_shared(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """Ranks of several hosts offer the same address, and it does not lead to all of them."""
    for address, hosts in shared_addresses(mesh).items():
        yield book.finding(
            "mesh-address-shared",
            Severity.ERROR,
            evidence=(*_also(mesh, address, hosts), *_why([mesh.first_of[host] for host in hosts])[:4]),
            hosts=hosts_in_words(hosts),
            address=address,
        )


def mesh_rank_unreached(mesh: ConnectionMatrix) -> Iterator[Finding]:
    """Single ranks are not reached on a host whose other ranks are."""
    wrong = misplaced(mesh)
    unreached: dict[int, list[Reach]] = {}
    for reach in mesh.reaches:
        if reach.outcome not in ARRIVED and not reach.via_other:
            unreached.setdefault(reach.target, []).append(reach)
    for target, failed in sorted(unreached.items()):
        failed = [reach for reach in failed if mesh.way(mesh.hosts(reach)) is None or len(set(mesh.hosts(reach))) == 1]
        if failed and not wrong & {*mesh.hosts(failed[0])}:
            yield book.finding(
                "mesh-rank-unreached",
                Severity.ERROR,
                evidence=tuple(f"from {mesh.who(reach.source)}: {reach.outcome.value}" for reach in failed[:4]),
                rank=mesh.who(target),
                count=len(failed),
                outcome=failed[0].outcome.value,
                address=failed[0].address,
            )


def _also(mesh: ConnectionMatrix, address: str, hosts: Sequence[str]) -> Iterator[str]:
    """The hosts that have an address beside the one that they offer."""
    for claim in (mesh.first_of[host] for host in hosts):
        named = [one.name for one in claim.local.interfaces if one.address == address] if claim.local else []
        if claim.address != address and named:
            yield f"{claim.host} has it on {named[0]}, next to {claim.address}"


def _turned(mesh: ConnectionMatrix, those: Sequence[Claim]) -> Iterator[str]:
    """The hosts that send by another interface than the one they would use: they drop what comes by the latter (rp_filter)."""
    for host in {claim.host: None for claim in those}:
        for reach in mesh.reaches:
            claim = mesh.by_rank[reach.source]
            if claim.host == host and reach.outcome in ARRIVED and (way := detour(claim, reach)):
                yield f"{host} sends to {reach.address} by {way.name} {way.address}: its replies and requests take different routes"
                break


def _ranks(mesh: ConnectionMatrix, those: Sequence[Claim]) -> str:
    return named(sorted(claim.rank for claim in those), by_rank(mesh.claims))


def _way(claim: Claim) -> str:
    """The interface by which a rank reaches the master, "" where that is not known."""
    return claim.local.routed.name if claim.local and claim.local.routed else ""


def _rule(claim: Claim) -> str:
    return claim.local.chosen.because if claim.local and claim.local.chosen else ""


def _why(those: Sequence[Claim]) -> tuple[str, ...]:
    """By which rule each takes its interface, and the address at which it is reached, each once."""
    chosen = [claim.local.chosen for claim in those if claim.local and claim.local.chosen]
    rules = (f"it takes {one.name} {one.address} because {one.because}" for one in chosen)
    return tuple(dict.fromkeys(rules))[:4]


CHECKS = (
    mesh_address_shared,
    mesh_loopback_address,
    mesh_wrong_interface,
    mesh_only_master_port,
    mesh_one_way,
    mesh_unreached,
    mesh_rank_unreached,
    mesh_mtu_hole,
    mesh_lossy,
)
