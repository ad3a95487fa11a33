"""Print what is known only by importing torch. No CUDA context is made unless a GPU is visible."""

import json
import warnings

warnings.simplefilter("ignore")
import torch  # noqa: E402


def nccl():
    try:
        version = torch.cuda.nccl.version()
    except Exception:
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def arch_list():
    listed = torch.cuda.get_arch_list()
    if listed:
        return listed
    # older releases answer only where a GPU is visible; what they were built for does not depend on that
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []


devices = range(torch.cuda.device_count()) if torch.version.cuda and torch.cuda.is_available() else ()
answer = {
    "arch_list": arch_list() if torch.version.cuda else [],
    "capabilities": ["%d.%d" % torch.cuda.get_device_capability(index) for index in devices],
    "nccl": nccl() if torch.version.cuda else None,
}
print("DSDOCTOR " + json.dumps(answer))
