"""Host -> what a recipe is filled with. Looks, without torch; judges nothing."""

from dataclasses import dataclass

from dsdoctor.comm.local.interfaces import read_interfaces
from dsdoctor.core.host import Host
from dsdoctor.hosts.hostfile import HOST, parse_hostfile
from dsdoctor.hosts.nodelist import expand

ROUTES = "/proc/net/route"


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a recipe is filled with. ``hosts`` are those of a Slurm allocation or a hostfile with their slots, () where neither
    is known; ``interface`` is the one of the default route where there are several to choose from; ``fabric`` are the InfiniBand
    or RoCE devices."""

    python: str
    per_node: int
    gpus: bool
    hosts: tuple[tuple[str, int], ...] = ()
    interface: str | None = None
    fabric: tuple[str, ...] = ()
    partition: str | None = None

    @property
    def nodes(self) -> int:
        """The hosts that are known, else two: the smallest number that tests a network."""
        return len(self.hosts) or 2


def look_site(host: Host, *, python: str, nproc: int | None = None, hostfile: str | None = None) -> Site:
    """Look at what a recipe needs: a second at the most, without torch."""
    gpus = len(host.glob("/dev/nvidia[0-9]*"))
    per_node = nproc or gpus or 2
    text = host.read(hostfile) if hostfile else None
    nodelist = host.variable("SLURM_JOB_NODELIST")
    hosts = tuple((name, per_node) for name in expand(nodelist)) if nodelist else ()
    if text is not None:
        hosts = tuple((one.name, one.slots) for one in parse_hostfile(text).hosts if HOST.fullmatch(one.name))
    sinfo = host.which("sinfo")
    names = {one.name for one in read_interfaces(host) if one.up and one.kind != "loopback"}
    return Site(
        python=python,
        per_node=per_node,
        gpus=gpus > 0,
        hosts=hosts,
        interface=parse_default_route(host.read(ROUTES) or "") if len(names) > 1 else None,
        fabric=tuple(path.rsplit("/", 1)[1] for path in host.glob("/sys/class/infiniband/*")),
        partition=parse_partition(host.run([sinfo, "-h", "-o", "%P"], timeout=5).stdout) if sinfo else None,
    )


def parse_default_route(text: str) -> str | None:
    """The interface of the default route in /proc/net/route, the one with the least metric.

    >>> parse_default_route("Iface Destination Gateway Flags RefCnt Use Metric Mask\\neth1 00000000 010011AC 0003 0 0 0 00000000")
    'eth1'
    """
    rows = [line.split() for line in text.splitlines()[1:]]
    ways = [
        (int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000" and row[6].isdecimal()
    ]
    return min(ways)[1] if ways else None


def parse_partition(text: str) -> str | None:
    """Slurm's default partition as ``sinfo -h -o %P`` marks it, else the first.

    >>> parse_partition("debug\\nall*\\n")
    'all'
    """
    names = text.split()
    return next((name for name in names if name.endswith("*")), names[0] if names else "").rstrip("*") or None
