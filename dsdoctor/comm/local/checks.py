"""A rank's memory, limits, fabric ports, GPU and NCCL settings -> findings. Looks at nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsdoctor.comm.local import facts
from dsdoctor.comm.local.facts import MAX_EVIDENCE, NOT_READ, WHO, Check, RankView, merged
from dsdoctor.comm.local.interfaces import is_loopback, matches
from dsdoctor.comm.models import Claim, Local, Rank, by_rank
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

# The limits of a rank's own process -> findings, and whether a limit is what broke a test. Looks at nothing.


GIB, MIB = 1 << 30, 1 << 20
LITTLE_MEMLOCK = 1 * GIB
LITTLE_SPACE = 4 * GIB
"""torch on the CPU maps about 1 GiB before it allocates anything; with CUDA far more."""
TINY_SPACE = {"gloo": 1 * GIB, "nccl": 64 * GIB}
"""Below, torch or its threads cannot be loaded."""
FILES_BESIDE = 32
"""Open files that a rank has without a connection to any other: below it cannot even say what it lacks."""


def memlock_limited(place: RankView) -> Iterator[Finding]:
    """This process may lock little memory, and InfiniBand and RoCE need locked memory for every buffer."""
    limit = place.local.memlock
    if place.local.fabric and limit is not None and limit < LITTLE_MEMLOCK:
        yield book.finding(
            "memlock-limited",
            Severity.WARNING if place.backend == "nccl" else Severity.NOTE,
            evidence=("RLIMIT_MEMLOCK of this process",),
            who=WHO,
            limit=f"{limit / MIB:g}",
        )


def nofile_low(place: RankView) -> Iterator[Finding]:
    """This process may open few files, and each connection between ranks is one."""
    limit, needed = place.local.nofile, 4 * place.world + 256
    if limit is not None and limit < needed:
        yield book.finding(
            "nofile-low",
            Severity.WARNING,
            evidence=("RLIMIT_NOFILE of this process",),
            who=place.who,
            limit=limit,
            ranks=place.world,
            needed=needed,
        )


def address_space_limited(place: RankView) -> Iterator[Finding]:
    """This process may map little memory (`ulimit -v`, RLIMIT_AS), whatever memory the host has."""
    limit = place.local.address_space
    if limit is not None and limit < (LITTLE_SPACE if place.backend != "nccl" else TINY_SPACE["nccl"]):
        yield book.finding(
            "address-space-limited",
            Severity.WARNING,
            evidence=("RLIMIT_AS of this process",),
            who=place.who,
            limit=f"{limit / MIB:.0f}",
        )


def is_tiny(local: Local, world: int, backend: str) -> bool:
    """Whether this process can hardly run at all: what breaks is then the limit's doing."""
    files = local.nofile is not None and local.nofile < world + FILES_BESIDE
    space = local.address_space is not None and local.address_space < TINY_SPACE.get(backend, TINY_SPACE["gloo"])
    return files or space


