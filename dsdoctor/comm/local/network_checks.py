"""A rank's hostname and interfaces -> findings. Looks at nothing."""

from collections.abc import Iterator

from dsdoctor.comm.local.interfaces import is_loopback, matches
from dsdoctor.comm.local.rank_view import MOST_EVIDENCE, WHO, Check, RankView
from dsdoctor.comm.models import Local
from dsdoctor.core.finding import Finding, Step, step


def hostname_unusable(place: RankView) -> Iterator[Finding]:
    """The host's own name resolves to nothing, to an address that this host does not have, or to one that never leaves it.

    Debian writes "127.0.1.1 NAME" into /etc/hosts, and pods with hostNetwork often have it. A name server that does not
    answer within 3 seconds counts as one that does not know the name.

    Why it matters: gloo listens on the address that the hostname resolves to, else on 127.0.0.1, and gives it to the other
    hosts, which then try to connect to themselves. They get "connection refused", or wait; the phase "tcp mesh" shows
    whether they have to connect at all. NCCL does not use the name, but torch's gloo groups beside it (barriers,
    DeepSpeed's objects) do.

    How to fix it: name the interface for gloo on every host, or give the name its real address in /etc/hosts.

        $ export GLOO_SOCKET_IFNAME=INTERFACE
        $ getent hosts $(hostname)

    Since: 0.1
    """
    local = place.local
    here = {interface.address for interface in local.interfaces}
    if not place.several_hosts or "GLOO_SOCKET_IFNAME" in local.variables:
        return
    known = [address for address in local.resolves_to if address in here or is_loopback(address)]
    if known and not is_loopback(local.resolves_to[0]):
        return
    addresses = ", ".join(local.resolves_to)
    to = f"{addresses}, which is not here" if addresses else "nothing"
    to = f"{known[0]}, where no other host can reach it" if known else f"{to}: gloo falls back to 127.0.0.1"
    yield Finding.warning(
        "hostname-unusable",
        f"{WHO}: the hostname resolves to {to}",
        evidence=(f"{local.hostname} -> {addresses or 'nothing'}",),
        fix="name the interface for gloo on every host, or give the name its real address in /etc/hosts",
        steps=(_gloo_by_route(local), step("getent hosts $(hostname)")),
    )


def interface_named_absent(place: RankView) -> Iterator[Finding]:
    """A variable names a network interface that this host does not have, or that is down.

    gloo wants exact names, NCCL prefixes ("=eth0" is exact, "^docker" excludes). Interfaces have other names on other
    hosts, and one value for all is the usual cause.

    Why it matters: gloo stops with "Unable to find address for", NCCL with "no socket interface found".

    How to fix it: name an interface that is there, host by host.

        $ ip -brief address
        $ export NCCL_SOCKET_IFNAME==INTERFACE
        $ export GLOO_SOCKET_IFNAME=INTERFACE

    Since: 0.1
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
        yield (Finding.error if backend == place.backend else Finding.warning)(
            "interface-named-absent",
            f"{WHO}: {setting}, and no such interface is up here",
            evidence=("{who}: " + _has(local),),
            fix="name an interface that is there, host by host",
            steps=(step("ip -brief address"), place.name_it),
        )


def _gloo_by_route(local: Local) -> Step:
    """The step that gives gloo the interface towards the master, else the first real one."""
    routed = local.routed.name if local.routed and not is_loopback(local.routed.address) else None
    real = [interface.name for interface in local.interfaces if interface.kind == "physical" and interface.up]
    name = routed or next(iter(real), None)
    return step("export GLOO_SOCKET_IFNAME={interface}").filled({"interface": name} if name else {})


def _has(local: Local) -> str:
    shown = [
        f"{interface.name} {interface.address}"
        for interface in local.interfaces
        if interface.up and not interface.address.startswith("fe80")
    ]
    return ", ".join(shown[:MOST_EVIDENCE]) or "no interface is up"


CHECKS: tuple[Check, ...] = (hostname_unusable, interface_named_absent)
