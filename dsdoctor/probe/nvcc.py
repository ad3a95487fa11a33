"""A folder -> a Toolkit: what its nvcc says, and which headers and libraries it has."""

import glob
import re

from dsdoctor.core.host import Answer, Host
from dsdoctor.core.machine import Cuda, Toolkit
from dsdoctor.probe.python import capability_of

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
CCCL = "cccl"
CCCL_PLACES = ("cccl/cuda/std/version", "cuda/std/version")
LIBRARIES = ("cudart", "curand", "cublas", "cufile", "cuda")
DEBIAN_HOME = "/usr"
COMPILER_LIMITS = r"^#if __GNUC__ > \d+|__clang_major__ >= *\d+"
NVCC_TIMEOUT_SECONDS = 10.0
"""For a question that an nvcc normally answers in milliseconds."""


def read_toolkit(host: Host, root: str, found_via: tuple[str, ...]) -> Toolkit | None:
    """Read a folder; None when it holds neither nvcc nor CUDA headers."""
    nvcc = next(iter(host.glob(f"{glob.escape(root)}/bin/nvcc")), None)
    include, libraries = _include_dirs(host, root), _library_dirs(host, root)
    headers = frozenset(name for name in HEADERS if first_of(host, include, name))
    if first_of(host, include, *CCCL_PLACES):
        headers |= {CCCL}
    answer = host.run([nvcc, "-V"], timeout=NVCC_TIMEOUT_SECONDS) if nvcc else None
    version = (
        parse_nvcc(answer.stdout)
        if answer
        else parse_cuda_header(_found_in(host, include, "cuda.h", r"^#define CUDA_VERSION .*$"))
    )
    broken = _why_silent(answer) if answer and version is None else None
    if version is None and broken is None and "cuda_runtime.h" not in headers:
        return None
    limits = parse_host_config(_found_in(host, include, "crt/host_config.h", COMPILER_LIMITS))
    listed = host.run([nvcc, "--list-gpu-arch"], timeout=NVCC_TIMEOUT_SECONDS).stdout if nvcc and version else ""
    linkable = frozenset(name for name in LIBRARIES if _linkable(host, libraries, name))
    return Toolkit(
        root=DEBIAN_HOME if _is_debian(host, root) else root,
        release=Cuda.parse(version),
        version=version,
        nvcc=nvcc if version and answer else None,
        headers=headers,
        libraries=linkable,
        scattered=_scattered(host, root, headers, linkable),
        include_dirs=include,
        library_dirs=libraries,
        architectures=tuple(capability_of(name) for name in listed.split() if name.startswith("compute_")),
        newest_gcc=limits[0],
        newest_clang=limits[1],
        broken=broken,
        found_via=found_via,
    )


def _why_silent(answer: Answer) -> str:
    """Why an nvcc does not print its version."""
    if answer.returncode is None:
        return answer.stderr
    output = (answer.stderr or answer.stdout).strip().splitlines()
    return output[0][:200] if output else f"it ends with status {answer.returncode} and prints nothing"


def parse_top(dryrun: str) -> str | None:
    """The folder that nvcc believes it is in, from ``nvcc --dryrun``.

    >>> parse_top("#$ _HERE_=/usr/local/cuda-13.0/bin\\n#$ TOP=/usr/local/cuda-13.0/bin/..")
    '/usr/local/cuda-13.0/bin/..'
    """
    match = re.search(r"^#\$ TOP=(/.*)$", dryrun, re.MULTILINE)
    return match[1].strip() if match else None


def parse_nvcc(text: str) -> str | None:
    """The version from ``nvcc -V``.

    >>> parse_nvcc("Cuda compilation tools, release 13.0, V13.0.88\\nBuild cuda_13.0.r13.0")
    '13.0.88'
    >>> parse_nvcc("Cuda compilation tools, release 11.8")
    '11.8'
    """
    match = re.search(r"release (\d{1,3}\.\d{1,3})(?:, V(\d[\d.]{0,20}))?", text)
    return (match[2] or match[1]) if match else None


