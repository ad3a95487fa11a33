"""Host -> what PATH and LD_LIBRARY_PATH hold, and the CUDA headers and libraries that need no CUDA_HOME."""

import glob
import re
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Runtime, SearchPaths
from dsdoctor.probe.libraries import include_dirs, library_dirs
from dsdoctor.probe.nvcc import HEADERS, LIBRARIES

RUNTIME = re.compile(r"/libcudart\.so\.(\d{1,2})(?:\.|$)")


def folders_on(host: Host, name: str) -> tuple[str, ...]:
    """The folders of a path variable, each once, in order; entries that are empty or relative are left out."""
    listed = (host.variable(name) or "").split(":")
    return tuple(dict.fromkeys(folder for folder in listed if folder.startswith("/")))


def read_paths(host: Host) -> SearchPaths:
    """Look along the search paths."""
    include, libraries = include_dirs(host), library_dirs(host)
    return SearchPaths(
        missing_path=_missing(host, "PATH"),
        missing_library_path=_missing(host, "LD_LIBRARY_PATH"),
        runtimes=tuple(_runtimes(host)),
        headers=frozenset(name for name in HEADERS if any(host.exists(f"{folder}/{name}") for folder in include)),
        libraries=frozenset(
            name
            for name in LIBRARIES
            if any(host.exists(f"{folder}/lib{name}.{end}") for folder in libraries for end in ("so", "a"))
        ),
    )


def _missing(host: Host, name: str) -> tuple[str, ...]:
    return tuple(folder for folder in folders_on(host, name) if not host.exists(folder))


def _runtimes(host: Host) -> Iterator[Runtime]:
    for folder in folders_on(host, "LD_LIBRARY_PATH"):
        found = (RUNTIME.search(path) for path in host.glob(f"{glob.escape(folder)}/libcudart.so.*"))
        for major in sorted({int(match[1]) for match in found if match}):
            yield Runtime(folder=folder, major=major)