def blamed(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same findings with those about files and address space as the errors that they are."""
    rules = {"nofile-low", "address-space-limited"}
    return tuple(
        replace(finding, severity=Severity.ERROR) if finding.rule in rules else finding for finding in findings
    )


LIMIT_CHECKS: tuple[Check, ...] = (memlock_limited, nofile_low, address_space_limited)


# A rank's hostname and interfaces -> findings. Looks at nothing.


def hostname_unusable(place: RankView) -> Iterator[Finding]:
    """The host's own name resolves to nothing, to an address that this host does not have, or to one that never leaves it."""
    local = place.local
    here = {interface.address for interface in local.interfaces}
    if not place.several_hosts or "GLOO_SOCKET_IFNAME" in local.variables:
        return
    known = [address for address in local.resolves_to if address in here or is_loopback(address)]
    if known and not is_loopback(local.resolves_to[0]):
        return
    yield book.finding(
        "hostname-unusable",
        Severity.WARNING,
        case="loopback" if known else "" if local.resolves_to else "nothing",
        evidence=(f"{local.hostname} -> {', '.join(local.resolves_to) or 'nothing'}",),
        who=WHO,
        address=next(iter(known), None),
        addresses=local.resolves_to,
        interface=_gloo_interface(local),
    )


def interface_named_absent(place: RankView) -> Iterator[Finding]:
    """A variable names a network interface that this host does not have, or that is down."""
    local = place.local
    names = {interface.name for interface in local.interfaces}
    running = {interface.name for interface in local.interfaces if interface.up}
    gloo, nccl = local.variables.get("GLOO_SOCKET_IFNAME", ""), local.variables.get("NCCL_SOCKET_IFNAME", "")
    absent = [name for name in gloo.split(",") if len(gloo) > 1 and name not in names]
    settings = [(f"GLOO_SOCKET_IFNAME={gloo}", "gloo")] if absent else []
    if len(nccl) > 1 and not any(matches(name, nccl) for name in running):
        settings.append((f"NCCL_SOCKET_IFNAME={nccl}", "nccl"))
    for setting, backend in settings:
        yield book.finding(
            "interface-named-absent",
            Severity.ERROR if backend == place.backend else Severity.WARNING,
            case="nccl" if place.backend == "nccl" else "",
            evidence=("{who}: " + _has(local),),
            who=WHO,
            setting=setting,
            interface=local.routed.name if local.routed else None,
        )


def _gloo_interface(local: Local) -> str | None:
    """The interface towards the master, else the first real one."""
    if local.routed and not is_loopback(local.routed.address):
        return local.routed.name
    return next((one.name for one in local.interfaces if one.kind == "physical" and one.up), None)


def _has(local: Local) -> str:
    shown = [
        f"{interface.name} {interface.address}"
        for interface in local.interfaces
        if interface.up and not interface.address.startswith("fe80")
    ]
    return ", ".join(shown[:MAX_EVIDENCE]) or "no interface is up"


NETWORK_CHECKS: tuple[Check, ...] = (hostname_unusable, interface_named_absent)


SMALL_SHM = 64 * MIB
"""Docker's default. NCCL's shared memory transport takes about 10 MB of it for each pair of neighbours on a host."""

TAKEN = 2 * GIB
"""Less than this may be the context of another rank, or a display."""


def comm_shm_too_small(place: RankView) -> Iterator[Finding]:
    """/dev/shm is no larger than Docker makes it by default (64 MiB), or no more of it is free."""
    total, free = place.local.shm_total, place.local.shm_free or 0
    if total is None or min(total, free) > SMALL_SHM:
        return
    yield book.finding(
        "comm-shm-too-small",
        Severity.WARNING,
        case="" if total <= SMALL_SHM else "full",
        evidence=(f"{WHO}: {free / MIB:.0f} MiB of it free",),
        who=WHO,
        total=f"{total / MIB:.0f}",
    )


def fabric_port_down(place: RankView) -> Iterator[Finding]:
    """A port of an InfiniBand or RoCE device is not active."""
    ports = place.local.fabric
    active = {port.device for port in ports if port.state == "ACTIVE"}
    for port in ports:
        if port.state == "ACTIVE":
            continue
        spare = port.physical == "Disabled" or port.device in active
        yield book.finding(
            "fabric-port-down",
            Severity.NOTE if spare or place.backend != "nccl" else Severity.WARNING,
            case="no-subnet-manager" if port.state == "INIT" and port.physical == "LinkUp" else "",
            evidence=(f"{port.link_layer}, {len(active)} devices of this host are active",),
            who=WHO,
            device=port.device,
            port=port.port,
            state=port.state,
            physical=port.physical,
        )


def pcie_link_degraded(place: RankView) -> Iterator[Finding]:
    """The GPU's PCIe link has fewer lanes than card and slot could have."""
    gpu = place.gpu
    if gpu is None or gpu.pcie is None or gpu.pcie_max is None or gpu.pcie[1] >= gpu.pcie_max[1]:
        return
    yield book.finding(
        "pcie-link-degraded",
        Severity.WARNING,
        evidence=(
            f"{WHO}: GPU {gpu.index}, {gpu.name}: Gen{gpu.pcie[0]} x{gpu.pcie[1]} now, at most Gen{gpu.pcie_max[0]} "
            f"x{gpu.pcie_max[1]} (a low generation while idle is normal)",
        ),
        who=WHO,
        lanes=gpu.pcie[1],
        possible=gpu.pcie_max[1],
    )


def gpu_memory_taken(place: RankView) -> Iterator[Finding]:
    """Memory of the rank's GPU was taken before the test began."""
    gpu = place.gpu
    if gpu is None or gpu.free is None or gpu.total is None or gpu.total - gpu.free < max(TAKEN, gpu.total // 20):
        return
    yield book.finding(
        "gpu-memory-taken",
        Severity.ERROR if gpu.free < GIB else Severity.WARNING,
        case="full" if gpu.free < GIB else "",
        evidence=(f"{WHO}: GPU {gpu.index}: {(gpu.total - gpu.free) / GIB:.1f} of {gpu.total / GIB:.1f} GiB taken",),
        who=WHO,
    )


DISABLING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_DISABLE_INTRA")
FORCING = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_LAUNCH_MODE"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NET", "NCCL_CHECKS_DISABLE", "NCCL_MAX_CTAS"),
)
TALKATIVE = ("INFO", "TRACE")


