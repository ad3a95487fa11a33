"""Print the GPUs and the driver, asked through NVML, which makes no CUDA context."""

import json

import pynvml


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def gpu(index):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "index": index,
        "name": text(pynvml.nvmlDeviceGetName(handle)),
        "uuid": text(pynvml.nvmlDeviceGetUUID(handle)),
        "capability": "%d.%d" % pynvml.nvmlDeviceGetCudaComputeCapability(handle),
        "memory": memory(handle),
    }


def memory(handle):
    """Bytes; None where a GPU shares the host's memory, or a partition may not ask."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError:
        return None


try:
    pynvml.nvmlInit()
except pynvml.NVMLError as error:
    print("DSDOCTOR " + json.dumps({"absent": str(error)}))
else:
    newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    answer = {
        "driver": text(pynvml.nvmlSystemGetDriverVersion()),
        "cuda": "%d.%d" % (newest // 1000, newest % 1000 // 10),
        "gpus": [gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
    }
    print("DSDOCTOR " + json.dumps(answer))
