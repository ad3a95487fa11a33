"""A rank's hostname and interfaces -> findings. Looks at nothing."""

from collections.abc import Iterator

from dsdoctor.comm.local.interfaces import is_loopback, matches
from dsdoctor.comm.local.rank_view import MOST_EVIDENCE, WHO, Check, RankView
from dsdoctor.comm.models import Local
from dsdoctor.core.finding import Finding, Fix, Severity


def hostname_is_loopback(place: RankView) -> Iterator[Finding]:
    """The host's own name resolves to an address that never leaves it, so the other hosts are told to call themselves.

    gloo listens on the address that the hostname resolves to, and tells it to the others: they get "connection refused", or
    wait; the mesh tells whether they have to call at all. Debian writes "127.0.1.1 NAME" into /etc/hosts, and pods with
    hostNetwork often have it. NCCL does not use the name, but torch's gloo groups beside it (barriers, DeepSpeed's objects) do.
    """
    local = place.local
    if not place.several_hosts or not local.resolves_to or "GLOO_SOCKET_IFNAME" in local.variables:
        return
    if is_loopback(local.resolves_to[0]):
        yield Finding(
            rule="hostname-is-loopback",
            severity=Severity.WARNING,
            title=f"{WHO}: the hostname resolves to {local.resolves_to[0]}, where no other host can reach it",
            evidence=(f"{local.hostname} -> {', '.join(local.resolves_to)}",),
            fix=Fix(
                text="name the interface for gloo on every host, or give the name its real address in /etc/hosts",
                commands=(_gloo_by_route(local), "getent hosts $(hostname)"),
            ),
        )


def hostname_unusable(place: RankView) -> Iterator[Finding]:
    """The host's own name resolves to nothing, or to an address that this host does not have.

    torch's gloo then listens on 127.0.0.1, where no other host reaches it, and says so in one line of warning only. A name
    server that does not answer within 3 seconds counts as one that does not know the name.
    """
    local = place.local
    here = {interface.address for interface in local.interfaces}
    usable = any(address in here or is_loopback(address) for address in local.resolves_to)
    if place.several_hosts and not usable and "GLOO_SOCKET_IFNAME" not in local.variables:
        to = (
            f"resolves to {', '.join(local.resolves_to)}, which it does not have"
            if local.resolves_to
            else "resolves to nothing"
        )
        yield Finding(
            rule="hostname-unusable",
            severity=Severity.WARNING,
            title=f"{WHO}: the hostname {to}; gloo falls back to 127.0.0.1",
            evidence=(f"hostname {local.hostname}",),
            fix=Fix(
                text="name the interface for gloo on every host, or enter the name with its address in /etc/hosts",
                commands=(_gloo_by_route(local), "getent hosts $(hostname)"),
            ),
        )


def interface_named_absent(place: RankView) -> Iterator[Finding]:
    """A variable names a network interface that this host does not have, or that is down.

    gloo wants exact names, NCCL prefixes ("=eth0" is exact, "^docker" excludes). Interfaces have other names on other hosts,
    and one value for all is the usual cause. gloo stops with "Unable to find address for", NCCL with "no socket interface found".
    """
    local = place.local
    names = {interface.name for interface in local.interfaces}
    running = {interface.name for interface in local.interfaces if interface.up}
    gloo, nccl = local.variables.get("GLOO_SOCKET_IFNAME", ""), local.variables.get("NCCL_SOCKET_IFNAME", "")
    absent = [name for name in gloo.split(",") if len(gloo) > 1 and name not in names]
    said = [(f"GLOO_SOCKET_IFNAME={gloo}", "gloo")] if absent else []
    if len(nccl) > 1 and not any(matches(name, nccl) for name in running):
        said.append((f"NCCL_SOCKET_IFNAME={nccl}", "nccl"))
    for setting, backend in said:
        yield Finding(
            rule="interface-named-absent",
            severity=Severity.ERROR if backend == place.backend else Severity.WARNING,
            title=f"{WHO}: {setting}, and no such interface is up here",
            evidence=("{who}: " + _has(local),),
            fix=Fix(text="name one that is there, host by host", commands=("ip -brief address", place.name_it)),
        )


