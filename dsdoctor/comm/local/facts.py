"""Host -> Local: the host of one rank, read without torch in milliseconds. Looks, never judges.

Sockets, rlimits and statvfs are asked directly, because they are about this process itself. Files are read through the host.
"""

import contextlib
import os
import re
import resource
import socket

from dsdoctor.comm.local.counters import read_counters
from dsdoctor.comm.local.expected import parse_full_rate
from dsdoctor.comm.local.gpu_links import read_gpus
from dsdoctor.comm.local.interfaces import bounded, choose, read_interfaces, routed
from dsdoctor.comm.local.variables import read_config_files, read_variables
from dsdoctor.comm.models import FabricPort, Local, Rank
from dsdoctor.core.host import Host

PATIENCE = 3.0

NOT_READ = "not read: "
"""The beginning of ``acs`` where it could not be read."""


def look_local(host: Host, rank: Rank, backend: str) -> Local:
    """Everything about this process's host that communication depends on. ``backend`` "auto" is nccl where there are GPUs."""
    gpus, driver = read_gpus(host)
    interfaces, variables, name = read_interfaces(), read_variables(host), socket.gethostname()
    backend = ("nccl" if gpus else "gloo") if backend == "auto" else backend
    resolves_to = bounded(lambda: _resolve(name), PATIENCE) or ()
    shm = _shm()
    return Local(
        hostname=name,
        resolves_to=resolves_to,
        interfaces=interfaces,
        chosen=choose(backend, interfaces, resolves_to, variables),
        routed=routed(rank.master, rank.port, interfaces, patience=PATIENCE),
        shm_total=shm[0] if shm else None,
        shm_free=shm[1] if shm else None,
        memlock=_soft(resource.RLIMIT_MEMLOCK),
        nofile=_soft(resource.RLIMIT_NOFILE),
        address_space=_soft(resource.RLIMIT_AS),
        fabric=read_fabric(host),
        iommu=read_iommu(host),
        acs=read_acs(host) if gpus and rank.local_rank == 0 else (),
        variables=variables,
        config_files=read_config_files(host),
        kernel=(host.read("/proc/sys/kernel/osrelease") or "").strip() or os.uname().release,
        driver=driver,
        gpus=gpus,
        counters=read_counters(host) if rank.local_rank == 0 else {},
    )


def read_fabric(host: Host) -> tuple[FabricPort, ...]:
    """The ports of the InfiniBand and RoCE devices."""
    ports = []
    for folder in host.glob("/sys/class/infiniband/*/ports/*"):
        device, _, port = folder.removeprefix("/sys/class/infiniband/").partition("/ports/")
        if port.isdecimal():
            rate = host.read(f"{folder}/rate") or ""
            ports.append(
                FabricPort(
                    device=device,
                    port=int(port),
                    state=parse_state(host.read(f"{folder}/state") or ""),
                    physical=parse_state(host.read(f"{folder}/phys_state") or ""),
                    rate=parse_rate(rate),
                    full=parse_full_rate(rate),
                    link_layer=(host.read(f"{folder}/link_layer") or "InfiniBand").strip(),
                )
            )
    return tuple(ports)


def parse_state(text: str) -> str:
    """A port's state without its number.

    >>> parse_state("4: ACTIVE\\n"), parse_state("")
    ('ACTIVE', 'unknown')
    """
    return text.rpartition(":")[2].strip() or "unknown"


def parse_rate(text: str) -> float | None:
    """A port's rate in Gb/s.

    >>> parse_rate("400 Gb/sec (4X NDR)\\n"), parse_rate("2.5 Gb/sec (1X SDR)"), parse_rate("")
    (400.0, 2.5, None)
    """
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text)
    return float(match[1]) if match else None


def read_iommu(host: Host) -> str | None:
    """ "translating" where devices' addresses are translated, "passthrough" where not, None where no IOMMU is on."""
    kinds = [(host.read(path) or "").strip() for path in host.glob("/sys/kernel/iommu_groups/*/type")]
    if kinds:
        return "passthrough" if all(kind in ("identity", "") for kind in kinds) else "translating"
    if not host.exists("/sys/kernel/iommu_groups/0"):
        return None
    words = (host.read("/proc/cmdline") or "").split()
    return "passthrough" if "iommu=pt" in words or "iommu.passthrough=1" in words else "translating"


def read_acs(host: Host) -> tuple[str, ...]:
    """The PCI bridges whose access control sends GPU to GPU traffic up through the processor; only root can see it."""
    program = host.which("lspci") or next(
        (path for path in ("/usr/bin/lspci", "/sbin/lspci") if host.exists(path)), None
    )
    if program is None:
        return (f"{NOT_READ}lspci is not here (package pciutils)",)
    if os.geteuid() != 0:
        return (f"{NOT_READ}only root sees it",)
    return parse_acs(host.run([program, "-vvv"], timeout=10).stdout)


def parse_acs(text: str) -> tuple[str, ...]:
    """The bridges of ``lspci -vvv`` with source validation and request redirection on.

    >>> parse_acs("17:00.0 PCI bridge: PLX\\n\\t\\tACSCtl:\\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+\\n")
    ('17:00.0',)
    >>> parse_acs("17:00.0 PCI bridge: PLX\\n\\t\\tACSCtl:\\tSrcValid- TransBlk- ReqRedir- CmpltRedir-\\n")
    ()
    """
    device, found = "", []
    for line in text.splitlines():
        head = re.match(r"([0-9a-f:.]{7,12}) .*bridge", line)
        if line[:1].strip():
            device = head[1] if head else ""
        elif device and "ACSCtl:" in line and "SrcValid+" in line and "ReqRedir+" in line:
            found.append(device)
    return tuple(found)


def _resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name in the resolver's order, which is the order in which gloo tries them."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _shm() -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        size = os.statvfs("/dev/shm")
        return size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    return None


def _soft(kind: int) -> int | None:
    """This process's own limit, None where it has none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
