"""The interfaces of this process's network namespace; and which of them gloo or NCCL would use, by their own rules.

Asks the kernel and not /sys, because that of a container may show another namespace. Sends nothing, opens no port.
"""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dsdoctor.comm.models import ChosenInterface, Claim, Interface, RankGpu
from dsdoctor.comm.results import Limit

T = TypeVar("T")

SIOCETHTOOL, ETHTOOL_GDRVINFO = 0x8946, 3

VIRTUAL = ("veth", "bridge", "tun", "dummy", "vxlan", "wireguard", "ifb", "openvswitch", "gre", "ipip", "sit", "geneve")
"""Drivers without a physical link. Bonds, VLANs, macvlan and ipvlan have one."""
VIRTUAL_NAMES = ("docker", "veth", "virbr", "br-", "cni", "flannel", "tailscale")


def read_interfaces() -> tuple[Interface, ...]:
    """Every address of every interface of this namespace, IPv4 first; a link-local address carries its interface."""
    import psutil

    figures, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    found = [
        _interface(label.split(":")[0], one.address, one.netmask, figures)
        for label, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in families
    ]
    return tuple(sorted(found, key=lambda interface: ":" in interface.address))


def choose(
    backend: str, interfaces: Sequence[Interface], resolves_to: Sequence[str], variables: Mapping[str, str]
) -> ChosenInterface | None:
    """The interface that a backend would take, and by which rule; None where what a variable names is not there."""
    if backend == "nccl":
        return _of_nccl(interfaces, variables)
    return _of_gloo(interfaces, resolves_to, variables)


def matches(name: str, wanted: str) -> bool:
    """Whether a list, as NCCL reads it, includes a name: prefixes; "=" exact names; "^" all but these; ":port" is ignored.

    >>> [matches("eth10", wanted) for wanted in ("eth1", "=eth1", "^eth1", "^=eth1", "docker,eth")]
    [True, False, False, True, True]
    """
    without, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    exact, wanted = wanted.startswith("="), wanted.removeprefix("=")
    listed = [part.split(":")[0] for part in wanted.split(",") if part]
    found = not listed or any(name == part if exact else name.startswith(part) for part in listed)
    return found is not without


def routed(master: str, port: int, interfaces: Sequence[Interface], *, patience: float = 3.0) -> ChosenInterface | None:
    """The interface by which the kernel reaches the master, found by connecting a UDP socket, which sends nothing."""
    address = bounded(lambda: _source_address(master, port), patience)
    if address is None:
        return None
    name = next((interface.name for interface in interfaces if interface.address.split("%")[0] == address), "")
    name = name or ("lo" if is_loopback(address) else "")
    return ChosenInterface(name=name, address=address, because=f"the kernel routes to {master} by it") if name else None


def is_loopback(address: str) -> bool:
    """Whether every host means itself by an address: it never leaves its host. A name is none.

    >>> [is_loopback(one) for one in ("127.0.1.1", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1")]
    [True, True, True, True]
    >>> [is_loopback(one) for one in ("10.0.0.1", "fe80::1%eth0", "nodea", "127.example.org", "")]
    [False, False, False, False, False]
    """
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return False
    return ((known.ipv4_mapped if known.version == 6 else None) or known).is_loopback


def bounded(
    ask: Callable[[], T], seconds: float, failures: tuple[type[Exception], ...] = (OSError, UnicodeError)
) -> T | None:
    """The answer, None where it fails or takes longer than ``seconds``: a dead name server hangs for minutes, torch for ever. The
    thread that asked is then abandoned."""
    answers: list[T] = []

    def work() -> None:
        with contextlib.suppress(*failures):
            answers.append(ask())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _of_gloo(
    interfaces: Sequence[Interface], resolves_to: Sequence[str], variables: Mapping[str, str]
) -> ChosenInterface | None:
    """The rule of torch (c10d's ProcessGroupGloo, GlooDeviceFactory): GLOO_SOCKET_IFNAME, each name exactly; else the first
    address of the hostname that can be bound here; else 127.0.0.1."""
    named = variables.get("GLOO_SOCKET_IFNAME", "")
    if len(named) > 1:
        found = next((interface for interface in interfaces if interface.name == named.split(",")[0]), None)
        return _chosen(found, f"GLOO_SOCKET_IFNAME={named}")
    here = {interface.address: interface.name for interface in interfaces}
    for address in resolves_to:
        name = here.get(address) or ("lo" if is_loopback(address) else None)
        if name:
            return ChosenInterface(name=name, address=address, because=f"the hostname resolves to {address}")
    why = f"resolves to {', '.join(resolves_to)}, which is not here" if resolves_to else "does not resolve"
    return ChosenInterface(
        name="lo", address="127.0.0.1", because=f"the hostname {why}: torch falls back to the loopback"
    )


