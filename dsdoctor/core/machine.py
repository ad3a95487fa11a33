"""The facts about a machine and its Python environment, the words for what ops need of it, and which releases work together.

Data only: nothing here looks, judges or decides. ``None`` means "not there"; a Gap means "could not be queried, and why". Sizes are
bytes, architectures are compute capabilities written as torch writes them ("9.0").

A check says which need is unmet, the op table knows which op has it. Besides the words a need is the name of a CUDA header
("curand_kernel.h"), of a CUDA library to link ("libcurand.so") or of a library in ``Machine.libraries`` ("libaio").
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsdoctor.core.processes import FileHolder, SharedMemory

TAKEN = "taken_by_torch"
"""The step of the toolkit search that yields the folder torch takes for CUDA_HOME."""
WATCHED = ("libaio.so.1", "libaio.so.1t64", "libgomp.so.1", "libcufile.so.0")
"""The shared libraries that an op may link and that are not everywhere. torch itself does not load without libstdc++, libgcc_s
and glibc, and brings or requires every other part of CUDA; libcuda.so.1 is the driver's."""
ACCELERATOR_PLUGINS = {"torch-npu": "NPU", "habana-torch-plugin": "HPU", "torch-mlu": "MLU", "torch-sdaa": "SDAA"}
"""Packages that give a CPU build of torch an accelerator."""
TORCH = "torch"
INSTALLED = "installed ops"
"""Not a need of building: the finding speaks of ops that are built already, and names them beside this word."""
COMPILER = "c++ compiler"
PYTHON_HEADERS = "Python.h"
CUDA = "CUDA toolkit"
DEVICE_CODE = "GPU code"
MINOR_TOLERANT = (11, 12)
"""CUDA majors for which DeepSpeed accepts another minor than torch's (0.19.8's cuda_minor_mismatch_ok)."""
OLDEST_COMPILER = {"gcc": {14: 5, 17: 9, 20: 10, 23: 13}, "clang": {14: 5, 17: 9, 20: 12, 23: 17}}
"""Oldest compiler majors that compile torch's headers, by the C++ standard that those require."""
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch that runs any release of a CUDA major (minor-version compatibility, NVIDIA's release notes)."""
NEWEST_COMPILER = {
    "gcc": (((11, 8), 11), ((12, 0), 12), ((12, 4), 13), ((12, 8), 14)),
    "clang": (((11, 8), 14), ((12, 0), 14), ((12, 1), 15), ((12, 2), 16), ((12, 4), 17), ((12, 6), 18), ((12, 8), 19)),
}  # fmt: skip
"""The newest compiler majors that an nvcc takes, from a release on (crt/host_config.h): for one that is still to be fetched."""
COMPILED_FOR = (
    ((11, 8), ("3.5", "3.7", "5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0")),
    ((12, 0), ("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0")),
    ((12, 8), ("10.0", "10.1", "12.0")),
    ((12, 9), ("10.3", "12.1")),
)  # fmt: skip
"""The architectures of ``nvcc --list-gpu-arch``: 11.8 and 12.0 whole, later ones what they add to it."""


@dataclass(frozen=True, order=True)
class Cuda:
    """An ordered CUDA release such as 13.0.

    >>> Cuda.parse("13.0.88") > Cuda.parse("12.9")
    True
    >>> str(Cuda.parse("cu13.0 something"))
    '13.0'
    """

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str | None) -> "Cuda | None":
        """The first ``X.Y`` of a text; None where there is none."""
        match = re.search(r"(\d{1,3})\.(\d{1,3})", text or "")
        return cls(int(match[1]), int(match[2])) if match else None

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A question that could not be answered, and why."""

    question: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """A folder with CUDA development files. ``root`` is the value that CUDA_HOME would take.

    ``nvcc`` is None for a folder that has only headers and libraries (the PyPI wheels of torch). ``headers`` and
    ``libraries`` hold those of the catalogue in ``probe.paths`` that are there; a library counts only when
    it can be linked (an unversioned ``.so`` or an ``.a``). ``scattered`` names those of both that are where torch does
    not look when CUDA_HOME is this root: it takes ``include`` and ``lib64`` (else ``lib``) only. ``newest_gcc`` and
    ``newest_clang`` are the newest major versions that ``crt/host_config.h`` accepts. ``broken`` is why a ``bin/nvcc`` that
    is there does not print its version; ``nvcc`` is None then.
    """

    root: str
    release: Cuda | None = None
    version: str | None = None
    nvcc: str | None = None
    headers: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()
    scattered: frozenset[str] = frozenset()
    include_dirs: tuple[str, ...] = ()
    library_dirs: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    newest_gcc: int | None = None
    newest_clang: int | None = None
    broken: str | None = None
    found_via: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A C++ compiler with the C compiler beside it. ``kind`` is "gcc" or "clang"."""

    path: str
    c_path: str | None
    kind: str
    version: tuple[int, ...]
    found_via: str

    @property
    def major(self) -> int:
        """The version's first number."""
        return self.version[0]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible NVIDIA GPU, from NVML."""

    index: int
    name: str
    uuid: str
    capability: str
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The NVIDIA driver and the newest CUDA release it runs."""

    version: str
    cuda: Cuda | None = None


