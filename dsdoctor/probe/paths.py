"""Host -> what search paths lead to: every C++ compiler ($CXX, then g++ and clang++ on PATH, versioned names too), folders,
headers, the libraries that single ops need, and those that an op would find when it is loaded. Loads nothing."""

import glob
import re
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.machine import WATCHED, Compiler, Library, Runtime, SearchPaths
from dsdoctor.probe.python import Environment

CXX_NAME = re.compile(r"^(c\+\+|g\+\+|clang\+\+|[\w.-]+-linux-gnu(?:-cc)?-(?:c|g)\+\+)(-\d[\d.]*)?$")
C_NAMES = {"clang++": "clang", "g++": "gcc", "c++": "cc"}
HEADERS = (
    "cuda_runtime.h",
    "crt/host_config.h",
    "cublas_v2.h",
    "cusparse.h",
    "cusolverDn.h",
    "curand_kernel.h",
    "cuda_profiler_api.h",
    "nccl.h",
    "cufile.h",
    "nvtx3/nvToolsExt.h",
)
"""Of a CUDA toolkit, those that ops include."""
LIBRARIES = ("cudart", "curand", "cublas", "cufile", "cuda")
"""Of a CUDA toolkit, those that ops link."""
RUNTIME = re.compile(r"/libcudart\.so\.(\d{1,2})(?:\.|$)")
SYSTEM_INCLUDES = ("/usr/include", "/usr/local/include")
SYSTEM_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
LOADER_CACHE = "/etc/ld.so.cache"
"""What ldconfig writes and glibc's loader reads: it holds the paths as text, each ended by a zero byte. It is read directly
because ldconfig may be missing or not on PATH, and so that a snapshot does not hold the machine's other libraries."""
ALWAYS_LISTED = "libc.so.6"
"""A library that every cache of glibc lists. Without it there is no answer: another libc, or a snapshot without the question."""
LOADER_FOLDERS = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
"""Where glibc's loader looks without any cache; Debian adds a folder named after the processor to the first two."""
FOLDERS_32_BIT = ("/lib32", "/usr/lib32", "/libx32", "/usr/libx32", "/lib/i386-linux-gnu", "/usr/lib/i386-linux-gnu")
"""Folders of 32-bit libraries, which no op links."""


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


def find_compilers(host: Host) -> tuple[Compiler, ...]:
    """All C++ compilers that work, in the order in which a build would find them, each real file once."""
    found: list[Compiler] = []
    seen: set[str] = set()
    for path, via in _compilers(host):
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
    kind_and_version = parse_compiler_version(host.run([path, "--version"], timeout=20).stdout)
    if kind_and_version is None:
        return None
    kind, version = kind_and_version
    if kind == "gcc" and not host.run([path, "-print-prog-name=cc1plus"], timeout=20).stdout.startswith("/"):
        return None
    return Compiler(path=path, c_path=_c_compiler(host, path), kind=kind, version=version, found_via=via)


