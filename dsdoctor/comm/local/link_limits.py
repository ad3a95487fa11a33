"""Claims -> the bandwidth of the slowest link between the ranks, as their hardware reports it. Pure.

Numbers are one way, bytes a second (1 GB/s = 1e9), and an upper bound for a ring; busbw is compared with them.
"""

from collections.abc import Sequence

from dsdoctor.comm.local.interfaces import matches
from dsdoctor.comm.models import Claim, RankGpu
from dsdoctor.comm.results import Limit

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
