"""What this interpreter is and what its environment holds. Imports nothing but the standard library."""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import sysconfig

WANTED = re.compile(
    r"^(torch|triton|deepspeed|deepspeed-kernels|nvidia-cutlass|setuptools|wheel|ninja|build|pip|cuda-toolkit|numpy"
    r"|packaging|nvidia-.*)$"
)


def packages():
    found = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if WANTED.match(name) and name not in found:
            found[name] = distribution.version
    return dict(sorted(found.items()))


def lacking(name):
    """The packages that a package's metadata demands on every platform, and that are not here."""
    try:
        demanded = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = [re.match(r"[\w.-]+", requirement)[0] for requirement in demanded if ";" not in requirement]
    return [other for other in names if not installed(other)]


def installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def module_folder(name):
    """Found, not imported; editable installs too."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return os.path.dirname(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def site():
    searched = [path for path in sys.path[1:] if path.endswith("-packages")]
    return list(dict.fromkeys([paths["purelib"], paths["platlib"], *searched]))


paths = sysconfig.get_paths()
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
