"""Host -> every CUDA toolkit, from all known places. ``found_via`` is the name of the step that found it.

A step yields folders; ``probe.nvcc`` reads what is in them. To search another place, write a generator and add it to STEPS.
"""

import glob
from collections.abc import Iterator, Sequence

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap, Toolkit
from dsdoctor.probe.nvcc import DEBIAN_HOME, NVCC_TIMEOUT_SECONDS, parse_top, read_toolkit
from dsdoctor.probe.paths import folders_on
from dsdoctor.probe.python import guessed_cuda_home

CACHE_FOLDERS = ("toolkits", "sdists", "builds", "targets", "logs")
"""What lies in the cache besides compiled ops, which a group may share and which have a rule of their own."""
FINISHED_MARKS = "toolkits/[!.]*/home/dsdoctor-toolkit.txt"
"""The file that a finished toolkit has."""
EXECUTED_PARTS = ("home/bin/nvcc", "home/bin/*", "home/nvvm/bin/*", "home/include", "home/lib64")
"""What of a toolkit runs, or is compiled and linked into ops."""
DEBIAN = "/usr/lib/nvidia-cuda-toolkit"


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
