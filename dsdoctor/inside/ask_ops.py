"""The ops of a DeepSpeed source tree, told by its own op_builder. Arguments: the source folder, then
every architecture to put to the ops' own filters.

Run with the accelerator in DS_ACCELERATOR. Compiles nothing and asks no op whether it is compatible: that answer
compiles, and is wrong often enough.
"""

import json
import os
import sys


def base_names(op):
    return {cls.__name__ for cls in type(op).__mro__}


def kept(op):
    """The architectures that the op's own filter keeps, or None where it has no filter."""
    if "CUDAOpBuilder" not in base_names(op):
        return None
    return [entry if isinstance(entry, str) else ".".join(entry) for entry in op.filter_ccs(list(known))]


def told(ask):
    """What a builder says of its flags; nothing when it needs a toolkit or a package to say it."""
    try:
        return [flag for flag in ask() if flag]
    except Exception:
        return []


def describe(name, op):
    fact = {"op": name, "variable": op.BUILD_VAR, "module": op.absolute_name()}
    try:
        fact["sources"] = op.strip_empty_entries(op.sources())
        fact["architectures"] = kept(op)
        fact["flags"] = told(op.cxx_args)
        fact["libraries"] = [flag[2:] for flag in told(op.extra_ldflags) if flag.startswith("-l")]
    except Exception as error:
        fact["broken"] = f"{type(error).__name__}: {error}"
    return fact


sys.dont_write_bytecode = True
source, known = os.path.abspath(sys.argv[1]), sys.argv[2:]
os.chdir(source)
sys.path[0] = source
from accelerator import get_accelerator  # noqa: E402
from op_builder.all_ops import ALL_OPS  # noqa: E402

answer = {"accelerator": get_accelerator()._name, "ops": [describe(name, op) for name, op in ALL_OPS.items()]}
print("DSDOCTOR " + json.dumps(answer))
