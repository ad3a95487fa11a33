"""Host -> the GPUs that this process may use, with their memory and links, by NVML in a child. Makes no CUDA context."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dsdoctor.comm.models import RankGpu
from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap

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
