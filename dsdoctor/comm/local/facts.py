"""Host -> Local: the host of one rank, read without torch in milliseconds; its error counters, and what rose in a test; its links.

Sockets, rlimits and statvfs are asked directly, because they are about this process itself. Files are read through the host.
Of counters only what is not zero is kept. "retransmitted" and "sent" are TCP segments of the whole host, or of its network
namespace.
"""

import contextlib
import os
import re
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsdoctor.comm.local.interfaces import bounded, choose, read_interfaces, routed
from dsdoctor.comm.models import FabricPort, Local, Rank, RankGpu, named
from dsdoctor.core.children import parse_answer
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap
from dsdoctor.core.redaction import setting
from dsdoctor.core.text import and_more_lines
from dsdoctor.ranks.nodelist import in_words
from dsdoctor.rules import book

Counters = dict[str, int]
OF_INTERFACES = (
    *("statistics/rx_errors", "statistics/tx_errors", "statistics/rx_crc_errors", "statistics/rx_missed_errors"),
    *("statistics/tx_carrier_errors", "carrier_changes"),
)
OF_PORTS = (
    *("counters/symbol_error", "counters/link_error_recovery", "counters/link_downed", "counters/port_rcv_errors"),
    *("counters/local_link_integrity_errors", "counters/excessive_buffer_overrun_errors"),
    *("hw_counters/out_of_sequence", "hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err"),
)
"""Of a port of InfiniBand or RoCE: on the wire, then what the adapter had to send again."""
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
LINK, GPU = "link ", "GPU "
MAX_COUNTER_LINES = 8
LOSSY, MIN_RESENT = 0.01, 50
"""The part of all segments, and their number, from which sending again is no chance."""


def read_counters(host: Host) -> Counters:
    """What this host counts now."""
    found = {**dict(_of_links(host)), **parse_snmp(host.read("/proc/net/snmp") or ""), **_of_gpus(host)}
    return {name: count for name, count in found.items() if count}


def _of_links(host: Host) -> Iterator[tuple[str, int]]:
    wires = {path: path.split("/")[4] for path in host.glob("/sys/class/net/*") if not path.endswith("/lo")}
    ports = {path: path.split("/")[4] for path in host.glob("/sys/class/infiniband/*/ports/*")}
    ports = {path: f"{device} port {path.rsplit('/', 1)[1]}" for path, device in ports.items()}
    of_wires = [(path, name) for path in wires for name in OF_INTERFACES]
    of_ports = [(path, name) for path in ports for name in OF_PORTS]
    for path, name in (*of_wires, *of_ports):
        text = (host.read(f"{path}/{name}") or "").strip()
        if text.isdecimal():
            yield f"{LINK}{(wires | ports)[path]} {name.rsplit('/', 1)[-1]}", int(text)


def parse_snmp(text: str) -> Counters:
    """The segments that TCP sent, and sent again, in /proc/net/snmp.

    >>> parse_snmp("Tcp: InSegs OutSegs RetransSegs\\nTcp: 7 900 12\\n")
    {'sent': 900, 'retransmitted': 12}
    """
    lines = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        return {}
    known = dict(zip(*lines, strict=True))
    return {name: int(known.get(key, 0)) for name, key in (("sent", "OutSegs"), ("retransmitted", "RetransSegs"))}


def _of_gpus(host: Host) -> Counters:
    """What the driver wrote to the kernel's log, and the errors of memory; nothing where no driver is loaded."""
    if not host.exists("/proc/driver/nvidia") or (dmesg := host.which("dmesg")) is None:
        return {}
    found = parse_xids(host.run([dmesg], timeout=5).stdout)
    smi = host.which("nvidia-smi")
    if smi is not None:
        asked = "index,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total"
        answer = host.run([smi, f"--query-gpu={asked}", "--format=csv,noheader"], timeout=10)
        found.update(parse_ecc(answer.stdout))
    return found


def parse_xids(text: str) -> Counters:
    """How often each GPU reported each Xid.

    >>> parse_xids("[7.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\\n")
    {'GPU 0000:3b:00 Xid 79': 1}
    """
    return dict(Counter(f"{GPU}{bus} Xid {number}" for bus, number in XID.findall(text)))


