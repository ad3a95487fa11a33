"""The words for what ops need of a machine: a check says which need is unmet, the op table knows which op has it.

Besides these words a need is the name of a CUDA header ("curand_kernel.h"), of a CUDA library to link ("libcurand.so") or
of a library in ``Machine.libraries`` ("libaio").
"""

TORCH = "torch"
INSTALLED = "installed ops"
"""Not a need of building: the finding speaks of ops that are built already, and names them beside this word."""

COMPILER = "c++ compiler"
PYTHON_HEADERS = "Python.h"
CUDA = "CUDA toolkit"
DEVICE_CODE = "GPU code"


def library(name: str) -> str:
    """The need for a CUDA library to link.

    >>> library("curand")
    'libcurand.so'
    """
    return f"lib{name}.so"