@dataclass(frozen=True, kw_only=True)
class Python:
    """The interpreter whose environment is examined. ``packages`` maps normalised names to versions."""

    executable: str
    version: str
    tag: str
    platform: str
    site: tuple[str, ...]
    include: str
    headers: bool
    scripts: str
    packages: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Torch:
    """torch from its files; ``capabilities``, ``arch_list``, ``ptx`` and ``nccl`` from a child process.

    ``broken`` is the reason why it cannot be imported, None when it can; ``cuda_home`` is the folder that torch's own
    search would take now, whether or not it is a toolkit; ``ptx`` are the architectures of its portable code;
    ``gcc_bounds`` is torch's own [min, max) table entry.
    """

    version: str
    location: str
    cuda: Cuda | None = None
    hip: str | None = None
    xpu: str | None = None
    broken: str | None = None
    cxx_standard: int = 17
    cuda_home: str | None = None
    arch_list: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    known_architectures: tuple[str, ...] = ()
    gcc_bounds: tuple[int, int] | None = None
    clang_bounds: tuple[int, int] | None = None
    nccl: str | None = None

    @property
    def minor(self) -> str:
        """Major and minor, the pair that DeepSpeed's loader compares.

        >>> Torch(version="2.14.1+cu130", location="").minor
        '2.14'
        """
        return ".".join(re.split(r"[.+]", self.version)[:2])

    @property
    def accelerator(self) -> str:
        """What it was built for, as it says itself.

        >>> [Torch(version=version, location="").accelerator for version in ("2.9.0+xpu", "2.9.0+rocm6.4", "2.9.0")]
        ['XPU', 'ROCm', 'CPU']
        >>> Torch(version="2.9", location="", cuda=Cuda(13, 0)).accelerator, Torch(version="2.9", location="", xpu="1").accelerator
        ('CUDA', 'XPU')
        """
        local = self.version.partition("+")[2]
        if self.cuda is not None:
            return "CUDA"
        if self.hip is not None or local.startswith("rocm"):
            return "ROCm"
        return "XPU" if self.xpu is not None or local.startswith("xpu") else "CPU"

    @property
    def build(self) -> str:
        """The same in words: "a CPU build", "an XPU build"."""
        return f"{'an' if self.accelerator == 'XPU' else 'a'} {self.accelerator} build"


@dataclass(frozen=True, kw_only=True)
class DeepSpeed:
    """An installed DeepSpeed or one in a wheel, read from its files and never imported.

    ``installed_ops`` are those that it lists; ``present_ops`` those whose shared object is there (None: not looked
    at); ``unclaimed`` are shared objects that belong to no listed op. ``torch`` and ``cuda`` are the releases it was
    built with; ``python`` and ``platform`` are wheel tags.
    ``sm_arch`` holds "90_real" or "90_virtual" for each op that has GPU code (an op that was not looked at is not in it).
    ``glibc`` and ``glibcxx`` are the oldest that all its ops load with. ``altered`` names files whose digest is not the recorded
    one, ``foreign`` files that came with it and belong to no DeepSpeed, ``unreadable`` shared objects that are damaged;
    ``contradictions`` says what in a wheel is not as its file name says, ``addresses`` what it would have fetched, and where from,
    ``doubts`` what no DeepSpeed has and that proves no harm.
    ``needed`` are those of WATCHED that an op links and leaves to the system: none of its own folders holds them. ``told_by``
    says where the facts come from: "manifest", "files" (the shared objects themselves) or "record" (DeepSpeed's own
    git_version_info_installed.py).
    """

    version: str
    location: str
    accelerator: str | None = None
    torch: str | None = None
    cuda: str | None = None
    installed_ops: tuple[str, ...] = ()
    present_ops: tuple[str, ...] | None = None
    unclaimed: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    platform: tuple[str, ...] = ()
    sm_arch: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cpu_architecture: str | None = None
    cpu_flags: tuple[str, ...] = ()
    glibc: str | None = None
    glibcxx: str | None = None
    altered: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    needed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    told_by: str = "record"