def parse_ecc(text: str) -> Counters:
    """Errors of memory since the driver was loaded, by GPU.

    >>> parse_ecc("0, 3, 0\\n1, [N/A], [N/A]\\n")
    {'GPU 0 ECC corrected': 3, 'GPU 0 ECC uncorrected': 0}
    """
    found: Counters = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and all(part.isdecimal() for part in parts):
            found[f"{GPU}{parts[0]} ECC corrected"] = int(parts[1])
            found[f"{GPU}{parts[0]} ECC uncorrected"] = int(parts[2])
    return found


Rose = Mapping[str, Counters]
"""By host: what its counters rose by during the test."""


def rose(before: Mapping[int, Counters], after: Mapping[int, Counters], hosts: Sequence[str]) -> Rose:
    """The difference of two readings by the first rank of each host. What became smaller was reset meanwhile, and says nothing."""
    found: dict[str, Counters] = {}
    for rank in sorted(before.keys() & after.keys()):
        changes = {name: count - before[rank].get(name, 0) for name, count in after[rank].items()}
        found.setdefault(hosts[rank], {}).update({name: by for name, by in changes.items() if by > 0})
    return found


def _of(seen: Rose, kind: str) -> dict[str, Counters]:
    """The counters of a kind, of the hosts that have any."""
    mine = {
        host: {name.removeprefix(kind): count for name, count in counts.items() if name.startswith(kind)}
        for host, counts in seen.items()
    }
    return {host: counts for host, counts in mine.items() if counts}


def link_errors_rose(seen: Rose) -> Iterator[Finding]:
    """The error counters of a network interface or fabric port rose during the test, or its link went down for a moment."""
    if found := _of(seen, LINK):
        yield book.finding("link-errors-rose", Severity.WARNING, evidence=_lines(found), hosts=in_words(found))


def gpu_errors_rose(seen: Rose) -> Iterator[Finding]:
    """A GPU reported an error of its own during the test: an Xid in the kernel's log, or errors of its memory."""
    found = _of(seen, GPU)
    grave = {host: counts for host, counts in found.items() if any("ECC corrected" not in name for name in counts)}
    light = {host: counts for host, counts in found.items() if host not in grave}
    for hosts, severity in ((grave, Severity.ERROR), (light, Severity.WARNING)):
        if hosts:
            yield book.finding("gpu-errors-rose", severity, evidence=_lines(hosts), hosts=in_words(hosts))


def tcp_resends(seen: Rose) -> Iterator[Finding]:
    """A host had to send many TCP segments again during the test."""
    for host, counts in seen.items():
        again, sent = counts.get("retransmitted", 0), counts.get("sent", 0)
        if again >= MIN_RESENT and again > LOSSY * sent:
            yield book.finding("tcp-resends", Severity.WARNING, host=host, again=f"{again:,}", sent=f"{sent:,}")


def _lines(found: Mapping[str, Counters]) -> tuple[str, ...]:
    """What rose, a line for each host."""
    lines = [f"{host}: {', '.join(f'{name} +{by}' for name, by in counts.items())}" for host, counts in found.items()]
    return tuple(and_more_lines(lines, MAX_COUNTER_LINES, of="hosts"))


COUNTER_CHECKS = (link_errors_rose, gpu_errors_rose, tcp_resends)


PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED", "TORCH_FR_", "UCX_"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
FILES = ("~/.nccl.conf", "/etc/nccl.conf")
"""Where NCCL looks, in this order; NCCL_CONF_FILE replaces the first. What is set already is not overwritten (initEnv)."""


def read_variables(host: Host) -> dict[str, str]:
    """The environment's variables, and those of NCCL's files that the environment does not set."""
    found: dict[str, str] = {}
    for path in _files(host):
        for name, value in parse_conf(host.read(path) or ""):
            found.setdefault(name, value)
    for prefix in PREFIXES:
        found.update(host.variables(prefix))
    return {name: setting(name, value) for name, value in sorted(found.items())}


def read_config_files(host: Host) -> tuple[str, ...]:
    """NCCL's files that are here, each setting in them as "path: NAME=value"."""
    said = []
    for path in _files(host):
        said_here = parse_conf(host.read(path) or "")
        settings = [(name, setting(name, value)) for name, value in said_here]
        said += [f"{path}: {name}={value}" for name, value in settings] or ([path] if host.exists(path) else [])
    return tuple(said)


def parse_conf(text: str) -> Iterator[tuple[str, str]]:
    """The settings of an nccl.conf.

    >>> list(parse_conf("# ours\\nNCCL_IB_DISABLE=1\\nno setting\\nNCCL_SOCKET_IFNAME==eth0\\n"))
    [('NCCL_IB_DISABLE', '1'), ('NCCL_SOCKET_IFNAME', '=eth0')]
    """
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and name.startswith("NCCL_"):
            yield name.strip(), value.strip()


