"""A rank's memory, limits, fabric ports, GPU and NCCL settings -> findings. Looks at nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsdoctor.comm.local import facts
from dsdoctor.comm.local.facts import MOST_EVIDENCE, NOT_READ, WHO, Check, RankView, merged
from dsdoctor.comm.local.interfaces import is_loopback, matches
from dsdoctor.comm.models import Claim, Local, Rank, by_rank
from dsdoctor.core.finding import Finding, Severity, Step, instead, step

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
        yield (Finding.warning if place.backend == "nccl" else Finding.note)(
            "memlock-limited",
            f"{WHO}: only {limit / MIB:g} MiB may be locked, and InfiniBand locks every buffer",
            evidence=("RLIMIT_MEMLOCK of this very process",),
            fix="raise the limit where the ranks are started (Slurm: LimitMEMLOCK=infinity in slurmd.service)",
            steps=(
                step("ulimit -l unlimited"),
                instead("docker run --ulimit memlock=-1 --cap-add IPC_LOCK ..."),
            ),
        )


def nofile_low(place: RankView) -> Iterator[Finding]:
    """This process may open few files, and each connection between ranks is one."""
    limit, needed = place.local.nofile, 4 * place.world + 256
    if limit is not None and limit < needed:
        yield Finding.warning(
            "nofile-low",
            f"{WHO}: only {limit} files may be open (ulimit -n), {place.world} ranks need about {needed}",
            evidence=("RLIMIT_NOFILE of this very process",),
            fix="raise the limit where the ranks are started",
            steps=(step("ulimit -n 65536"), instead("docker run --ulimit nofile=65536 ...")),
        )


def address_space_limited(place: RankView) -> Iterator[Finding]:
    """This process may map little memory (`ulimit -v`, RLIMIT_AS), whatever memory the host has."""
    limit = place.local.address_space
    if limit is not None and limit < (LITTLE_SPACE if place.backend != "nccl" else TINY_SPACE["nccl"]):
        yield Finding.warning(
            "address-space-limited",
            f"{WHO}: only {limit / MIB:.0f} MiB of address space may be used (ulimit -v), and torch alone needs about 1 GiB",
            evidence=("RLIMIT_AS of this very process",),
            fix="take the limit away where the ranks are started",
            steps=(step("ulimit -v unlimited"),),
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
    """A variable names a network interface that this host does not have, or that is down."""
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
    small = total <= SMALL_SHM
    larger = step("docker run --shm-size=16g ..."), instead("sudo mount -o remount,size=16g /dev/shm")
    yield Finding.warning(
        "comm-shm-too-small",
        f"{WHO}: /dev/shm has {total / MIB:.0f} MiB in all{'' if small else ' and is full'}; ranks of one host need 1 GiB and more",
        evidence=(f"{WHO}: {free / MIB:.0f} MiB of it free",),
        fix="give the container more (Kubernetes: an emptyDir of medium Memory on /dev/shm)"
        if small
        else "see what fills it: nccl-* that no process uses are those of a job that died, and may be deleted",
        steps=larger if small else (step("sudo sh -c 'fuser -v /dev/shm/*'"),),
    )


def fabric_port_down(place: RankView) -> Iterator[Finding]:
    """A port of an InfiniBand or RoCE device is not active."""
    ports = place.local.fabric
    active = {port.device for port in ports if port.state == "ACTIVE"}
    for port in ports:
        if port.state == "ACTIVE":
            continue
        spare = port.physical == "Disabled" or port.device in active
        why = ": no subnet manager" if port.state == "INIT" and port.physical == "LinkUp" else ""
        yield (Finding.note if spare or place.backend != "nccl" else Finding.warning)(
            "fabric-port-down",
            f"{WHO}: {port.device} port {port.port} is {port.state} ({port.physical}){why}",
            evidence=(f"{port.link_layer}, {len(active)} devices of this host are active",),
            fix="see what the port says, then cable and switch",
            steps=(step("ibstat"), instead("ibv_devinfo")),
        )


def pcie_link_degraded(place: RankView) -> Iterator[Finding]:
    """The GPU's PCIe link has fewer lanes than card and slot could have."""
    gpu = place.gpu
    if gpu is None or gpu.pcie is None or gpu.pcie_max is None or gpu.pcie[1] >= gpu.pcie_max[1]:
        return
    yield Finding.warning(
        "pcie-link-degraded",
        f"{WHO}: the GPU's PCIe link runs with {gpu.pcie[1]} of {gpu.pcie_max[1]} lanes",
        evidence=(
            f"{WHO}: GPU {gpu.index}, {gpu.name}: Gen{gpu.pcie[0]} x{gpu.pcie[1]} now, at most Gen{gpu.pcie_max[0]} "
            f"x{gpu.pcie_max[1]} (a low generation while idle is normal)",
        ),
        fix="reseat the card, and look at the slot's setting",
        steps=(step("nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv"),),
    )