AUTOMATIC = (
    ("ib", "NCCL prefers an interface named ib*"),
    ("^docker,lo,virbr", "NCCL uses the first interface that is not docker*, lo* or virbr*"),
    ("docker", "NCCL found no interface besides docker*"),
    ("lo", "NCCL found no interface besides the loopback"),
    ("virbr", "NCCL found no interface besides virbr*"),
)


def _of_nccl(interfaces: Sequence[Interface], variables: Mapping[str, str]) -> ChosenInterface | None:
    """The rule of NCCL (ncclFindInterfaces in src/misc/socket.cc): NCCL_SOCKET_IFNAME, find or fail; else ib*; else the
    subnet of NCCL_COMM_ID; else not docker, lo, virbr; else docker, lo, virbr. Only running interfaces."""
    family = variables.get("NCCL_SOCKET_FAMILY")
    usable = [
        interface
        for interface in interfaces
        if interface.up and interface.address != "::1" and _of_family(interface, family)
    ]
    named = variables.get("NCCL_SOCKET_IFNAME", "")
    if len(named) > 1:
        return _chosen(
            next((interface for interface in usable if matches(interface.name, named)), None),
            f"NCCL_SOCKET_IFNAME={named}",
        )
    for number, (wanted, because) in enumerate(AUTOMATIC):
        hint = variables.get("NCCL_COMM_ID", "").rpartition(":")[0] if number == 1 else ""
        near = next((interface for interface in usable if hint and _in_subnet(hint, interface)), None)
        if near:
            return _chosen(near, f"NCCL_COMM_ID is in the subnet of {near.name}")
        found = next((interface for interface in usable if matches(interface.name, wanted)), None)
        if found:
            return _chosen(found, because)
    return None


def _chosen(interface: Interface | None, because: str) -> ChosenInterface | None:
    return ChosenInterface(name=interface.name, address=interface.address, because=because) if interface else None


def _of_family(interface: Interface, family: str | None) -> bool:
    return family not in ("AF_INET", "AF_INET6") or (family == "AF_INET6") is (":" in interface.address)


def _in_subnet(address: str, interface: Interface) -> bool:
    try:
        network = ipaddress.ip_network(f"{interface.address.split('%')[0]}/{interface.prefix}", strict=False)
        return ipaddress.ip_address(address.strip("[]")) in network
    except ValueError:
        return False