def interface_is_virtual(place: RankView) -> Iterator[Finding]:
    """The interface that the backend takes is a bridge, a veth or a tunnel, while the host has a real one.

    docker0, br-* and virbr0 have the same addresses on every host, and lead nowhere: ranks hang in init, or talk through a
    slow tunnel. Inside a container a veth is the only way out, and is not reported.
    """
    taken, local = place.interface, place.local
    real = [
        interface
        for interface in local.interfaces
        if interface.kind == "physical" and interface.up and not interface.address.startswith("fe80")
    ]
    if not place.several_hosts or taken is None or taken.kind != "virtual" or not real or local.chosen is None:
        return
    if local.routed is None or local.routed.name != taken.name:
        yield Finding(
            rule="interface-is-virtual",
            severity=Severity.WARNING,
            title=f"{WHO}: {place.backend} takes {taken.name}, a virtual interface, though {real[0].name} is there",
            evidence=(local.chosen.because, f"{WHO}: {_has(local)}"),
            fix=Fix(text="name the interface that joins the hosts", commands=(place.name_it,)),
        )


def interface_not_routed(place: RankView) -> Iterator[Finding]:
    """The interface that the backend takes is not the one by which the kernel reaches the master.

    Right where there is a faster network beside the one of the master's address, and wrong where the hosts do not share the
    taken one's subnet. The TCP mesh of this test shows which.
    """
    taken, local = place.interface, place.local
    chosen, by = local.chosen, local.routed
    if not place.several_hosts or taken is None or chosen is None or by is None or taken.kind != "physical":
        return
    if by.name != taken.name and not is_loopback(by.address):
        meant = place.variable in chosen.because or taken.name.startswith("ib")
        yield Finding(
            rule="interface-not-routed",
            severity=Severity.NOTE if meant else Severity.WARNING,
            title=f"{WHO}: {place.backend} takes {taken.name}, the master is reached by {by.name}",
            evidence=(chosen.because, f"{WHO}: {_has(local)}"),
            fix=Fix(text="if the hosts do not share that network, name the other", commands=(place.name_it,)),
        )


def interface_mtu_small(place: RankView) -> Iterator[Finding]:
    """The interface that carries the data has small packets: less than Ethernet's 1500, or 1500 on a fast wire.

    Below 1500 it is a tunnel or an overlay network; that is fine as long as every hop agrees, and a hole for large messages
    where one does not. On 25 Gbit/s and more over TCP, 9000 saves much of the processor's time.
    """
    taken, fabric = place.interface, any(port.state == "ACTIVE" for port in place.local.fabric)
    if not place.several_hosts or taken is None or taken.kind == "loopback" or (place.backend == "nccl" and fabric):
        return
    fast = taken.speed is not None and taken.speed >= 25_000
    if taken.mtu < 1500 or (fast and taken.mtu == 1500):
        speed = f" at {taken.speed} Mbit/s" if taken.speed else ""
        yield Finding(
            rule="interface-mtu-small",
            severity=Severity.NOTE,
            title=f"{WHO}: {taken.name} has an MTU of {taken.mtu}{speed}",
        )


def _gloo_by_route(local: Local) -> str:
    """The command that gives gloo the interface towards the master, else the first real one."""
    routed = local.routed.name if local.routed and not is_loopback(local.routed.address) else None
    real = next(
        (interface.name for interface in local.interfaces if interface.kind == "physical" and interface.up), "INTERFACE"
    )
    return f"export GLOO_SOCKET_IFNAME={routed or real}"


def _has(local: Local) -> str:
    shown = [
        f"{interface.name} {interface.address}"
        for interface in local.interfaces
        if interface.up and not interface.address.startswith("fe80")
    ]
    return ", ".join(shown[:MOST_EVIDENCE]) or "no interface is up"


CHECKS: tuple[Check, ...] = (
    hostname_is_loopback,
    hostname_unusable,
    interface_named_absent,
    interface_is_virtual,
    interface_not_routed,
    interface_mtu_small,
)
