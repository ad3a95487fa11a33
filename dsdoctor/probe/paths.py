"""What PATH and LD_LIBRARY_PATH lead to: compilers, headers, and the libraries that an op would find."""

import glob
import re
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.machine import WATCHED, Compiler, Runtime, SearchPaths
from dsdoctor.probe.nvcc import HEADERS, LIBRARIES
from dsdoctor.probe.python import Environment
from dsdoctor.probe.system import include_dirs, library_dirs

# Host -> what PATH and LD_LIBRARY_PATH hold, and the CUDA headers and libraries that need no CUDA_HOME.


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


# Host + environment -> which libraries of WATCHED an op would find when it is loaded. Loads nothing.


CACHE = "/etc/ld.so.cache"
"""What ldconfig writes and glibc's loader reads: it holds the paths as text, each ended by a zero byte. It is read directly
because ldconfig may be missing or not on PATH, and so that a snapshot does not hold the machine's other libraries."""

ALWAYS_LISTED = "libc.so.6"
"""A library that every cache of glibc lists. Without it there is no answer: another libc, or a snapshot without the question."""

TRUSTED = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
"""Where glibc's loader looks without any cache; Debian adds a folder named after the processor to the first two."""

FOLDERS_32_BIT = ("/lib32", "/usr/lib32", "/libx32", "/usr/libx32", "/lib/i386-linux-gnu", "/usr/lib/i386-linux-gnu")
"""Folders of 32-bit libraries, which no op links."""


def find_loadable(host: Host, environment: Environment | None) -> frozenset[str] | None:
    """Those of WATCHED that are found; None where the loader's cache cannot be read, or there is no Python."""
    names = "|".join(map(re.escape, (*WATCHED, ALWAYS_LISTED)))
    cached = parse_cache(host.search(CACHE, rf"/[^\0\n]*/(?:{names})(?=\0)"))
    if environment is None or ALWAYS_LISTED not in {path.rpartition("/")[2] for path in cached}:
        return None
    folders = tuple(dict.fromkeys(_folders(host, environment)))

    def is_found(name: str) -> bool:
        paths = (path for path in cached if path.endswith(f"/{name}"))
        return any(map(host.exists, paths)) or any(host.glob(f"{folder}/{name}") for folder in folders)

    return frozenset(name for name in WATCHED if is_found(name))


def parse_cache(text: str) -> tuple[str, ...]:
    """The paths of 64-bit libraries among those of the loader's cache.

    >>> parse_cache("/lib/x86_64-linux-gnu/libgomp.so.1\\n/lib32/libgomp.so.1")
    ('/lib/x86_64-linux-gnu/libgomp.so.1',)
    """
    return tuple(path for path in text.splitlines() if path.rpartition("/")[0] not in FOLDERS_32_BIT)


def _folders(host: Host, environment: Environment) -> Iterator[str]:
    """Patterns of the folders that are searched besides the cache: the loader's, LD_LIBRARY_PATH, Python's and torch's.

    For conda's interpreter the loader searches the ``lib`` of its prefix. Libraries beside torch's own, or in the packages that
    torch brings, are loaded by torch before any op.
    """
    python = environment.python
    family = python.platform.removeprefix("linux-")
    yield from (glob.escape(folder) for folder in folders_on(host, "LD_LIBRARY_PATH"))
    yield from (f"{folder}/{family}-linux-gnu" for folder in TRUSTED[:2])
    yield from TRUSTED
    for scripts in (python.scripts, host.resolve(python.executable).rpartition("/")[0]):
        yield f"{glob.escape(scripts.rpartition('/')[0])}/lib"
    if environment.torch:
        yield f"{glob.escape(environment.torch)}/lib"
        yield f"{glob.escape(environment.torch.rpartition('/')[0])}/nvidia/*/lib"


# Host -> every C++ compiler: $CXX, then g++ and clang++ on PATH, versioned names too.


NAME = re.compile(r"^(c\+\+|g\+\+|clang\+\+|[\w.-]+-linux-gnu(?:-cc)?-(?:c|g)\+\+)(-\d[\d.]*)?$")
C_NAMES = {"clang++": "clang", "g++": "gcc", "c++": "cc"}


def find_compilers(host: Host) -> tuple[Compiler, ...]:
    """All C++ compilers that work, in the order in which a build would find them, each real file once."""
    found: list[Compiler] = []
    seen: set[str] = set()
    for path, via in _candidates(host):
        real = host.resolve(path)
        if real in seen:
            continue
        seen.add(real)
        compiler = read_compiler(host, path, via)
        if compiler is not None:
            found.append(compiler)
    return tuple(found)


def read_compiler(host: Host, path: str, via: str) -> Compiler | None:
    """Ask one compiler for its kind and version; None for one without a C++ back end (cc1plus)."""
    kind_and_version = parse_version(host.run([path, "--version"], timeout=20).stdout)
    if kind_and_version is None:
        return None
    kind, version = kind_and_version
    if kind == "gcc" and not host.run([path, "-print-prog-name=cc1plus"], timeout=20).stdout.startswith("/"):
        return None
    return Compiler(path=path, c_path=_c_beside(host, path), kind=kind, version=version, found_via=via)


def parse_version(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Kind and version from the first line of ``--version``.

    >>> parse_version("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\\nCopyright")
    ('gcc', (12, 2, 0))
    >>> parse_version("Debian clang version 14.0.6\\nTarget: x86_64")
    ('clang', (14, 0, 6))
    """
    first = text.splitlines()[0] if text.strip() else ""
    kind = "clang" if "clang" in first else "gcc" if re.search(r"\(|gcc|g\+\+|GCC", first) else None
    versions = re.findall(r"(?<![\w.-])(\d+(?:\.\d+){1,3})(?![\w.])", re.sub(r"\([^)]*\)", "", first))
    if kind is None or not versions:
        return None
    return kind, tuple(int(part) for part in versions[-1].split("."))


def _candidates(host: Host) -> Iterator[tuple[str, str]]:
    named = (host.variable("CXX") or "").split()
    if len(named) == 1:
        path = named[0] if named[0].startswith("/") else host.which(named[0])
        if path:
            yield path, "cxx_variable"
    for name in ("g++", "c++", "clang++"):
        path = host.which(name)
        if path:
            yield path, "path"
    for folder in folders_on(host, "PATH"):
        for path in host.glob(f"{glob.escape(folder)}/*++*"):
            if NAME.match(path.rsplit("/", 1)[1]):
                yield path, "path"


def _c_beside(host: Host, path: str) -> str | None:
    """The C compiler of the same kind and version, beside the C++ one: nvcc takes it as -ccbin."""
    folder, name = path.rsplit("/", 1)
    for cxx, c in C_NAMES.items():
        if cxx in name:
            beside = f"{folder}/{name.replace(cxx, c)}"
            return beside if host.glob(glob.escape(beside)) else None
    return None