def _files(host: Host) -> tuple[str, ...]:
    home = host.variable("HOME")
    own = host.variable("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else None)
    return (own, FILES[1]) if own else (FILES[1],)


DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")


@dataclass(frozen=True, kw_only=True)
class _LinkAnswer:
    driver: str | None = None
    gpus: tuple[RankGpu, ...] = ()
    absent: str | None = None


def read_gpus(host: Host) -> tuple[tuple[RankGpu, ...], str | None]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and the driver's version; nothing where no driver is loaded."""
    if not any(host.exists(device) for device in DEVICES):
        return (), None
    answer = parse_answer(host.ask(sys.executable, "ask_links.py", timeout=20), _LinkAnswer, "gpus")
    if isinstance(answer, Gap):
        return (), None
    return visible(answer.gpus, host.variable("CUDA_VISIBLE_DEVICES")), answer.driver


def visible(gpus: Sequence[RankGpu], named: str | None) -> tuple[RankGpu, ...]:
    """The GPUs that a CUDA_VISIBLE_DEVICES leaves: those before the first entry that is none (MIG partitions leave all).

    >>> both = (RankGpu(index=0, name="A", uuid="GPU-aa"), RankGpu(index=1, name="A", uuid="GPU-bb"))
    >>> [gpu.index for gpu in visible(both, "GPU-b,0,-1,1")]
    [1, 0]
    """
    if named is None or "MIG-" in named:
        return tuple(gpus)
    left: list[RankGpu] = []
    for name in (part.strip() for part in named.split(",")):
        uuid = name.startswith("GPU-")
        gpu = next(
            (known for known in gpus if name == str(known.index) or (uuid and known.uuid.startswith(name))), None
        )
        if gpu is None or gpu in left:
            break
        left.append(gpu)
    return tuple(left)


WHO = "{who}"
"""A placeholder for the ranks, until it is known which ranks have the same finding."""

MAX_EVIDENCE = 8


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What a check looks at. ``several_hosts``: the job spans more than one host; on a single host a loopback does no harm.
    ``who``: how titles begin that a rank also reports by itself, "" where the reader knows who it is."""

    local: Local
    world: int
    backend: str
    several_hosts: bool
    gpu: RankGpu | None = None
    who: str = f"{WHO}: "


Check = Callable[[RankView], Iterator[Finding]]


def merged(
    checks: Sequence[Check], places: Sequence[tuple[int, RankView]], hosts: tuple[str, ...]
) -> tuple[Finding, ...]:
    """The findings of all ranks; those that differ only in the rank are joined."""
    same: dict[tuple[str, Severity, str], list[tuple[int, Finding]]] = {}
    for check in checks:
        for rank, place in places:
            for finding in check(place):
                same.setdefault((finding.rule, finding.severity, finding.title), []).append((rank, finding))
    return tuple(_merge(found, hosts) for found in same.values())


def _merge(found: Sequence[tuple[int, Finding]], hosts: tuple[str, ...]) -> Finding:
    who, first = named(tuple(sorted({rank for rank, _ in found})), hosts), found[0][1]
    said: dict[str, None] = {}
    for rank, finding in found:
        said.update(dict.fromkeys(text.replace(WHO, named((rank,), hosts)) for text in finding.evidence))
    evidence = and_more_lines(list(said), MAX_EVIDENCE, of="lines")
    return replace(first, title=first.title.replace(WHO, who), evidence=evidence)


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """GPUs with NVLinks on the board, by the driver's name for them: cards for PCIe slots have other names.

    ``nvlink``: one way, bytes a second. NVIDIA's data sheets name both directions together: half of that stands here.
    """

    name: str
    nvlink: float
    source: str


GPU_KINDS = (
    GpuKind(name=r"V100-SXM[23]", nvlink=150e9, source="V100 data sheet: 300 GB/s, 6 links"),
    GpuKind(name=r"A100-SXM4", nvlink=300e9, source="A100 data sheet: 600 GB/s, 12 links"),
    GpuKind(name=r"A800-SXM4", nvlink=200e9, source="A800 data sheet: 400 GB/s, 8 links"),
    GpuKind(name=r"H100 \d+GB HBM\d", nvlink=450e9, source="H100 data sheet, SXM: 900 GB/s, 18 links"),
    GpuKind(name=r"H200$", nvlink=450e9, source="H200 data sheet, SXM: 900 GB/s, 18 links"),
    GpuKind(name=r"GH200", nvlink=450e9, source="GH200 data sheet: 900 GB/s, 18 links"),
    GpuKind(name=r"G?B[23]00$", nvlink=900e9, source="Blackwell data sheet: 1,800 GB/s, 18 links"),
)
LANE = {"SDR": 2.5, "DDR": 5, "QDR": 10, "FDR10": 10, "FDR": 14, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
"""Gb/s of a lane of InfiniBand, by the roadmap of its trade association; adapters for computing have four."""
LANES = 4
RATE = re.compile(r"(\d+)X (\w+)\)")


def kind_of(name: str) -> GpuKind | None:
    """The kind of a GPU, None for one that is not in the table.

    >>> [kind.nvlink / 1e9 if kind else None for kind in map(kind_of, ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200"))]
    [450.0, None, 450.0]
    """
    return next((kind for kind in GPU_KINDS if re.search(rf"\b{kind.name}", name)), None)


def parse_full_rate(text: str) -> float | None:
    """What a port would carry with four lanes of its speed, in Gb/s.

    >>> parse_full_rate("200 Gb/sec (2X NDR)"), parse_full_rate("400 Gb/sec (4X NDR)"), parse_full_rate("25 Gb/sec")
    (400.0, 400.0, None)
    """
    match = RATE.search(text)
    return float(LANE[match[2]] * max(LANES, int(match[1]))) if match and match[2] in LANE else None


def gpu_links_missing(place: RankView) -> Iterator[Finding]:
    """The NVLinks of a GPU carry less than those of its kind do."""
    gpu, kind = place.gpu, kind_of(place.gpu.name) if place.gpu else None
    if gpu is None or kind is None or len(place.local.gpus) < 2 or place.backend != "nccl":
        return
    if (gpu.nvlink or 0.0) < kind.nvlink * 0.99:
        yield book.finding(
            "gpu-links-missing",
            Severity.WARNING,
            evidence=(f"{gpu.name}: {kind.source}",),
            who=WHO,
            gpu=gpu.index,
            rate=f"{(gpu.nvlink or 0.0) / 1e9:g}",
            expected=f"{kind.nvlink / 1e9:g}",
        )


def fabric_port_narrow(place: RankView) -> Iterator[Finding]:
    """An InfiniBand port runs with fewer lanes than four."""
    for port in place.local.fabric:
        narrow = port.rate is not None and port.full is not None and port.rate < 0.99 * port.full
        if narrow and port.state == "ACTIVE" and port.link_layer == "InfiniBand":
            yield book.finding(
                "fabric-port-narrow",
                Severity.WARNING,
                who=WHO,
                device=port.device,
                port=port.port,
                rate=f"{port.rate:g}",
                full=f"{port.full:g}",
            )


EXPECTED_CHECKS: tuple[Check, ...] = (gpu_links_missing, fabric_port_narrow)


LOOKUP_TIMEOUT_SECONDS = 3.0

NOT_READ = "not read: "
"""The beginning of ``acs`` where it could not be read."""


def look_local(host: Host, rank: Rank, backend: str) -> Local:
    """Everything about this process's host that communication depends on. ``backend`` "auto" is nccl where there are GPUs."""
    gpus, driver = read_gpus(host)
    interfaces, variables, name = read_interfaces(), read_variables(host), socket.gethostname()
    backend = ("nccl" if gpus else "gloo") if backend == "auto" else backend
    resolves_to = bounded(lambda: _resolve(name), LOOKUP_TIMEOUT_SECONDS) or ()
    shm, tmp = _shm(), host.variable("TMPDIR") or "/tmp"
    return Local(
        hostname=name,
        resolves_to=resolves_to,
        interfaces=interfaces,
        chosen=choose(backend, interfaces, resolves_to, variables),
        routed=routed(rank.master, rank.port, interfaces, patience=LOOKUP_TIMEOUT_SECONDS),
        shm_total=shm[0] if shm else None,
        shm_free=shm[1] if shm else None,
        tmp=tmp,
        tmp_free=_free(tmp),
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


def _free(folder: str) -> int | None:
    """The bytes that may still be written there, 0 where there is no room for another file; None where it is not there. Some file
    systems count no files."""
    with contextlib.suppress(OSError):
        size = os.statvfs(folder)
        return 0 if size.f_files and not size.f_favail else size.f_bavail * size.f_frsize
    return None


def _soft(kind: int) -> int | None:
    """This process's own limit, None where it has none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
