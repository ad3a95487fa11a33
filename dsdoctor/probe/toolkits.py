"""Host -> every CUDA toolkit, from all known places: what its nvcc says, and which headers and libraries it has.

A step yields folders, and ``found_via`` is the name of the step. To search another place, write a generator and add it to STEPS.
"""

import glob
import re
from collections.abc import Iterator, Sequence

from dsdoctor.core.host import Answer, Host
from dsdoctor.core.machine import Cuda, Gap, Toolkit
from dsdoctor.probe.paths import HEADERS, LIBRARIES, first_of, folders_on
from dsdoctor.probe.python import capability_of, guessed_cuda_home

CACHE_FOLDERS = ("toolkits", "sdists", "builds", "targets", "logs")
"""What lies in the cache besides compiled ops, which a group may share and which have a rule of their own."""
FINISHED_MARKS = "toolkits/[!.]*/home/dsdoctor-toolkit.txt"
"""The file that a finished toolkit has."""
EXECUTED_PARTS = ("home/bin/nvcc", "home/bin/*", "home/nvvm/bin/*", "home/include", "home/lib64")
"""What of a toolkit runs, or is compiled and linked into ops."""
DEBIAN = "/usr/lib/nvidia-cuda-toolkit"
CCCL = "cccl"
CCCL_PLACES = ("cccl/cuda/std/version", "cuda/std/version")
DEBIAN_HOME = "/usr"
COMPILER_LIMITS = r"^#if __GNUC__ > \d+|__clang_major__ >= *\d+"
NVCC_TIMEOUT_SECONDS = 10.0
"""For a question that an nvcc normally answers in milliseconds."""


def find_toolkits(host: Host, site: Sequence[str], cache: str, named: str = "") -> tuple[Toolkit, ...]:
    """All toolkits, each real folder once with every way it was found, in the order of STEPS.

    ``site`` are the site-packages folders of the environment, ``cache`` is dsdoctor's own cache folder, ``named`` is
    a folder that the user named.
    """
    ways: dict[str, tuple[str, list[str]]] = {}
    if named:
        ways[host.resolve(named)] = (named, ["named"])
    for step in STEPS:
        for root in step(host, site, cache):
            real = host.resolve(root)
            ways.setdefault(real, (root, []))[1].append(step.__name__)
    toolkits = (read_toolkit(host, root, tuple(dict.fromkeys(steps))) for root, steps in ways.values())
    return tuple(toolkit for toolkit in toolkits if toolkit is not None)


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


def _found_in(host: Host, folders: tuple[str, ...], name: str, pattern: str) -> str:
    path = first_of(host, folders, name)
    return host.search(path, pattern) if path else ""


def judge_cache(host: Host, cache: str) -> Gap | None:
    """Why the cache, or one of its folders, is not used; None where all of it is, or there is none yet."""
    reasons = (
        host.distrust(cache),
        *(host.distrust(f"{cache}/{name}", "*") for name in CACHE_FOLDERS),
        *_toolkits(host, cache),
    )
    return next((Gap(question="cache", reason=reason) for reason in reasons if reason), None)


def distrust_toolkit(host: Host, cache: str, name: str) -> str | None:
    """Why the nvcc of an assembled toolkit is not run: others may write to it, or on the way to it, or it is there no more."""
    reasons = (
        host.distrust(f"{cache}/toolkits", f"{glob.escape(name)}/{part}", existing=True) for part in EXECUTED_PARTS
    )
    return next((reason for reason in reasons if reason), None)


