"""The nouns of a test of communication: who a rank is, what it saw, what it exchanged. Data only; all of it travels as JSON.

Times are seconds, sizes bytes, bandwidths bytes a second, link speeds of interfaces Mbit/s as Linux tells them.
"""

import enum
from dataclasses import dataclass, field

from dsdoctor.finding import Finding, Severity


class Phase(enum.Enum):
    """What is tested, in this order; a phase that fails for good makes the later ones pointless."""

    STATIC = "static"
    LOCAL = "local"
    RENDEZVOUS = "rendezvous"
    SAME = "same everywhere"
    MESH = "tcp mesh"
    RIGHT = "collectives"
    SPEED = "speed"
    DEEPSPEED = "deepspeed"
    ISOLATE = "where it breaks"


class State(enum.Enum):
    """How a phase ended. SLOW: it works, and something in it is slower or later than it should be (exit status 6)."""

    OK = "ok"
    SLOW = "slow"
    BROKEN = "broken"
    SKIPPED = "skipped"


class Mode(enum.Enum):
    """How much is tested: reach and correctness; and speed; and every collective, size and pair."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Who this process is, by the variables of what launched it.

    ``launcher`` is "torchrun", "deepspeed", "srun", "mpirun", "dsdoctor" or "variables" (RANK and the rest set by hand).
    ``agent_store``: torchrun's agent already serves ``master``:``port``, and rank 0 must not. ``run`` tells one start of a
    job from its restart. ``hosts`` is the host of every rank where the launcher tells it, else empty.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int | None
    launcher: str
    master: str
    port: int
    agent_store: bool = False
    run: str = "0"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked, the same on every rank. ``out`` is the folder of each rank's own files; ``backend`` is "auto", "nccl" or
    "gloo"; ``deadline`` seconds bound the whole."""

    mode: Mode = Mode.DEFAULT
    backend: str = "auto"
    deadline: float = 180.0
    out: str | None = None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with one of its addresses. ``speed`` in Mbit/s, None where the driver does not tell;
    ``kind`` is "loopback", "virtual" (docker, veth, bridge, tunnel) or "physical"."""

    name: str
    address: str
    prefix: int
    mtu: int
    speed: int | None = None
    up: bool = True
    kind: str = "physical"


@dataclass(frozen=True, kw_only=True)
class FabricPort:
    """A port of an InfiniBand or RoCE device, as /sys/class/infiniband tells. ``rate`` in Gb/s."""

    device: str
    port: int
    state: str
    physical: str
    rate: float | None = None
    link_layer: str = "InfiniBand"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The interface that a backend would take by its own rules, and which rule that was."""

    name: str
    address: str
    because: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as a rank will use it. ``pcie`` and ``pcie_max`` are (generation, lanes) now and at most; ``nvlink`` is the one-way
    bandwidth of its active links in bytes a second, None without any."""

    index: int
    name: str
    uuid: str
    free: int | None = None
    total: int | None = None
    pcie: tuple[int, int] | None = None
    pcie_max: tuple[int, int] | None = None
    nvlink: float | None = None


@dataclass(frozen=True, kw_only=True)
class Local:
    """One rank's surroundings, read without torch. ``resolves_to`` is what the host's own name resolves to; ``chosen`` and
    ``routed`` are the interface that the backend would take and the one that the kernel routes to the master by.

    ``memlock`` and ``nofile`` are this process's own limits (None: unlimited). ``variables`` are those that steer
    communication (NCCL_*, GLOO_*, TORCH_NCCL_* ...), secrets never. ``p2p_ills`` are notes on IOMMU and ACS.
    """

    hostname: str
    resolves_to: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    chosen: Chosen | None = None
    routed: Chosen | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    memlock: int | None = None
    nofile: int | None = None
    fabric: tuple[FabricPort, ...] = ()
    iommu: str | None = None
    acs: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    config_files: tuple[str, ...] = ()
    stale_shm: tuple[str, ...] = ()
    kernel: str | None = None
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    container: str | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A rank says that it is here. ``address``:``port`` is where it listens for the mesh on the interface it would use,
    ``other``:``other_port`` on the interface that reaches the master, where that is another one. ``started`` and ``arrived`` are
    seconds since the epoch by its own clock, ``seen`` when rank 0 saw it, by rank 0's. ``gpu`` is the UUID of its GPU.
    ``fingerprint`` are the versions and variables that should be the same everywhere."""

    rank: int
    world: int
    local_rank: int
    host: str
    pid: int
    address: str
    port: int
    other: str | None = None
    other_port: int | None = None
    interface: str = ""
    gpu: str | None = None
    started: float = 0.0
    arrived: float = 0.0
    seen: float = 0.0
    backend: str = "gloo"
    fingerprint: dict[str, str] = field(default_factory=dict)
    local: Local | None = None


