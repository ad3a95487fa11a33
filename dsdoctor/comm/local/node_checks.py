"""A rank's memory, limits, fabric ports, GPU and NCCL settings -> findings. Looks at nothing."""

from collections.abc import Iterator

from dsdoctor.comm.local.facts import NOT_READ
from dsdoctor.comm.local.rank_view import MOST_EVIDENCE, WHO, Check, RankView
from dsdoctor.core.finding import Finding, instead, step

GIB, MIB = 1 << 30, 1 << 20
SMALL_SHM = 64 * MIB
"""Docker's default. NCCL's shared memory transport takes about 10 MB of it for each pair of neighbours on a host."""

TAKEN = 2 * GIB
"""Less than this may be the context of another rank, or a display."""


def comm_shm_too_small(place: RankView) -> Iterator[Finding]:
    """/dev/shm is no larger than Docker makes it by default (64 MiB), or no more of it is free.

    Why it matters: ranks of one host exchange through it. NCCL's shared memory transport, DeepSpeed's shared memory
    collectives on the CPU and data loaders with workers use it. NCCL then says "Error while creating shared memory
    segment", others die of a bus error.

    How to fix it: give the container more. In Kubernetes mount an emptyDir of medium Memory on /dev/shm. Where it is full,
    see what fills it: segments of NCCL (nccl-*) that no process uses are those of a job that died, and may be deleted. Only
    root, outside of any container, sees all processes.

        $ docker run --shm-size=16g ...
        $ sudo mount -o remount,size=16g /dev/shm
        $ sudo sh -c 'fuser -v /dev/shm/*'

    Since: 0.1
    """
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
    """A port of an InfiniBand or RoCE device is not active.

    "INIT" with a link that is up means that no subnet manager runs; "Polling" means that no cable or no switch answers.
    The second port of a card whose first one works is often just not cabled.

    Why it matters: NCCL leaves that port out, or does without the fabric altogether.

    How to fix it: see what the port says, then check cable and switch.

        $ ibstat
        $ ibv_devinfo

    Since: 0.1
    """
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
    """The GPU's PCIe link has fewer lanes than card and slot could have.

    The generation is not judged: a link drops to Gen1 while the GPU is idle, which is normal. The number of lanes does
    not change by itself.

    Why it matters: copies to and from that GPU are slower than those of the others. Dust, a riser, a BIOS that splits
    the slot, or a slot that is wired so are the causes.

    How to fix it: reseat the card, and look at the slot's setting.

        $ nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv

    Since: 0.1
    """
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
    """Memory of the rank's GPU was taken before the test began.

    By a job that did not end, by another rank or by another user.

    Why it matters: the rank runs out of memory where the others do not, and those wait for it until they time out.

    How to fix it: see who holds it, and end what is left over.

        $ nvidia-smi

    Since: 0.1
    """
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
    """A variable switches a path of NCCL off, forces a choice on it, or makes it write a log.

    NCCL reads the environment, ~/.nccl.conf and /etc/nccl.conf.

    Why it matters: such a setting is good for a test and slow when it is left set. It comes from an old search for a
    fault, from an image, or from a recipe for other machines.

    How to fix it: remove it unless it is there on purpose.

        $ unset NAME

    Since: 0.1
    """
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
    sends their traffic up through the processor.

    GPUs joined by NVLink do not use that path; their network cards do. Only root can see ACS.

    Why it matters: it is slow at best. At worst init succeeds, and the first exchange stands still with the GPUs at 100 %,
    or gives wrong data (nccl issue 2079). Virtual machines need both; on bare metal they can be switched off.

    How to fix it: boot with the IOMMU in passthrough (iommu=pt on the kernel's command line), or off where nothing needs it;
    switch ACS off at the bridges that the finding names (until the next boot), or in the BIOS. Then see whether P2P works.

        $ nvidia-smi topo -p2p r
        $ sudo lspci -vvv | grep -i acsctl
        $ sudo setpci -s BRIDGE ECAP_ACS+0x6.w=0000

    Since: 0.2
    """
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


CHECKS: tuple[Check, ...] = (
    comm_shm_too_small,
    fabric_port_down,
    pcie_link_degraded,
    gpu_memory_taken,
    nccl_variable_left_set,
    p2p_through_processor,
)