def cuda_home_variable(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """$CUDA_HOME, as it is."""
    yield from _named(host, "CUDA_HOME")


def cuda_path_variable(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """$CUDA_PATH, which cuda-pathfinder prefers to CUDA_HOME while torch does the opposite."""
    yield from _named(host, "CUDA_PATH")


def nvcc_on_path(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """Every nvcc on PATH, through links and wrapper scripts: nvcc --dryrun prints its real folder as TOP."""
    for folder in folders_on(host, "PATH"):
        nvcc = f"{folder}/nvcc"
        if host.exists(nvcc):
            plain = {"NVCC_PREPEND_FLAGS": "", "NVCC_APPEND_FLAGS": ""}
            dryrun = host.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], timeout=NVCC_TIMEOUT_SECONDS, env=plain)
            top = parse_top(dryrun.stderr)
            yield host.resolve(top) if top else host.resolve(nvcc).rsplit("/", 2)[0]


def usr_local(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """/usr/local/cuda and /usr/local/cuda-X.Y."""
    yield from host.glob("/usr/local/cuda*")


def opt(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """/opt/cuda* (Arch, clusters) and the CUDA folders of NVIDIA's HPC SDK."""
    yield from host.glob("/opt/cuda*")
    yield from host.glob("/opt/nvidia/hpc_sdk/*/*/cuda/*.*")


def debian_package(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """Debian's and Ubuntu's own package, with its headers in /usr/include."""
    yield from host.glob(DEBIAN)


def conda(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """The active conda environment (headers in targets/*/include)."""
    yield from _named(host, "CONDA_PREFIX")


def module_variables(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """What EasyBuild, Spack, CMake and site modules set."""
    for name in ("EBROOTCUDA", "CUDA_ROOT", "CUDAToolkit_ROOT", "CUDA_TOOLKIT_ROOT_DIR"):
        yield from _named(host, name)


def ld_library_path(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """Toolkits whose library folder is on LD_LIBRARY_PATH."""
    for folder in folders_on(host, "LD_LIBRARY_PATH"):
        if host.glob(f"{glob.escape(folder)}/libcudart.so*"):
            root = host.resolve(folder).rsplit("/", 1)[0]
            yield root.rsplit("/targets/", 1)[0]


def pypi_wheels(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """NVIDIA's PyPI wheels: nvidia/cu13 as one folder, or nvidia/<part> of CUDA 12."""
    for folder in site:
        yield from host.glob(f"{glob.escape(folder)}/nvidia/cu[0-9][0-9]")
        if host.glob(f"{glob.escape(folder)}/nvidia/cuda_runtime"):
            yield f"{folder}/nvidia"


def assembled(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """Toolkits that dsdoctor assembled before; an unfinished one lacks the file. None that others may write to."""
    # what is judged is what is run: no link is followed a second time
    real = host.resolve(cache)
    for mark in host.glob(f"{glob.escape(real)}/{FINISHED_MARKS}"):
        name = mark.split("/")[-3]
        if distrust_toolkit(host, cache, name) is None and distrust_toolkit(host, real, name) is None:
            yield mark.rsplit("/", 1)[0]


def taken_by_torch(host: Host, site: Sequence[str], cache: str) -> Iterator[str]:  # noqa: ARG001
    """The folder that torch takes for CUDA_HOME now, whether or not it is a toolkit."""
    taken = (guessed_cuda_home(host) or "").rstrip("/")
    if taken.startswith("/"):
        yield DEBIAN if taken == DEBIAN_HOME and host.exists(DEBIAN) else taken


def _toolkits(host: Host, cache: str) -> Iterator[str | None]:
    for mark in host.glob(f"{glob.escape(cache)}/{FINISHED_MARKS}"):
        yield distrust_toolkit(host, cache, mark.split("/")[-3])


def _named(host: Host, name: str) -> Iterator[str]:
    value = host.variable(name)
    if value and value.startswith("/") and host.glob(glob.escape(value.rstrip("/")) or "/"):
        yield value.rstrip("/") or "/"


STEPS = (
    cuda_home_variable,
    cuda_path_variable,
    nvcc_on_path,
    usr_local,
    opt,
    debian_package,
    conda,
    module_variables,
    ld_library_path,
    pypi_wheels,
    assembled,
    taken_by_torch,
)