@dataclass(frozen=True, kw_only=True)
class JitCache:
    """torch's folder of ops compiled at run time. ``named`` is True when TORCH_EXTENSIONS_DIR names it: then torch adds no
    sub-folder for Python and CUDA. ``locks`` maps an op to the age of its lock file in seconds, ``holders`` to who has it open."""

    folder: str
    named: bool
    writable: bool
    ops: tuple[str, ...] = ()
    locks: dict[str, float] = field(default_factory=dict)
    holders: dict[str, FileHolder] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A CUDA runtime library (libcudart.so.N) in a folder of LD_LIBRARY_PATH, in the order of that variable."""

    folder: str
    major: int


@dataclass(frozen=True, kw_only=True)
class SearchPaths:
    """What is wrong or notable in PATH and LD_LIBRARY_PATH, and what compilers find there without any CUDA_HOME.

    ``headers`` and ``libraries`` name those of the CUDA catalogue on CPATH, LIBRARY_PATH and the system's own folders.
    """

    missing_path: tuple[str, ...] = ()
    missing_library_path: tuple[str, ...] = ()
    runtimes: tuple[Runtime, ...] = ()
    headers: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library that some op needs: where its header is, and the file to link."""

    name: str
    header: str | None = None
    library: str | None = None

    @property
    def usable(self) -> bool:
        """Whether an op can compile and link against it."""
        return self.header is not None and self.library is not None


