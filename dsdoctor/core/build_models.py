"""What building speaks of: the source, the plan, the progress of an op, the result. What is asked for: ``requests``. Data only."""

from dataclasses import dataclass, field

from dsdoctor.core.finding import Finding
from dsdoctor.core.machine import Cuda


@dataclass(frozen=True, kw_only=True)
class OpFact:
    """An op as the source's own op_builder describes it.

    ``architectures`` are those of the known ones that the op's own filter keeps, None for an op without GPU code;
    ``flags`` are those of its C++ files, ``libraries`` what it links.
    """

    op: str
    variable: str
    module: str
    sources: tuple[str, ...] = ()
    architectures: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    broken: str | None = None

    @property
    def has_device_code(self) -> bool:
        """Whether nvcc compiles any of it."""
        return any(source.endswith(".cu") for source in self.sources)

    @property
    def needs_toolkit(self) -> bool:
        """Whether DeepSpeed builds it as a CUDA extension, be it only against CUDA's headers."""
        return self.architectures is not None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A DeepSpeed source tree in a throw-away folder. ``digest`` is the sha256 over its files' names and contents."""

    folder: str
    asked: str
    because: str = ""
    version: str
    digest: str
    commit: str | None = None
    accelerator: str
    ops: tuple[OpFact, ...]

    def op(self, name: str) -> OpFact | None:
        """The op of that name."""
        return next((fact for fact in self.ops if fact.op == name), None)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision and its reason."""

    what: str
    value: str
    because: str


@dataclass(frozen=True, kw_only=True)
class OpPlan:
    """One op that will be built; ``architectures`` is its own TORCH_CUDA_ARCH_LIST (empty without GPU code).

    ``asked`` is False for one that only comes along because another needs it.
    """

    op: str
    variable: str
    module: str
    sources: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    device_code: bool = False
    asked: bool = True


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """An op that will not be built, and why. ``asked`` is True when it was named or belongs to what was asked."""

    op: str
    because: str
    asked: bool


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One folder of an assembled toolkit's parts: what lies earlier wins."""

    include: tuple[str, ...]
    libraries: tuple[str, ...]
    tools: str | None = None


@dataclass(frozen=True, kw_only=True)
class Archive:
    """One component of a CUDA release, as NVIDIA's manifest describes it. ``path`` is relative to the address of the manifests."""

    name: str
    version: str
    path: str
    sha256: str
    size: int
    license: str


@dataclass(frozen=True, kw_only=True)
class DebianPackage:
    """A package of Debian or Ubuntu as apt's signed index describes it. ``component`` is such as "non-free"."""

    name: str
    version: str
    distribution: str
    suite: str
    component: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class ToolkitPlan:
    """The toolkit to use: ``root`` as it is, or assembled there from ``layers``, PyPI's ``fetch``, NVIDIA's ``archives`` and
    the distribution's ``packages``.

    ``headers`` are those that an assembled one must have, ``architectures`` what its nvcc compiles for (empty: not known).
    """

    root: str
    release: Cuda
    assemble: bool = False
    headers: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    architectures: tuple[str, ...] = ()
    archives: tuple[Archive, ...] = ()
    packages: tuple[DebianPackage, ...] = ()

    @property
    def fetches(self) -> bool:
        """Whether assembling it fetches anything."""
        return bool(self.fetch or self.archives or self.packages)


@dataclass(frozen=True, kw_only=True)
class HeadersPlan:
    """Python's own headers, unpacked from a Debian package into ``root`` without installing it."""

    package: str
    root: str
    include: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """Everything that will be done, with reasons. ``env`` holds only what we set, ``prepend`` what goes in front of the
    caller's value of a path variable, ``unset`` what we take away. ``disk`` is in bytes; so is ``memory``, which the compilers that
    run at a time may take together (None: not known)."""

    python: str
    source: str
    source_version: str
    accelerator: str
    ops: tuple[OpPlan, ...]
    left_out: tuple[LeftOut, ...]
    architectures: tuple[str, ...]
    toolkit: ToolkitPlan | None
    headers: HeadersPlan | None
    jobs: int
    memory: int | None
    local_version: str
    env: dict[str, str]
    prepend: dict[str, tuple[str, ...]]
    unset: tuple[str, ...]
    disk: int
    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]
    processor: str = "native"
    debug_info: bool = False
    tagged: bool = False
    """Whether the version that is built ends with a tag of the wheel's content, so that two wheels never have one name."""


@dataclass(frozen=True, kw_only=True)
class OpResult:
    """How one op fared. ``because`` is the first real error line where it was not built.

    ``cached`` says that it was compiled earlier. ``cpu_seconds`` are those of its compilers and their children, ``peak_memory`` the
    bytes of the largest process among them.
    """

    op: str
    asked: bool
    built: bool
    cached: bool = False
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_memory: int | None = None
    because: str | None = None
    log: str | None = None


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """How the build fared. ``wheel`` and ``manifest`` are paths, None when there is no wheel; ``log`` is None when nothing was run.

    ``inputs`` are the files that the ops were made from and the programs that made them, with their sha256; None when they are not
    known of every op.
    """

    wheel: str | None
    manifest: str | None
    ops: tuple[OpResult, ...]
    seconds: float
    cpu_seconds: float
    log: str | None
    findings: tuple[Finding, ...] = field(default_factory=tuple)
    inputs: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class OpProgress:
    """Progress of one op: ``state`` is "waiting", "compiling", "built", "cached", "failed" or
    "interrupted"; objects done of ``total``. ``expected`` are the seconds that it takes of this build, by an earlier one."""

    op: str
    state: str
    done: int = 0
    total: int = 0
    expected: float | None = None
