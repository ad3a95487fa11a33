"""The interfaces of this process's network namespace; and which of them gloo or NCCL would use, by their own rules.

Asks the kernel by ioctl, because the /sys of a container may show another namespace. Sends nothing, opens no port.
"""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from dsdoctor.comm.models import ChosenInterface, Interface
from dsdoctor.core.host import Host

T = TypeVar("T")

SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFNETMASK, SIOCGIFMTU, SIOCETHTOOL = 0x8912, 0x8913, 0x891B, 0x8921, 0x8946
ETHTOOL_GSET, ETHTOOL_GDRVINFO = 1, 3
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
IFREQ = 16 + 3 * struct.calcsize("P")
UNKNOWN_SPEED = (0, 0xFFFF, 0xFFFFFFFF)

VIRTUAL = ("veth", "bridge", "tun", "dummy", "vxlan", "wireguard", "ifb", "openvswitch", "gre", "ipip", "sit", "geneve")
"""Drivers without a physical link. Bonds, VLANs, macvlan and ipvlan have one."""


def read_interfaces(host: Host) -> tuple[Interface, ...]:
    """Every address of every interface of this namespace, IPv4 first and then in the kernel's order, as getifaddrs gives them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        four = [(name, address, _prefix(asker, name)) for name, address in _addresses(asker)]
        six = list(parse_if_inet6(host.read("/proc/net/if_inet6") or ""))
        return tuple(_interface(asker, name, address, prefix) for name, address, prefix in four + six)


def parse_if_inet6(text: str) -> Iterator[tuple[str, str, int]]:
    """Name, address and prefix of each line of /proc/net/if_inet6; a link-local address carries its interface.

    >>> list(parse_if_inet6("fd000000000000000000000000000002 04 40 00 82     eth0"))
    [('eth0', 'fd00::2', 64)]
    >>> list(parse_if_inet6("fe8000000000000000fc00fffe000001 04 40 20 80     eth0"))
    [('eth0', 'fe80::fc:ff:fe00:1%eth0', 64)]
    """
    for line in text.splitlines():
        parts = line.split()
        if len(parts) != 6:
            continue
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv6Address(bytes.fromhex(parts[0]))
            scope = f"%{parts[5]}" if address.is_link_local else ""
            yield parts[5], f"{address}{scope}", int(parts[2], 16)


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
    """Whether an address never leaves its host.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("")
    (True, True, False, False)
    """
    return address.startswith("127.") or address == "::1"


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
    ("ib", "NCCL takes an interface named ib* first"),
    ("^docker,lo,virbr", "NCCL takes the first interface that is not docker*, lo* or virbr*"),
    ("docker", "NCCL found no other interface than docker*"),
    ("lo", "NCCL found no other interface than the loopback"),
    ("virbr", "NCCL found no other interface than virbr*"),
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


def _addresses(asker: socket.socket) -> Iterator[tuple[str, str]]:
    """Name and IPv4 address of each entry of SIOCGIFCONF."""
    room = array.array("B", bytes(IFREQ * 1024))
    answer = fcntl.ioctl(asker, SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
    filled = struct.unpack("iP", answer)[0]
    for start in range(0, filled, IFREQ):
        entry = room[start : start + IFREQ].tobytes()
        yield _word(entry[:16]).split(":")[0], socket.inet_ntoa(entry[20:24])


def _interface(asker: socket.socket, name: str, address: str, prefix: int) -> Interface:
    flags = int.from_bytes(_asked(asker, SIOCGIFFLAGS, name)[:2], "little")
    driver = _word(_ethtool(asker, name, ETHTOOL_GDRVINFO, 196)[4:36])
    virtual = driver in VIRTUAL or name.startswith(("docker", "veth", "virbr", "br-", "cni", "flannel", "tailscale"))
    kind = "loopback" if flags & IFF_LOOPBACK else "virtual" if virtual else "physical"
    return Interface(
        name=name,
        address=address,
        prefix=prefix,
        mtu=int.from_bytes(_asked(asker, SIOCGIFMTU, name)[:4], "little"),
        speed=_speed(asker, name) if kind == "physical" else None,
        up=bool(flags & IFF_UP and flags & IFF_RUNNING),
        kind=kind,
    )


def _prefix(asker: socket.socket, name: str) -> int:
    return bin(int.from_bytes(_asked(asker, SIOCGIFNETMASK, name)[4:8], "big")).count("1")


def _speed(asker: socket.socket, name: str) -> int | None:
    """Mbit/s. Not asked of virtual interfaces, which report an invented speed (veth: 10000)."""
    answer = _ethtool(asker, name, ETHTOOL_GSET, 44)
    low, high = struct.unpack_from("=H", answer, 12)[0], struct.unpack_from("=H", answer, 28)[0]
    speed = low | high << 16
    return None if speed in UNKNOWN_SPEED else speed


def _asked(asker: socket.socket, question: int, name: str) -> bytes:
    """The union of the answer; zeros where the interface is gone or has no answer."""
    try:
        return fcntl.ioctl(asker, question, struct.pack("16s240x", name.encode()[:15]))[16:]
    except OSError:
        return bytes(240)


def _ethtool(asker: socket.socket, name: str, command: int, size: int) -> bytes:
    room = array.array("B", struct.pack("I", command) + bytes(size - 4))
    with contextlib.suppress(OSError):
        fcntl.ioctl(asker, SIOCETHTOOL, struct.pack("16sP16x", name.encode()[:15], room.buffer_info()[0]))
        return room.tobytes()
    return bytes(size)


def _word(field: bytes) -> str:
    return field.split(b"\0")[0].decode("ascii", errors="replace")