def nccl_variable_left_set(place: RankView) -> Iterator[Finding]:
    """A variable switches a path of NCCL off, forces a choice on it, or makes it write a log."""
    local = place.local
    off = [name for name in DISABLING if local.variables.get(name, "0") not in ("0", "")]
    off = [name for name in off if name != "NCCL_IB_DISABLE" or local.fabric]
    forced = [name for name in FORCING if name in local.variables]
    loud = ["NCCL_DEBUG"] if local.variables.get("NCCL_DEBUG", "").upper() in TALKATIVE else []
    for name in (*off, *forced, *loud):
        setting = f"{name}={local.variables[name]}"
        yield book.finding(
            "nccl-variable-left-set",
            Severity.WARNING if place.backend == "nccl" and name in off else Severity.NOTE,
            case="" if name in off else "forced" if name in forced else "log",
            evidence=tuple(line for line in local.config_files if line.endswith(f": {setting}")),
            who=WHO,
            setting=setting,
            variable=name,
        )


def p2p_through_processor(place: RankView) -> Iterator[Finding]:
    """GPUs do not reach each other directly over PCIe: the IOMMU translates the addresses of devices, or PCIe access control (ACS)
    sends their traffic up through the processor."""
    local = place.local
    joined = len(local.gpus) < 2 or all(gpu.nvlink for gpu in local.gpus)
    severity = Severity.NOTE if joined else Severity.WARNING
    unread = tuple(text for text in local.acs if text.startswith(NOT_READ))
    if local.iommu == "translating" and local.gpus:
        yield book.finding("p2p-through-processor", severity, evidence=("/sys/kernel/iommu_groups", *unread), who=WHO)
    if local.acs and not unread and len(local.gpus) > 1:
        yield book.finding(
            "p2p-through-processor",
            severity,
            case="acs",
            evidence=local.acs[:MAX_EVIDENCE],
            who=WHO,
            count=len(local.acs),
            bridge=local.acs[0],
        )


def tmp_full(place: RankView) -> Iterator[Finding]:
    """The folder for temporary files of a host (TMPDIR, else /tmp) is full."""
    free, folder = place.local.tmp_free, place.local.tmp
    if free is None or free >= MIB:
        return
    evidence = (f"{WHO}: {free // 1024} KiB of it free, or no more files",)
    yield book.finding("tmp-full", Severity.WARNING, evidence=evidence, who=WHO, folder=folder)


NODE_CHECKS: tuple[Check, ...] = (
    comm_shm_too_small,
    tmp_full,
    fabric_port_down,
    pcie_link_degraded,
    gpu_memory_taken,
    nccl_variable_left_set,
    p2p_through_processor,
)


# The hosts of all ranks -> findings. Looks at nothing; a problem that many ranks share is one finding that names them.


def too_little(rank: Rank, local: Local, *, backend: str, who: str = f"{WHO}: ") -> tuple[Finding, ...]:
    """The limits of a rank that broke, as errors, where they leave it hardly anything. ``who``: how their titles begin."""
    if not is_tiny(local, rank.world, backend):
        return ()
    place = RankView(local=local, world=rank.world, backend=backend, several_hosts=False, who=who)
    found = merged(LIMIT_CHECKS, [(rank.rank, place)], (*("",) * rank.rank, local.hostname))
    return tuple(finding for finding in blamed(found) if finding.severity is Severity.ERROR)


def examine_all(claims: Iterable[Claim]) -> tuple[Finding, ...]:
    """The findings about the hosts of all ranks, each problem once, with the ranks that have it."""
    known = [(claim, claim.local) for claim in claims if claim.local is not None]
    several = len({claim.host for claim, _ in known}) > 1
    places = []
    for claim, local in known:
        gpu = next((gpu for gpu in local.gpus if gpu.uuid == claim.gpu), None)
        place = RankView(local=local, world=claim.world, backend=claim.backend, several_hosts=several, gpu=gpu)
        places.append((claim.rank, place))
    return merged(CHECKS, places, by_rank(claim for claim, _ in known))


CHECKS: tuple[Check, ...] = (*NETWORK_CHECKS, *LIMIT_CHECKS, *NODE_CHECKS, *facts.EXPECTED_CHECKS)
