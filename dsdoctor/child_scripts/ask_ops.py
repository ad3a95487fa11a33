"""Print the ops of a DeepSpeed, as its own op_builder describes them. Arguments: "source" or "installed", its folder, torch's
folder ("" for none) or "import", then every architecture to put through the ops' own filters.

Run with the accelerator in DS_ACCELERATOR. With torch's folder, op_builder gets a stand-in for torch with its version and no GPU:
that is all it needs to describe its ops, and importing torch takes twenty times as long. Anything that the stand-in lacks ends
this script, and the caller asks again with "import". Compiles nothing, and asks no op whether it is compatible: that check
compiles something, and its answer is often wrong.
"""

import importlib.util
import json
import os
import platform
import sys
import types


class FellShort(AttributeError):
    pass


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        raise FellShort("%s.%s" % (self.__name__, name))


def stand_in(name, **facts):
    module = StandIn(name)
    module.__path__ = []
    for fact, value in facts.items():
        setattr(module, fact, value)
    sys.modules[name] = module
    return module


def stand_in_for_torch(folder):
    version = types.ModuleType("torch.version")
    version.__version__, version.cuda, version.hip = "0.0.0", None, None
    if folder:
        spec = importlib.util.spec_from_file_location("torch.version", os.path.join(folder, "version.py"))
        version = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(version)
    sys.modules["torch.version"] = version
    cuda = stand_in("torch.cuda", is_available=lambda: False, device_count=lambda: 0)
    # a CPU build of torch looks for no toolkit
    home = os.environ.get("CUDA_HOME") if version.cuda else None
    cpp = stand_in("torch.utils.cpp_extension", CUDA_HOME=home)
    utils = stand_in("torch.utils", cpp_extension=cpp)
    stand_in("torch", version=version, __version__=version.__version__, cuda=cuda, utils=utils)


def from_source(folder):
    os.chdir(folder)
    sys.path[0] = folder
    from accelerator import get_accelerator
    from op_builder.all_ops import ALL_OPS

    return ALL_OPS, get_accelerator()._name


def from_installed(folder):
    """op_builder and accelerator of an installed DeepSpeed, without the rest of it."""
    # deepspeed/__init__.py imports everything, so empty packages with its folders take its place
    for name, place in (("deepspeed", folder), ("deepspeed.ops", os.path.join(folder, "ops"))):
        package = types.ModuleType(name)
        package.__path__ = [place]
        sys.modules[name] = package
    sys.modules["deepspeed.utils"] = None
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    return ALL_OPS, get_accelerator()._name


def base_names(op):
    return {cls.__name__ for cls in type(op).__mro__}


def kept(op):
    """The architectures that the op's own filter keeps, or None where it has no filter."""
    if "CUDAOpBuilder" not in base_names(op):
        return None
    return [entry if isinstance(entry, str) else ".".join(entry) for entry in op.filter_ccs(list(known))]


def flags_from(ask):
    """The flags that a builder gives; none when it needs a toolkit or a package for that."""
    try:
        return [flag for flag in ask() if flag]
    except FellShort:
        raise
    except Exception:
        return []


def describe(name, op):
    fact = {"op": name, "variable": op.BUILD_VAR, "module": op.absolute_name()}
    try:
        fact["sources"] = op.strip_empty_entries(op.sources())
        fact["architectures"] = kept(op)
        fact["flags"] = flags_from(op.cxx_args)
        fact["libraries"] = [flag[2:] for flag in flags_from(op.extra_ldflags) if flag.startswith("-l")]
    except FellShort:
        raise
    except Exception as error:
        fact["broken"] = f"{type(error).__name__}: {error}"
    return fact


sys.dont_write_bytecode = True
kind, folder, torch_folder, known = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3], sys.argv[4:]
# py-cpuinfo would take a second for each op and lscpu would be started for each; the flags they give are not needed here
sys.modules["cpuinfo"] = cpuinfo = types.ModuleType("cpuinfo")
cpuinfo.get_cpu_info = lambda: {"arch": platform.machine().upper(), "flags": "", "vendor_id_raw": "", "brand_raw": ""}
if torch_folder != "import":
    stand_in_for_torch(torch_folder)
ops, accelerator = from_source(folder) if kind == "source" else from_installed(folder)
answer = {"accelerator": accelerator, "ops": [describe(name, op) for name, op in ops.items()]}
print("DSDOCTOR " + json.dumps(answer))
