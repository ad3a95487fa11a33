"""Load torch's shared libraries without its Python modules, and ask them. Argument: torch's folder.

A fourth of the time of ``import torch``, and it meets what breaks most often: a library that is missing, of another
release, or that crashes. Where this way of loading itself fails, importing torch has the last word.
"""

import ctypes
import importlib.metadata
import json
import os
import re
import sys
import types


def missing_requirement():
    """A package that torch's metadata demands and that is not here: its Python modules would not import."""
    for requirement in importlib.metadata.requires("torch") or []:
        name = re.match(r"[\w.-]+", requirement)[0]
        if ";" in requirement or name.startswith("nvidia") or name == "triton":
            continue
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return name
    return None


folder = sys.argv[1]
package = types.ModuleType("torch")
package.__path__ = [folder]
sys.modules["torch"] = package
dependencies = os.path.join(folder, "lib", "libtorch_global_deps.so")
if os.path.exists(dependencies):
    ctypes.CDLL(dependencies, mode=ctypes.RTLD_GLOBAL)
if not os.path.exists(os.path.join(folder, "__init__.py")):
    sys.exit("torch has no __init__.py")
lost = missing_requirement()
if lost:
    sys.exit("torch needs " + lost)
import torch._C  # noqa: E402


def nccl():
    """As torch.cuda.nccl.version() takes the number apart."""
    version = torch._C._nccl_version()
    if isinstance(version, tuple):
        return ".".join(map(str, version))
    return "%d.%d.%d" % (version >> 32, version >> 16 & 65535, version & 65535)


flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
answer = {
    "arch_list": flags.split() if flags else [],
    "nccl": nccl() if hasattr(torch._C, "_nccl_version") else None,
}
print("DSDOCTOR " + json.dumps(answer))