class Outcome(enum.Enum):
    """How one rank's attempt to reach another ended."""

    REACHED = "reached"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    NO_ROUTE = "no route"
    NO_NAME = "name not found"
    SILENT = "connected, no answer"
    STRANGER = "somebody else answers"
    STALLED = "large messages stall"
    CUT_OFF = "cut off in the middle"


@dataclass(frozen=True, kw_only=True)
class Reach:
    """One direction between two ranks over plain TCP. ``bandwidth`` is that of the large message; ``retransmits`` of
    ``segments`` sent, ``mss`` and ``pmtu`` are the kernel's (TCP_INFO). ``via_other``: only its other address answered."""

    source: int
    target: int
    outcome: Outcome
    address: str = ""
    seconds: float = 0.0
    bandwidth: float | None = None
    mss: int | None = None
    pmtu: int | None = None
    retransmits: int = 0
    segments: int = 0
    via_other: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that exchange, as one of them sees it: ``device`` is "cpu" or "cuda:N"."""

    rank: int
    world: int
    device: str
    backend: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Wrong data in a result: the first wrong index, what stood there (None: nan or inf) and what should, how many are wrong.
    ``whose`` are the ranks whose contribution is wrong, empty where that could not be told. ``again``: whether it came again
    when the exchange was repeated, None when it was not repeated."""

    index: int
    got: float | None
    want: float
    count: int
    whose: tuple[int, ...] = ()
    again: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective on one rank: right, or where it went wrong, or not possible here (``skipped`` says why)."""

    op: str
    dtype: str
    elements: int
    seconds: float
    wrong: Wrong | None = None
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One collective's times on one rank, seconds per call. ``size`` is nccl-tests' S: bytes a rank for all_reduce, broadcast
    and reduce, all ranks' bytes for the others."""

    op: str
    size: int
    calls: int
    least: float
    median: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class PairTime:
    """The best time of one message of ``size`` bytes from rank ``source`` to ``target`` and back, halved."""

    source: int
    target: int
    size: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a rank is by itself (``compute``: median seconds of a fixed piece of work) and how long it waited for the
    others at barriers after equal work (``waited``: median). The late rank waits least."""

    rank: int
    compute: float
    waited: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Everything timed on one rank."""

    rank: int
    timings: tuple[Timing, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    pace: Pace | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryTry:
    """A real allocation of ``size`` bytes, written and read back. ``error`` is why it failed, None when it did not;
    ``wrong`` counts elements that came back different."""

    device: str
    size: int
    free: int | None = None
    total: int | None = None
    wrong: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Where a rank was when a phase ended it or it died. ``at`` is the exchange it was in and ``step`` its number (0 before
    the first); ``process`` its state in the kernel's letters ("S", "T" stopped, "D"); ``ended`` how it died, if it did."""

    rank: int
    at: str
    step: int
    seconds: float
    process: str = ""
    ended: str | None = None
    error: str | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """One line of the report: a phase, how it ended, what was seen (``said``) and what is the matter."""

    phase: Phase
    state: State
    seconds: float
    said: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a link can do, one way, in bytes a second, and which link and source that is."""

    bandwidth: float
    link: str
    because: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One collective at one size over all ranks. ``seconds`` is the slowest rank's median; algbw and busbw follow from it
    by nccl-tests' formulas, in bytes a second. ``medians`` are every rank's."""

    op: str
    size: int
    seconds: float
    p50: float
    p99: float
    algbw: float
    busbw: float
    slowest: int
    medians: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole test as rank 0 tells it. ``verdict`` is one line; ``ranks`` those that came; ``limit`` what the slowest link
    between them can do, if that is known. ``hosts`` is the host of every expected rank, "" where it is not known. ``wrong``
    are the ranks whose contribution to a result was wrong."""

    world: int
    backend: str
    launcher: str
    mode: Mode
    verdict: str
    state: State
    seconds: float
    phases: tuple[PhaseResult, ...]
    ranks: tuple[Claim, ...] = ()
    reaches: tuple[Reach, ...] = ()
    exchanges: int = 0
    speeds: tuple[Speed, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    paces: tuple[Pace, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    wrong: tuple[int, ...] = ()
    limit: Limit | None = None
    transports: dict[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    out: str | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings in the order of the phases, errors first."""
        order = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        found = tuple(finding for phase in self.phases for finding in phase.findings)
        return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))