def gpu_memory_taken(place: RankView) -> Iterator[Finding]:
    """Memory of the rank's GPU was taken before the test began."""
    gpu = place.gpu
    if gpu is None or gpu.free is None or gpu.total is None or gpu.total - gpu.free < max(TAKEN, gpu.total // 20):
        return
    yield (Finding.error if gpu.free < GIB else Finding.warning)(
        "gpu-memory-taken",
        f"{WHO}: the GPU's memory is {'full' if gpu.free < GIB else 'partly taken'} before the test began",
        evidence=(f"{WHO}: GPU {gpu.index}: {(gpu.total - gpu.free) / GIB:.1f} of {gpu.total / GIB:.1f} GiB taken",),
        fix="see who holds it, and end what is left over",
        steps=(step("nvidia-smi"),),
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
    for names, made, effect in (
        (off, Finding.warning, "switches a path of NCCL off"),
        (forced, Finding.note, "forces a choice on NCCL"),
        (loud, Finding.note, "makes NCCL write a log"),
    ):
        for name in names:
            setting = f"{name}={local.variables[name]}"
            yield (made if place.backend == "nccl" else Finding.note)(
                "nccl-variable-left-set",
                f"{WHO}: {setting} {effect}",
                evidence=tuple(line for line in local.config_files if line.endswith(f": {setting}")),
                fix="remove it unless it is there on purpose",
                steps=(step("unset {variable}", variable=name),),
            )


def p2p_through_processor(place: RankView) -> Iterator[Finding]:
    """GPUs do not reach each other directly over PCIe: the IOMMU translates the addresses of devices, or PCIe access control (ACS)
    sends their traffic up through the processor."""
    local = place.local
    joined = len(local.gpus) < 2 or all(gpu.nvlink for gpu in local.gpus)
    made = Finding.note if joined else Finding.warning
    unread = tuple(text for text in local.acs if text.startswith(NOT_READ))
    if local.iommu == "translating" and local.gpus:
        yield made(
            "p2p-through-processor",
            f"{WHO}: the IOMMU translates, so GPUs do not reach each other straight over PCIe",
            evidence=("/sys/kernel/iommu_groups", *unread),
            fix="boot with the IOMMU in passthrough (iommu=pt on the kernel's command line), or off where nothing needs it;"
            " then see whether P2P works",
            steps=(step("nvidia-smi topo -p2p r"),),
        )
    if local.acs and not unread and len(local.gpus) > 1:
        yield made(
            "p2p-through-processor",
            f"{WHO}: ACS redirects traffic between devices at {len(local.acs)} PCI bridges",
            evidence=local.acs[:MOST_EVIDENCE],
            fix="switch it off at those bridges (until the next boot), or in the BIOS",
            steps=(
                step("sudo lspci -vvv | grep -i acsctl"),
                step("sudo setpci -s {bridge} ECAP_ACS+0x6.w=0000", bridge=local.acs[0]),
            ),
        )


def tmp_full(place: RankView) -> Iterator[Finding]:
    """The folder for temporary files of a host (TMPDIR, else /tmp) is full."""
    free, folder = place.local.tmp_free, place.local.tmp
    if free is None or free >= MIB:
        return
    yield Finding.warning(
        "tmp-full",
        f"{WHO}: {folder} is full",
        evidence=(f"{WHO}: {free // 1024} KiB of it free, or no more files",),
        fix="free some room there, or set TMPDIR to a folder that has it",
        steps=(step("df -h {folder}", folder=folder), step("df -i {folder}", folder=folder)),
    )


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


def too_little(rank: Rank, local: Local, *, backend: str) -> tuple[Finding, ...]:
    """The limits of a rank that broke, as errors, where they leave it hardly anything."""
    if not is_tiny(local, rank.world, backend):
        return ()
    place = RankView(local=local, world=rank.world, backend=backend, several_hosts=False)
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
