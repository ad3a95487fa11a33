"""Print the GPUs with their free memory and their links, asked through NVML, which makes no CUDA context."""

import json

import pynvml


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
    capability = tried(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return {
        "index": index,
        "name": text(pynvml.nvmlDeviceGetName(handle)),
        "uuid": text(pynvml.nvmlDeviceGetUUID(handle)),
        "capability": "%d.%d" % tuple(capability) if capability else "",
        "free": memory.free if memory else None,
        "total": memory.total if memory else None,
        "pcie": pair(handle, pynvml.nvmlDeviceGetCurrPcieLinkGeneration, pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        "pcie_max": pair(handle, pynvml.nvmlDeviceGetMaxPcieLinkGeneration, pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        "links": links(handle),
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
