"""What only a running torch can tell. No CUDA context is made unless a GPU is visible."""

import json
import warnings

warnings.simplefilter("ignore")
import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402


def bounds(table_name):
    table = getattr(cpp_extension, table_name, {})
    entry = table.get(".".join((torch.version.cuda or "").split(".")[:2]))
    return [entry[0][0], entry[1][0]] if entry else None


def nccl():
    try:
        version = torch.cuda.nccl.version()
    except Exception:
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def known_architectures():
    import inspect
    import re

    try:
        source = inspect.getsource(cpp_extension._get_cuda_arch_flags)
    except (OSError, TypeError, AttributeError):
        return []
    listed = re.search(r"supported_arches\s*=\s*\[([^\]]*)\]", source)
    return re.findall(r"'([\d.]+[a-z]?)'", listed[1]) if listed else []


def arch_list():
    listed = torch.cuda.get_arch_list()
    if listed:
        return listed
    # older releases answer only where a GPU is visible; what they were built for does not depend on that
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []


devices = range(torch.cuda.device_count()) if torch.version.cuda and torch.cuda.is_available() else ()
answer = {
    "version": torch.__version__,
    "arch_list": arch_list() if torch.version.cuda else [],
    "capabilities": ["%d.%d" % torch.cuda.get_device_capability(index) for index in devices],
    "known_architectures": known_architectures(),
    "gcc_bounds": bounds("CUDA_GCC_VERSIONS"),
    "clang_bounds": bounds("CUDA_CLANG_VERSIONS"),
    "nccl": nccl() if torch.version.cuda else None,
}
print("DSDOCTOR " + json.dumps(answer))
