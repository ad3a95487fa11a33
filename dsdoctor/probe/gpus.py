"""Host -> GPUs and driver, through NVML in a child process: no CUDA context, and a driver that hangs blocks only the child."""

import sys
from dataclasses import dataclass

from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Cuda, Driver, Gap, Gpu


@dataclass(frozen=True, kw_only=True)
class _NvmlAnswer:
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    absent: str | None = None


DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu", "/proc/driver/nvidia")
"""Files that a loaded driver creates: Linux, WSL, Jetson."""


def ask_gpus(host: Host) -> tuple[tuple[Gpu, ...], Driver | None] | Gap:
    """The GPUs that NVML sees and the driver; nothing when no driver is loaded."""
    if not any(host.exists(device) for device in DEVICES):
        return (), None
    answer = parse_answer(host.ask(sys.executable, "ask_nvml.py", timeout=20), _NvmlAnswer, "gpus")
    if isinstance(answer, Gap):
        return answer
    if answer.driver is None:
        return Gap(question="gpus", reason=answer.absent or "it names no driver")
    return answer.gpus, Driver(version=answer.driver, cuda=Cuda.parse(answer.cuda))