def parse_compiler_version(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Kind and version from the first line of ``--version``.

    >>> parse_compiler_version("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\\nCopyright")
    ('gcc', (12, 2, 0))
    >>> parse_compiler_version("Debian clang version 14.0.6\\nTarget: x86_64")
    ('clang', (14, 0, 6))
    """
    first = text.splitlines()[0] if text.strip() else ""
    kind = "clang" if "clang" in first else "gcc" if re.search(r"\(|gcc|g\+\+|GCC", first) else None
    versions = re.findall(r"(?<![\w.-])(\d+(?:\.\d+){1,3})(?![\w.])", re.sub(r"\([^)]*\)", "", first))
    if kind is None or not versions:
        return None
    return kind, tuple(int(part) for part in versions[-1].split("."))


def _compilers(host: Host) -> Iterator[tuple[str, str]]:
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
            if CXX_NAME.match(path.rsplit("/", 1)[1]):
                yield path, "path"


def _c_compiler(host: Host, path: str) -> str | None:
    """The C compiler of the same kind and version, next to the C++ one: nvcc takes it as -ccbin."""
    folder, name = path.rsplit("/", 1)
    for cxx, c in C_NAMES.items():
        if cxx in name:
            path = f"{folder}/{name.replace(cxx, c)}"
            return path if host.glob(glob.escape(path)) else None
    return None


def find_libraries(host: Host, environment: Environment | None) -> tuple[Library, ...]:
    """The libraries that are there, at least in part; a part that is missing is None."""
    include, lib = include_dirs(host), library_dirs(host)
    found = [
        Library(name="libaio", header=first_of(host, include, "libaio.h"), library=first_of(host, lib, "libaio.so")),
        Library(
            name="libcuda",
            header="cuda.h",
            library=first_of(host, ("/usr/local/cuda/lib64/stubs", *lib), "libcuda.so"),
        ),
        _cutlass(host, environment, include),
        _oneccl(host),
        _dskernels(host, environment),
    ]
    return tuple(library for library in found if library.library)


def find_loadable(host: Host, environment: Environment | None) -> frozenset[str] | None:
    """Those of WATCHED that are found; None where the loader's cache cannot be read, or there is no Python."""
    names = "|".join(map(re.escape, (*WATCHED, ALWAYS_LISTED)))
    cached = parse_cache(host.search(LOADER_CACHE, rf"/[^\0\n]*/(?:{names})(?=\0)"))
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


def folders_on(host: Host, name: str) -> tuple[str, ...]:
    """The folders of a path variable, each once, in order; entries that are empty or relative are left out."""
    listed = (host.variable(name) or "").split(":")
    return tuple(dict.fromkeys(folder for folder in listed if folder.startswith("/")))


def include_dirs(host: Host) -> tuple[str, ...]:
    """Where the system's compiler looks for headers by itself, with what the user's variables add."""
    return (
        *_split(host, "CPATH", "CPLUS_INCLUDE_PATH"),
        *_flags(host, "CFLAGS", "-I"),
        *_prefix(host, "include"),
        *SYSTEM_INCLUDES,
    )


def library_dirs(host: Host) -> tuple[str, ...]:
    """Where the linker looks by itself, with what the user's variables add."""
    return (*_split(host, "LIBRARY_PATH"), *_flags(host, "LDFLAGS", "-L"), *_prefix(host, "lib"), *SYSTEM_LIBRARIES)


def first_of(host: Host, folders: tuple[str, ...], *names: str) -> str | None:
    """The first file of these names, folder by folder."""
    for folder in folders:
        for name in names:
            found = host.glob(f"{glob.escape(folder)}/{name}")
            if found:
                return found[0]
    return None


def _missing(host: Host, name: str) -> tuple[str, ...]:
    return tuple(folder for folder in folders_on(host, name) if not host.exists(folder))


def _runtimes(host: Host) -> Iterator[Runtime]:
    for folder in folders_on(host, "LD_LIBRARY_PATH"):
        found = (RUNTIME.search(path) for path in host.glob(f"{glob.escape(folder)}/libcudart.so.*"))
        for major in sorted({int(match[1]) for match in found if match}):
            yield Runtime(folder=folder, major=major)


def _cutlass(host: Host, environment: Environment | None, include: tuple[str, ...]) -> Library:
    named = ("CUTLASS_PATH", "CUTLASS_ROOT", "CUTLASS_HOME", "CONDA_PREFIX", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH")
    roots = [host.variable(name) or "" for name in named] + _split(host, "CMAKE_PREFIX_PATH")
    roots += [environment.python.scripts.rpartition("/")[0]] if environment else []
    if environment and environment.cutlass:
        roots += [f"{environment.cutlass}/source", environment.cutlass]
    folders = [f"{root}/{tail}" for root in roots if root for tail in ("include", ".")]
    header = first_of(
        host, (*folders, *include, "/usr/local/cutlass/include", "/opt/cutlass/include"), "cutlass/cutlass.h"
    )
    return Library(name="cutlass", header=header, library=header)


def _oneccl(host: Host) -> Library:
    root = host.variable("CCL_ROOT")
    if not root:
        return Library(name="oneccl")
    header = first_of(host, (f"{root}/include",), "oneapi/ccl.hpp")
    return Library(name="oneccl", header=header, library=first_of(host, (f"{root}/lib",), "libccl.so"))


def _dskernels(host: Host, environment: Environment | None) -> Library:
    for folder in environment.python.site if environment else ():
        found = first_of(host, (f"{folder}/dskernels",), "__init__.py")
        if found:
            return Library(name="dskernels", header=found, library=found)
    return Library(name="dskernels")


def _folders(host: Host, environment: Environment) -> Iterator[str]:
    """Patterns of the folders that are searched besides the cache: the loader's, LD_LIBRARY_PATH, Python's and torch's.

    For conda's interpreter the loader searches the ``lib`` of its prefix. Libraries beside torch's own, or in the packages that
    torch brings, are loaded by torch before any op.
    """
    python = environment.python
    family = python.platform.removeprefix("linux-")
    yield from (glob.escape(folder) for folder in folders_on(host, "LD_LIBRARY_PATH"))
    yield from (f"{folder}/{family}-linux-gnu" for folder in LOADER_FOLDERS[:2])
    yield from LOADER_FOLDERS
    for scripts in (python.scripts, host.resolve(python.executable).rpartition("/")[0]):
        yield f"{glob.escape(scripts.rpartition('/')[0])}/lib"
    if environment.torch:
        yield f"{glob.escape(environment.torch)}/lib"
        yield f"{glob.escape(environment.torch.rpartition('/')[0])}/nvidia/*/lib"


def _split(host: Host, *names: str) -> list[str]:
    return [folder for name in names for folder in (host.variable(name) or "").split(":") if folder]


def _flags(host: Host, name: str, flag: str) -> list[str]:
    return [word[2:] for word in (host.variable(name) or "").split() if word.startswith(flag) and len(word) > 2]


def _prefix(host: Host, tail: str) -> list[str]:
    # a conda compiler searches its own prefix; the system's gcc does not
    prefix = host.variable("CONDA_PREFIX")
    cxx = host.variable("CXX") or ""
    return [f"{prefix}/{tail}"] if prefix and "conda" in cxx else []
