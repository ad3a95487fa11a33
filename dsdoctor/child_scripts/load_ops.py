"""Load built ops with this torch and print the error of each, null for none. Argument: a JSON list of [op, shared object]."""

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings

warnings.simplefilter("ignore")
import torch  # noqa: E402, F401


def load(path):
    name = os.path.basename(path).split(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


verdicts = {}
# async_io and gds use symbols of the pin_memory op, so that one is loaded first, with its symbols made global
for op, path in sorted(json.loads(sys.argv[1]), key=lambda item: item[0] != "pin_memory"):
    try:
        load(path)
        if op == "pin_memory":
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        verdicts[op] = None
    except (ImportError, OSError) as error:
        verdicts[op] = str(error)
print("DSDOCTOR " + json.dumps(verdicts))
