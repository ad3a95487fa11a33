"""The facts about a machine and its Python environment. Data only: nothing here looks, judges or decides.

``None`` means "not there"; a Gap means "could not be asked, and why". Sizes are bytes, architectures are compute
capabilities written as torch writes them ("9.0").
"""

import re
from dataclasses import dataclass, field


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
        """Read the first ``X.Y`` of a text; ``None`` where there is none."""
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
    ``libraries`` hold those of the catalogue in ``probe.nvcc`` that are really there; a library counts only when
    it can be linked (an unversioned ``.so`` or an ``.a``). ``scattered`` names those of both that lie where torch does
    not look when CUDA_HOME is this root: it takes ``include`` and ``lib64`` (else ``lib``) only. ``newest_gcc`` and
    ``newest_clang`` are the newest major versions that ``crt/host_config.h`` accepts.
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
    """One visible NVIDIA GPU, as NVML tells."""

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
    """The interpreter whose environment is looked at. ``packages`` maps normalised names to versions."""

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
    """torch as its files tell, and (``capabilities``, ``arch_list``, ``nccl``, bounds) as a child process tells.

    ``broken`` is the reason why it cannot be imported, None when it can; ``cuda_home`` is the folder that torch's own
    search would take now, whether or not it is a toolkit; ``gcc_bounds`` is torch's own [min, max) table entry.
    """

    version: str
    location: str
    cuda: Cuda | None = None
    hip: str | None = None
    broken: str | None = None
    cxx_standard: int = 17
    cuda_home: str | None = None
    arch_list: tuple[str, ...] = ()
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


@dataclass(frozen=True, kw_only=True)
class DeepSpeed:
    """An installed DeepSpeed, read from its files and never imported."""

    version: str
    location: str
    accelerator: str | None = None
    torch: str | None = None
    cuda: str | None = None
    installed_ops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library that some op needs: where its header is, where the file to link is, what brings it (``package``)."""

    name: str
    header: str | None = None
    library: str | None = None

    @property
    def usable(self) -> bool:
        """Whether an op can compile and link against it."""
        return self.header is not None and self.library is not None


@dataclass(frozen=True, kw_only=True)
class System:
    """Processor, memory and disk *as the control group limits them*, and the tools of a build."""

    architecture: str
    os: str
    glibc: str | None = None
    cpus: int = 1
    memory: int | None = None
    cache_free: int | None = None
    ninja: str | None = None
    ccache: str | None = None
    pip: str | None = None
    git: str | None = None
    apt_get: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that was asked. ``variables`` holds only the variables that steer builds."""

    system: System
    python: Python | None = None
    torch: Torch | None = None
    deepspeed: DeepSpeed | None = None
    toolkits: tuple[Toolkit, ...] = ()
    compilers: tuple[Compiler, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    driver: Driver | None = None
    libraries: tuple[Library, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()

    def library(self, name: str) -> Library | None:
        """The library of that name, if it was looked for and found."""
        return next((library for library in self.libraries if library.name == name), None)

    def package(self, name: str) -> str | None:
        """The version of an installed Python package, or None."""
        return self.python.packages.get(name) if self.python else None
