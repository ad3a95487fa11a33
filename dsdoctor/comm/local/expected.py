"""What the links of a GPU or of a fabric port of a known kind carry, with the source; a host whose links carry less -> findings.

One way, bytes a second. NVIDIA's data sheets name both directions together: half of that stands here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.local.rank_view import WHO, Check, RankView
from dsdoctor.core.finding import Finding, instead, step


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """GPUs with NVLinks on the board, by the driver's name for them: cards for PCIe slots have other names."""

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
    """The NVLinks of a GPU carry less than those of its kind do.

    The kinds and their sources stand on the page of `dsdoctor comm`. A virtual machine with a single GPU often has none,
    and is not judged.

    Why it matters: all GPUs of the host wait for the slowest in each collective. Without any link NCCL goes by PCIe, at
    a tenth of the bandwidth. A link that is down, or the service nvidia-fabricmanager that is not running, are the causes.

    How to fix it: look at the links, and at the service where the host has NVSwitches.

        $ nvidia-smi nvlink --status
        $ systemctl status nvidia-fabricmanager

    Since: 0.1
    """
    gpu, kind = place.gpu, kind_of(place.gpu.name) if place.gpu else None
    if gpu is None or kind is None or len(place.local.gpus) < 2 or place.backend != "nccl":
        return
    if (gpu.nvlink or 0.0) < kind.nvlink * 0.99:
        yield Finding.warning(
            "gpu-links-missing",
            f"{WHO}: the NVLinks of GPU {gpu.index} carry {(gpu.nvlink or 0.0) / 1e9:g} GB/s, those of its kind"
            f" {kind.nvlink / 1e9:g}",
            evidence=(f"{gpu.name}: {kind.source}",),
            fix="look at the links, and at the service where the host has NVSwitches",
            steps=(step("nvidia-smi nvlink --status"), instead("systemctl status nvidia-fabricmanager")),
        )


def fabric_port_narrow(place: RankView) -> Iterator[Finding]:
    """An InfiniBand port runs with fewer lanes than four.

    Why it matters: at two lanes it carries half, and every collective between hosts waits for it. A cable that is not
    fully plugged in, a dirty or broken transceiver, or a cable that splits a port are the causes.

    How to fix it: see which lanes are up, then reseat or replace the cable.

        $ ibstat
        $ iblinkinfo

    Since: 0.1
    """
    for port in place.local.fabric:
        narrow = port.rate is not None and port.full is not None and port.rate < 0.99 * port.full
        if narrow and port.state == "ACTIVE" and port.link_layer == "InfiniBand":
            yield Finding.warning(
                "fabric-port-narrow",
                f"{WHO}: {port.device} port {port.port} runs at {port.rate:g} Gb/s, and four of its lanes carry {port.full:g}",
                fix="see which lanes are up, then reseat or replace the cable",
                steps=(step("ibstat"), step("iblinkinfo")),
            )


CHECKS: tuple[Check, ...] = (gpu_links_missing, fabric_port_narrow)
