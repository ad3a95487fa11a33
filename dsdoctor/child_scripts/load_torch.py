"""Load torch's shared libraries, without its Python modules and without initialising it. Argument: torch's folder.

It takes a tenth of the time of ``import torch``, and finds what breaks most often: a library that is missing, of another
release, or that crashes. Where this fails, the caller imports torch to be sure.
"""

import ctypes
import json
import mmap
import os
import re
import sys

folder = sys.argv[1]
library = os.path.join(folder, "lib", "libtorch_python.so")


def arch_list():
    """The list that torch._C._cuda_getArchFlags() returns is a literal of this library."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = re.search(rb"\0(sm_\d+a?(?: (?:sm|compute)_\d+a?)*)\0", data)
        return found[1].decode().split() if found else []


if not os.path.exists(os.path.join(folder, "__init__.py")):
    sys.exit("torch has no __init__.py")
dependencies = os.path.join(folder, "lib", "libtorch_global_deps.so")
if os.path.exists(dependencies):
    ctypes.CDLL(dependencies, mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(library)
print("DSDOCTOR " + json.dumps({"arch_list": arch_list()}), flush=True)
# a regular exit would unload a gigabyte of libraries, which takes a third of the time
os._exit(0)
