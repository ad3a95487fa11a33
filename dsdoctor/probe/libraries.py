"""Host + environment -> the libraries that single ops need, each with its header and the file to link."""

import glob

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Library
from dsdoctor.probe.python import Environment

INCLUDE = ("/usr/include", "/usr/local/include")
LIB = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def find_libraries(host: Host, environment: Environment | None) -> tuple[Library, ...]:
    """The libraries that are there, at least in part; a part that is missing is None."""
    include, lib = include_dirs(host), library_dirs(host)
    found = [
        Library(name="libaio", header=_first(host, include, "libaio.h"), library=_first(host, lib, "libaio.so")),
        Library(
            name="libcuda",
            header="cuda.h",
            library=_first(host, ("/usr/local/cuda/lib64/stubs", *lib), "libcuda.so"),
        ),
        _cutlass(host, environment, include),
        _oneccl(host),
        _dskernels(host, environment),
    ]
    return tuple(library for library in found if library.library)


def _cutlass(host: Host, environment: Environment | None, include: tuple[str, ...]) -> Library:
    named = ("CUTLASS_PATH", "CUTLASS_ROOT", "CUTLASS_HOME", "CONDA_PREFIX", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH")
    roots = [host.variable(name) or "" for name in named] + _split(host, "CMAKE_PREFIX_PATH")
    roots += [environment.python.scripts.rpartition("/")[0]] if environment else []
    if environment and environment.cutlass:
        roots += [f"{environment.cutlass}/source", environment.cutlass]
    folders = [f"{root}/{tail}" for root in roots if root for tail in ("include", ".")]
    header = _first(
        host, (*folders, *include, "/usr/local/cutlass/include", "/opt/cutlass/include"), "cutlass/cutlass.h"
    )
    return Library(name="cutlass", header=header, library=header)


def _oneccl(host: Host) -> Library:
    root = host.variable("CCL_ROOT")
    if not root:
        return Library(name="oneccl")
    header = _first(host, (f"{root}/include",), "oneapi/ccl.hpp")
    return Library(name="oneccl", header=header, library=_first(host, (f"{root}/lib",), "libccl.so"))


def _dskernels(host: Host, environment: Environment | None) -> Library:
    for folder in environment.python.site if environment else ():
        found = _first(host, (f"{folder}/dskernels",), "__init__.py")
        if found:
            return Library(name="dskernels", header=found, library=found)
    return Library(name="dskernels")


def include_dirs(host: Host) -> tuple[str, ...]:
    """Where the system's compiler looks for headers by itself, with what the user's variables add."""
    return (
        *_split(host, "CPATH", "CPLUS_INCLUDE_PATH"),
        *_flags(host, "CFLAGS", "-I"),
        *_prefix(host, "include"),
        *INCLUDE,
    )


def library_dirs(host: Host) -> tuple[str, ...]:
    """Where the linker looks by itself, with what the user's variables add."""
    return (*_split(host, "LIBRARY_PATH"), *_flags(host, "LDFLAGS", "-L"), *_prefix(host, "lib"), *LIB)


def _split(host: Host, *names: str) -> list[str]:
    return [folder for name in names for folder in (host.variable(name) or "").split(":") if folder]


def _flags(host: Host, name: str, flag: str) -> list[str]:
    return [word[2:] for word in (host.variable(name) or "").split() if word.startswith(flag) and len(word) > 2]


def _prefix(host: Host, tail: str) -> list[str]:
    # a conda compiler searches its own prefix; the system's gcc does not
    prefix = host.variable("CONDA_PREFIX")
    cxx = host.variable("CXX") or ""
    return [f"{prefix}/{tail}"] if prefix and "conda" in cxx else []


def _first(host: Host, folders: tuple[str, ...] | list[str], name: str) -> str | None:
    for folder in folders:
        found = host.glob(f"{glob.escape(folder)}/{name}")
        if found:
            return found[0]
    return None