@dataclass(frozen=True, kw_only=True)
class System:
    """Processor, memory and disk *as the control group limits them*, and the tools of a build.

    ``cpu_flags`` are those of /proc/cpuinfo; ``glibcxx`` is the newest symbol version of the system's libstdc++;
    ``shared_memory`` is what is free on /dev/shm; ``container`` names its kind ("docker", "wsl", ...), None outside of one.
    """

    architecture: str
    os: str
    glibc: str | None = None
    cpus: int = 1
    memory: int | None = None
    cache_free: int | None = None
    ninja: str | None = None
    ccache: str | None = None
    pip: str | None = None
    ninja_on_path: bool = True
    git: str | None = None
    apt_get: str | None = None
    cpu_model: str | None = None
    cpu_flags: frozenset[str] = frozenset()
    glibcxx: str | None = None
    shared_memory: int | None = None
    container: str | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine that a wheel is for, from its snapshot. ``capabilities`` are those of its GPUs."""

    name: str
    system: System
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that was asked. ``variables`` holds only the variables that steer builds; ``ds_names`` the names, not the
    values, of all whose name begins with DS_. ``loadable`` are those of WATCHED that an op of this Python finds, None where that
    cannot be known. ``shared_memory`` is what runs that ended left in /dev/shm, None where there is none."""

    system: System
    python: Python | None = None
    torch: Torch | None = None
    deepspeed: DeepSpeed | None = None
    toolkits: tuple[Toolkit, ...] = ()
    compilers: tuple[Compiler, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    driver: Driver | None = None
    libraries: tuple[Library, ...] = ()
    loadable: frozenset[str] | None = None
    paths: SearchPaths = field(default_factory=SearchPaths)
    jit: JitCache | None = None
    variables: dict[str, str] = field(default_factory=dict)
    ds_names: tuple[str, ...] = ()
    shared_memory: SharedMemory | None = None
    gaps: tuple[Gap, ...] = ()

    def library(self, name: str) -> Library | None:
        """The library of that name, if it was looked for and found."""
        return next((library for library in self.libraries if library.name == name), None)

    def package(self, name: str) -> str | None:
        """The version of an installed Python package, or None."""
        return self.python.packages.get(name) if self.python else None

    @property
    def unjudged_accelerator(self) -> str | None:
        """What shows that DeepSpeed runs here on an accelerator whose ops are not judged; None for CUDA and the CPU."""
        torch = self.torch
        if torch is None or torch.cuda is not None or self.variables.get("DS_ACCELERATOR") == "cpu":
            return None
        if torch.accelerator != "CPU":
            return f"torch {torch.version} is {torch.build}"
        plugins = ((name, kind, self.package(name)) for name, kind in ACCELERATOR_PLUGINS.items())
        return next((f"{name} {version} brings torch an {kind}" for name, kind, version in plugins if version), None)

    @property
    def taken(self) -> Toolkit | None:
        """The toolkit that torch and DeepSpeed would take now, if the folder they take is one."""
        return next((toolkit for toolkit in self.toolkits if TAKEN in toolkit.found_via), None)

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves (all for a list of MIG partitions: NVML names their parents)."""
        named = self.variables.get("CUDA_VISIBLE_DEVICES")
        if named is None or "MIG-" in named:
            return self.gpus
        visible: list[Gpu] = []
        for name in named.split(","):
            gpu = next(
                (gpu for gpu in self.gpus if name.strip() == str(gpu.index) or _is_uuid(gpu, name.strip())), None
            )
            if gpu is None or gpu in visible:
                # CUDA uses those before the first entry that is no GPU
                break
            visible.append(gpu)
        return tuple(visible)


def _is_uuid(gpu: Gpu, name: str) -> bool:
    """Whether a name is a beginning of the GPU's UUID, which CUDA accepts if it is unique."""
    return name.startswith("GPU-") and gpu.uuid.startswith(name)


def library(name: str) -> str:
    """The need for a CUDA library to link.

    >>> library("curand")
    'libcurand.so'
    """
    return f"lib{name}.so"


def newest_compiler(release: Cuda, kind: str) -> int | None:
    """The newest major of gcc or clang that the nvcc of a release takes, None where that is not known.

    >>> newest_compiler(Cuda(12, 4), "gcc"), newest_compiler(Cuda(12, 9), "clang"), newest_compiler(Cuda(13, 0), "gcc")
    (13, 19, None)
    """
    known = [
        most for (major, minor), most in NEWEST_COMPILER[kind] if major == release.major and minor <= release.minor
    ]
    return known[-1] if known else None


def compiled_for(release: Cuda) -> tuple[str, ...]:
    """What the nvcc of a release compiles for; empty where that is not known.

    >>> "10.0" in compiled_for(Cuda(12, 8)), "10.0" in compiled_for(Cuda(12, 4)), compiled_for(Cuda(13, 0))
    (True, False, ())
    """
    found = [names for (major, minor), names in COMPILED_FOR if major == release.major and minor <= release.minor]
    return tuple(name for names in found for name in names)


def same_release(toolkit: Cuda, torch: Cuda) -> bool:
    """Whether DeepSpeed's own check lets this toolkit build for this torch."""
    return toolkit == torch or (toolkit.major == torch.major and toolkit.major in MINOR_TOLERANT)


def compiler_limits(torch: Torch, kind: str, toolkits: Iterable[Toolkit]) -> tuple[int, int | None]:
    """Oldest and newest major of a compiler kind that torch's headers and these toolkits' nvcc take (None: no limit known).

    torch's own table counts only where a toolkit is of the release that torch was built with.
    """
    toolkits = tuple(toolkits)
    oldest, newest = OLDEST_COMPILER[kind].get(torch.cxx_standard, 5), []
    bounds = torch.gcc_bounds if kind == "gcc" else torch.clang_bounds
    if bounds is not None and any(toolkit.release == torch.cuda for toolkit in toolkits):
        oldest = max(oldest, bounds[0])
        newest.append(bounds[1] - 1)
    limits = [toolkit.newest_gcc if kind == "gcc" else toolkit.newest_clang for toolkit in toolkits]
    newest += [limit for limit in limits if limit is not None]
    return oldest, min(newest, default=None)


def fits(compiler: Compiler, limits: tuple[int, int | None]) -> bool:
    """Whether a compiler is within limits."""
    oldest, newest = limits
    return compiler.major >= oldest and (newest is None or compiler.major <= newest)
