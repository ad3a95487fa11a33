"""Print the GPUs with their free memory and their links, asked through NVML, which makes no CUDA context."""

import json

import pynvml

PER_LINK = {"6.0": 20e9, "8.6": 14.0625e9, "10.0": 50e9, "10.3": 50e9}
USUAL_LINK = 25e9
"""One NVLink's rate, one way, bytes a second, by compute capability: NVIDIA's data sheets (P100 4 links 80 GB/s, V100 6 links 150,
A100 12 links 300, H100 18 links 450, B200 18 links 900, RTX A6000 4 links 56)."""


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def tried(ask, *arguments):
    """The answer, or None where this GPU, driver or partition has none."""
    try:
        return ask(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def links(handle):
    """How many NVLinks are active."""
    states = [tried(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    return sum(state == pynvml.NVML_FEATURE_ENABLED for state in states)


def pair(handle, generation, width):
    both = [tried(generation, handle), tried(width, handle)]
    return None if None in both else both


def gpu(index):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = tried(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = "%d.%d" % tuple(tried(pynvml.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0))
    active = links(handle)
    return {
        "index": index,
        "name": text(pynvml.nvmlDeviceGetName(handle)),
        "uuid": text(pynvml.nvmlDeviceGetUUID(handle)),
        "free": memory.free if memory else None,
        "total": memory.total if memory else None,
        "pcie": pair(handle, pynvml.nvmlDeviceGetCurrPcieLinkGeneration, pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        "pcie_max": pair(handle, pynvml.nvmlDeviceGetMaxPcieLinkGeneration, pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        "nvlink": active * PER_LINK.get(capability, USUAL_LINK) if active else None,
    }


try:
    pynvml.nvmlInit()
except pynvml.NVMLError as error:
    print("DSDOCTOR " + json.dumps({"absent": str(error)}))
else:
    answer = {
        "driver": text(pynvml.nvmlSystemGetDriverVersion()),
        "gpus": [gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
    }
    print("DSDOCTOR " + json.dumps(answer))
