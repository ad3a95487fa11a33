"""What NCCL wrote during a test -> findings. Looks at nothing."""

from collections.abc import Callable, Iterator

from dsdoctor.comm.collectives.nccl_log import NcclFacts
from dsdoctor.comm.models import Claim
from dsdoctor.comm.rank_names import by_rank, named
from dsdoctor.core.finding import Finding, step

MOST_LINES = 8


def examine(facts: NcclFacts, claims: tuple[Claim, ...]) -> tuple[Finding, ...]:
    """Every finding about NCCL's log."""
    return tuple(finding for check in CHECKS for finding in check(facts, claims))


def nccl_init_incomplete(facts: NcclFacts, claims: tuple[Claim, ...]) -> Iterator[Finding]:
    """A rank began NCCL's init and did not end it.

    Why it matters: it waits for another rank, or its network cannot reach the others. The rank to look for may be
    another: a rank that is not in the log at all did not come to NCCL.

    How to fix it: see that NCCL uses the interface that joins the hosts, and that all ports are open on it.

        $ export NCCL_SOCKET_IFNAME==eth0
        $ export NCCL_DEBUG=INFO

    Since: 0.1
    """
    if facts.incomplete:
        yield Finding.error(
            "nccl-init-incomplete",
            f"{named(facts.incomplete, by_rank(claims))} began NCCL's init of {facts.world} ranks and did not end it",
            evidence=(*(f"bootstrap over {name}" for name in facts.bootstrap[:2]), *facts.warnings[:MOST_LINES]),
            fix="see that NCCL takes the interface that joins the hosts, and that all ports are open on it",
            steps=(step("export NCCL_SOCKET_IFNAME=={interface}"), step("export NCCL_DEBUG=INFO")),
        )


def nccl_network_is_socket(facts: NcclFacts, claims: tuple[Claim, ...]) -> Iterator[Finding]:
    """The hosts have InfiniBand or RoCE with an active port, and NCCL uses TCP sockets.

    In containers libibverbs or /dev/infiniband is most often missing; or NCCL_IB_DISABLE was left set, or NCCL_IB_HCA
    names a device that is not there.

    Why it matters: TCP has about a tenth of the speed.

    How to fix it: give the container the devices and the library, and unset NCCL_IB_DISABLE.

        $ ls /dev/infiniband
        $ ibv_devinfo -l
        $ sudo apt-get install libibverbs1 ibverbs-providers
        $ docker run --device=/dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 ...

    Since: 0.1
    """
    active = {
        f"{port.device} of {claim.host}"
        for claim in claims
        for port in (claim.local.fabric if claim.local else ())
        if port.state == "ACTIVE"
    }
    if "Socket" in facts.networks and active and len(set(by_rank(claims))) > 1:
        yield Finding.warning(
            "nccl-network-is-socket",
            f"NCCL uses TCP sockets, though {min(active)} is active",
            evidence=facts.no_fabric or ("NCCL does not say why",),
            fix="give the container the devices and the library, and take NCCL_IB_DISABLE out",
            steps=(
                step("ls /dev/infiniband"),
                step("ibv_devinfo -l"),
                step("sudo apt-get install libibverbs1 ibverbs-providers"),
                step("docker run --device=/dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 ..."),
            ),
        )


def nccl_p2p_off(facts: NcclFacts, claims: tuple[Claim, ...]) -> Iterator[Finding]:
    """GPUs of one host do not reach each other directly: NCCL goes through the processor's memory, or through a socket.

    Why it matters: that is right where the GPUs have no NVLink and are attached to different processors. Otherwise P2P
    was switched off, the driver does not offer it on this model, or a container hides the GPUs from each other.

    How to fix it: see what joins the GPUs, and whether the driver offers P2P.

        $ nvidia-smi topo -p2p r

    Since: 0.1
    """
    hosts, slow = by_rank(claims), []
    for edge, transport in facts.edges.items():
        source, target = (int(rank) for rank in edge.split(" -> "))
        together = max(source, target) < len(hosts) and hosts[source] == hosts[target]
        if together and not transport.startswith(("P2P", "NVLS")):
            slow.append(f"{edge} via {transport}")
    if slow:
        off = [f"{name}={value}" for name, value in facts.variables.items() if name.startswith("NCCL_P2P_")]
        yield (Finding.warning if off else Finding.note)(
            "nccl-p2p-off",
            f"{len(slow)} of {len(facts.edges)} edges join GPUs of one host without P2P: {slow[0]}",
            evidence=(*off, *facts.no_p2p[:2], *slow[:MOST_LINES]),
            fix="see what joins the GPUs, and whether the driver offers P2P",
            steps=(step("nvidia-smi topo -p2p r"),),
        )


def nccl_direct_rdma_off(facts: NcclFacts, _: tuple[Claim, ...]) -> Iterator[Finding]:
    """InfiniBand is used, and the network cards cannot read the GPUs' memory.

    Why it matters: all data takes a detour through the host's memory. Direct access needs the module nvidia_peermem, or
    a kernel and driver with DMA-BUF, and a card near enough to the GPU.

    How to fix it: load the module, and see how far card and GPU are apart.

        $ sudo modprobe nvidia_peermem
        $ nvidia-smi topo -m

    Since: 0.1
    """
    if facts.direct is False and facts.hcas:
        yield Finding.warning(
            "nccl-direct-rdma-off",
            f"GPU Direct RDMA is off for some of {', '.join(facts.hcas[:MOST_LINES])}",
            fix="load the module, and see how far card and GPU are apart",
            steps=(step("sudo modprobe nvidia_peermem"), step("nvidia-smi topo -m")),
        )


def nccl_warned(facts: NcclFacts, _: tuple[Claim, ...]) -> Iterator[Finding]:
    """NCCL wrote warnings during the test.

    Why it matters: they often name the cause of an error that other findings report.

    How to fix it: let dsdoctor read the log; it knows many of these messages.

        $ python -m dsdoctor diagnose LOG

    Since: 0.1
    """
    lines = facts.warnings
    if lines:
        yield Finding.note(
            "nccl-warned",
            f"NCCL wrote {len(lines)} different warnings, the first: {lines[0][:160]}",
            evidence=tuple(line[:300] for line in lines[:MOST_LINES]),
        )


CHECKS: tuple[Callable[[NcclFacts, tuple[Claim, ...]], Iterator[Finding]], ...] = (
    nccl_init_incomplete,
    nccl_network_is_socket,
    nccl_p2p_off,
    nccl_direct_rdma_off,
    nccl_warned,
)
