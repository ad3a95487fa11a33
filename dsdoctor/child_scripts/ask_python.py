"""Print what this interpreter is and which packages its environment holds. Imports only the standard library."""

import importlib.util
import itertools
import json
import os
import re
import sys
import sysconfig

WANTED = re.compile(
    r"^(torch|triton|deepspeed|deepspeed-kernels|nvidia-cutlass|setuptools|wheel|ninja|build|pip|cuda-toolkit|numpy"
    r"|packaging|nvidia-.*)$"
)


def distributions():
    """(name, version, folder) from the names of the metadata folders."""
    # importlib.metadata would take most of this script's time
    for folder in dict.fromkeys(sys.path):
        for entry in entries(folder):
            match = re.match(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info$", entry)
            if match:
                yield normal(match[1]), match[2], os.path.join(folder, entry)


def entries(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def packages():
    found = {}
    for name, version, _ in installed:
        if WANTED.match(name):
            found.setdefault(name, version)
    return dict(sorted(found.items()))


def lacking(package):
    """The packages that a package requires on every platform, and that are not installed."""
    folder = next((folder for name, _, folder in installed if name == package), None)
    if folder is None:
        return []
    try:
        with open(os.path.join(folder, "METADATA"), encoding="utf-8", errors="replace") as file:
            lines = itertools.takewhile(str.strip, file)
            demanded = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    except OSError:
        return []
    names = [normal(re.match(r"[\w.-]+", line)[0]) for line in demanded if ";" not in line]
    here = {name for name, _, _ in installed}
    return [name for name in names if name not in here]


def module_folder(name):
    """The folder of a package, also of an editable install; it is not imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return os.path.dirname(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def site():
    searched = [path for path in sys.path[1:] if path.endswith("-packages")]
    return list(dict.fromkeys([paths["purelib"], paths["platlib"], *searched]))


paths = sysconfig.get_paths()
installed = list(distributions())
answer = {
    "python": {
        "executable": sys.executable,
        "version": ".".join(map(str, sys.version_info[:3])),
        "tag": f"cp{sys.version_info[0]}{sys.version_info[1]}",
        "platform": sysconfig.get_platform(),
        "site": site(),
        "include": paths["include"],
        "headers": os.path.isfile(os.path.join(paths["include"], "Python.h")),
        "scripts": paths["scripts"],
        "packages": packages(),
    },
    "torch": module_folder("torch"),
    "torch_lacks": lacking("torch"),
    "deepspeed": module_folder("deepspeed"),
    "cutlass": module_folder("cutlass_library"),
}
print("DSDOCTOR " + json.dumps(answer))
