"""The connections that every rank tried over plain TCP -> findings about the hosts and links. Judges, never looks."""

from collections.abc import Iterator, Sequence

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.mesh import blocked_checks
from dsdoctor.comm.mesh.blocked_checks import hosts_in_words
from dsdoctor.comm.mesh.matrix import ARRIVED, Mesh, misplaced, shared_addresses
from dsdoctor.comm.models import Claim, by_rank, named
from dsdoctor.comm.results import Reach
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book


def mesh_loopback_address(mesh: Mesh) -> Iterator[Finding]:
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


def mesh_wrong_interface(mesh: Mesh) -> Iterator[Finding]:
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


def mesh_address_shared(mesh: Mesh) -> Iterator[Finding]:
    """Ranks of several hosts offer the same address, and it does not lead to all of them."""
    for address, hosts in shared_addresses(mesh).items():
        yield book.finding(
            "mesh-address-shared",
            Severity.ERROR,
            evidence=(*_also(mesh, address, hosts), *_why([mesh.first_of[host] for host in hosts])[:4]),
            hosts=hosts_in_words(hosts),
            address=address,
        )


def mesh_rank_unreached(mesh: Mesh) -> Iterator[Finding]:
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


def _also(mesh: Mesh, address: str, hosts: Sequence[str]) -> Iterator[str]:
    """The hosts that have an address beside the one that they offer."""
    for claim in (mesh.first_of[host] for host in hosts):
        named = [one.name for one in claim.local.interfaces if one.address == address] if claim.local else []
        if claim.address != address and named:
            yield f"{claim.host} has it on {named[0]}, beside {claim.address}"


def _turned(mesh: Mesh, those: Sequence[Claim]) -> Iterator[str]:
    """The hosts that send by another interface than the one they would use: they drop what comes by the latter (rp_filter)."""
    for host in {claim.host: None for claim in those}:
        for reach in mesh.reaches:
            claim = mesh.by_rank[reach.source]
            if claim.host == host and reach.outcome in ARRIVED and (way := blocked_checks.detour(claim, reach)):
                yield f"{host} sends to {reach.address} by {way.name} {way.address}: its answers go another way than the questions"
                break


def _ranks(mesh: Mesh, those: Sequence[Claim]) -> str:
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
    *blocked_checks.BLOCKED_CHECKS,
    mesh_rank_unreached,
    *blocked_checks.LOSS_CHECKS,
)