def _source_address(master: str, port: int) -> str:
    family, kind, _, _, target = socket.getaddrinfo(master, port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sender:
        sender.connect(target)
        return str(sender.getsockname()[0]).split("%")[0]


def _interface(name: str, address: str, mask: str | None, figures: Mapping[str, Any]) -> Interface:
    figure = figures.get(name)
    flags = figure.flags.split(",") if figure else []
    virtual = _driver(name) in VIRTUAL or name.startswith(VIRTUAL_NAMES)
    kind = "loopback" if "loopback" in flags else "virtual" if virtual else "physical"
    return Interface(
        name=name,
        address=address,
        prefix=int(ipaddress.ip_address(mask)).bit_count() if mask else 0,
        mtu=figure.mtu if figure else 0,
        # a virtual interface reports an invented speed (veth: 10000)
        speed=figure.speed or None if figure and kind == "physical" else None,
        up={"up", "running"} <= {*flags},
        kind=kind,
    )


def _driver(name: str) -> str:
    """The driver as ethtool shows it. Asked by ioctl, because the /sys of a container may show another namespace."""
    room = array.array("B", struct.pack("I", ETHTOOL_GDRVINFO) + bytes(192))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker, contextlib.suppress(OSError):
        fcntl.ioctl(asker, SIOCETHTOOL, struct.pack("16sP16x", name.encode()[:15], room.buffer_info()[0]))
    return room[4:36].tobytes().split(b"\0")[0].decode("ascii", errors="replace")


# Claims -> the bandwidth of the slowest link between the ranks, as their hardware reports it. Pure.
#
# Numbers are one way, bytes a second (1 GB/s = 1e9), and an upper bound for a ring; busbw is compared with them.


GEN3_X16 = 12e9
"""What NCCL counts for PCIe Gen3 x16 (PCI_BW in src/graph/topo.h): 76 % of the 15.75 GB/s of the wire."""

NVLINK_SHARE = 0.8
"""What NCCL counts of a link's rate (src/graph/topo.h): 20 of 25 GB/s on V100 and A100, 20.6 of 25 on H100, 40.1 of 50 on B200."""


def limit(claims: Sequence[Claim], backend: str) -> Limit | None:
    """The slowest link between these ranks. None where it is not known: the loopback of a host has no limit of its own, and
    virtual interfaces report none."""
    places: dict[str, list[Claim]] = {}
    for claim in claims:
        places.setdefault(claim.host, []).append(claim)
    several = list(places.values()) if len(places) > 1 else []
    if backend != "nccl":
        return _slowest([_wire(place) for place in several])
    inside = [_inside(place) for place in places.values() if len(place) > 1]
    return _slowest([*inside, *(_across(place) for place in several)])


def pcie(generation: int, lanes: int) -> float:
    """What a PCIe link carries: NCCL's 12 GB/s for Gen3 x16, twice that each generation, in proportion to the lanes.

    >>> [pcie(generation, 16) / 1e9 for generation in (3, 4, 5)], pcie(4, 8) / 1e9
    ([12.0, 24.0, 48.0], 12.0)
    """
    return GEN3_X16 * 2.0 ** (generation - 3) * lanes / 16


def _slowest(limits: Sequence[Limit | None]) -> Limit | None:
    known = [found for found in limits if found is not None]
    return min(known, key=lambda found: found.bandwidth) if known else None


def _wire(place: Sequence[Claim]) -> Limit | None:
    """The network interface of a host: Mbit/s as its driver reports."""
    claim = place[0]
    interfaces = claim.local.interfaces if claim.local else ()
    card = next((interface for interface in interfaces if interface.name == claim.interface and interface.speed), None)
    if card is None or card.speed is None:
        return None
    because = (
        f"{claim.host}: {card.name} runs at {card.speed} Mbit/s (a tree over {place[0].world} ranks may show more)"
    )
    return Limit(bandwidth=card.speed * 1e6 / 8, link=f"{card.name} of {claim.host}", because=because)


def _across(place: Sequence[Claim]) -> Limit | None:
    """What a host's network carries under NCCL: its active fabric ports together, else the socket's interface; and no more
    than the PCIe links of its ranks' GPUs together."""
    fabric = _fabric(place)
    gpus = [gpu for claim in place if (gpu := _gpu(claim)) is not None]
    links = [pcie(gpu.pcie_max[0], gpu.pcie[1]) for gpu in gpus if gpu.pcie and gpu.pcie_max]
    host = place[0].host
    bus = None
    if links and len(links) == len(place):
        bus = Limit(bandwidth=sum(links), link=f"PCIe of {host}", because=f"{host}: {len(links)} GPUs send by PCIe")
    return _slowest([fabric or _wire(place), bus])


def _fabric(place: Sequence[Claim]) -> Limit | None:
    local = place[0].local
    if local is None or local.variables.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return None
    wanted = local.variables.get("NCCL_IB_HCA", "")
    ports = [port for port in local.fabric if port.state == "ACTIVE" and port.rate and matches(port.device, wanted)]
    total = sum(port.rate or 0.0 for port in ports)
    if not total:
        return None
    because = (
        f"{place[0].host}: {len(ports)} active ports with {total:g} Gb/s together (a tree may show more than a ring)"
    )
    return Limit(bandwidth=total * 1e9 / 8, link=f"{ports[0].link_layer} of {place[0].host}", because=because)


def _inside(place: Sequence[Claim]) -> Limit | None:
    """What joins the GPUs of one host: NVLink where all have it, else the narrowest PCIe link."""
    gpus = [_gpu(claim) for claim in place]
    known = [gpu for gpu in gpus if gpu is not None]
    if len(known) < len(place) or len({gpu.uuid for gpu in known}) < 2:
        return None
    host = place[0].host
    links = [gpu.nvlink for gpu in known if gpu.nvlink]
    if len(links) == len(known):
        least = min(links)
        because = f"{host}: {least / 1e9:g} GB/s of active NVLinks a GPU, of which NCCL counts 80 % (in-switch sums may show more)"
        return Limit(bandwidth=NVLINK_SHARE * least, link=f"NVLink of {host}", because=because)
    return _slowest([_bus(gpu, host) for gpu in known])


def _bus(gpu: RankGpu, host: str) -> Limit | None:
    """A GPU's PCIe link: its highest generation, because an idle link falls back to Gen1, and the lanes that it has now."""
    if gpu.pcie is None or gpu.pcie_max is None:
        return None
    name = f"PCIe Gen{gpu.pcie_max[0]} x{gpu.pcie[1]}"
    because = f"{host}: GPU {gpu.index} has {name}; NCCL counts 12 GB/s for Gen3 x16, twice that each generation"
    return Limit(bandwidth=pcie(gpu.pcie_max[0], gpu.pcie[1]), link=f"{name} of {host}", because=because)


def _gpu(claim: Claim) -> RankGpu | None:
    gpus = claim.local.gpus if claim.local else ()
    return next((gpu for gpu in gpus if gpu.uuid == claim.gpu), None)