def parse_cuda_header(text: str) -> str | None:
    """The release from ``cuda.h``.

    >>> parse_cuda_header("#define CUDA_VERSION 13020")
    '13.2'
    """
    match = re.search(r"^#define CUDA_VERSION (\d{4,6})\s*$", text, re.MULTILINE)
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def parse_host_config(text: str) -> tuple[int | None, int | None]:
    """The newest gcc and clang major versions that ``crt/host_config.h`` accepts.

    >>> parse_host_config("#if __GNUC__ > 15\\n#if (__clang_major__ >= 21) || (__clang_major__ < 3)")
    (15, 20)
    """
    gcc = re.search(r"^#if __GNUC__ > (\d+)", text, re.MULTILINE)
    clang = re.search(r"__clang_major__ >= *(\d+)", text)
    return int(gcc[1]) if gcc else None, int(clang[1]) - 1 if clang else None


def _include_dirs(host: Host, root: str) -> tuple[str, ...]:
    escaped = glob.escape(root)
    found = [*host.glob(f"{escaped}/include"), *host.glob(f"{escaped}/targets/*/include")]
    if root.endswith("/nvidia"):
        found += host.glob(f"{escaped}/cu*/include") + host.glob(f"{escaped}/nccl/include")
    elif root.rsplit("/", 2)[-2:-1] == ["nvidia"]:
        found += host.glob(f"{glob.escape(root.rsplit('/', 1)[0])}/nccl/include")
    if _is_debian(host, root):
        found.append("/usr/include")
    return tuple(dict.fromkeys(found))


def _library_dirs(host: Host, root: str) -> tuple[str, ...]:
    escaped = glob.escape(root)
    patterns = ["lib64", "lib64/stubs", "lib", "lib/stubs", "targets/*/lib", "targets/*/lib/stubs"]
    patterns += ["*/lib"] if root.endswith("/nvidia") else []
    found = [path for pattern in patterns for path in host.glob(f"{escaped}/{pattern}")]
    if _is_debian(host, root) or root == DEBIAN_HOME:
        found += host.glob("/usr/lib/*-linux-gnu")
    return tuple(dict.fromkeys(found))


def _scattered(host: Host, root: str, headers: frozenset[str], libraries: frozenset[str]) -> frozenset[str]:
    """The headers and libraries that are there, but not where torch looks."""
    if _is_debian(host, root):
        return frozenset()
    lib = f"{root}/lib64" if host.glob(f"{glob.escape(root)}/lib64") else f"{root}/lib"
    include = (f"{root}/include",)
    lost = {name for name in headers - {CCCL} if not first_of(host, include, name)}
    lost |= {CCCL} if CCCL in headers and not first_of(host, include, *CCCL_PLACES) else set()
    # not libcuda: its stub is in a folder of its own in every toolkit, and LIBRARY_PATH names that
    return frozenset(lost | {name for name in libraries - {"cuda"} if not _linkable(host, (lib,), name)})


def _is_debian(host: Host, root: str) -> bool:
    return root.endswith("/nvidia-cuda-toolkit") and bool(host.glob("/usr/include/cuda_runtime.h"))


def _linkable(host: Host, folders: tuple[str, ...], name: str) -> bool:
    return first_of(host, folders, f"lib{name}.so", f"lib{name}.a") is not None


def first_of(host: Host, folders: tuple[str, ...], *names: str) -> str | None:
    """The first file of these names, folder by folder."""
    for folder in folders:
        for name in names:
            found = host.glob(f"{glob.escape(folder)}/{name}")
            if found:
                return found[0]
    return None


def _found_in(host: Host, folders: tuple[str, ...], name: str, pattern: str) -> str:
    path = first_of(host, folders, name)
    return host.search(path, pattern) if path else ""
