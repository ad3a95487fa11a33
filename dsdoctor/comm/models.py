"""The data of a communication test: the request, a rank, its host and network. Data only; all of it is sent as JSON.

Sizes are bytes, link speeds of interfaces Mbit/s as Linux reports them.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsdoctor.core.text import and_more
from dsdoctor.ranks.nodelist import in_words, spans_of

MAX_RANKS = 1_000_000
"""More ranks are no world that anybody has."""


class CommPhase(enum.Enum):
    """What is tested, in this order. When a phase is broken, the later ones are skipped."""

    STATIC = "static"
    LOCAL = "local"
    RENDEZVOUS = "rendezvous"
    SAME = "same everywhere"
    MESH = "tcp mesh"
    RIGHT = "collectives"
    NODES = "nodes"
    SPEED = "speed"
    DEEPSPEED = "deepspeed"
    ISOLATE = "where it breaks"


class PhaseState(enum.Enum):
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
    job from its restart. ``hosts`` is the host of every rank where the launcher says it, else empty.
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
class CommSettings:
    """The options of a test, the same on every rank. ``out`` is the folder of each rank's own files; ``backend`` is "auto",
    "nccl" or "gloo"; the whole test takes at most ``deadline`` seconds."""

    mode: Mode = Mode.DEFAULT
    backend: str = "auto"
    deadline: float = 180.0
    out: str | None = None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with one of its addresses. ``speed`` in Mbit/s, None where the driver does not report it;
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
    """A port of an InfiniBand or RoCE device, as /sys/class/infiniband reports it. ``rate`` in Gb/s; ``full``: with all lanes."""

    device: str
    port: int
    state: str
    physical: str
    rate: float | None = None
    full: float | None = None
    link_layer: str = "InfiniBand"


@dataclass(frozen=True, kw_only=True)
class ChosenInterface:
    """The interface that a backend would take by its own rules, and which rule that was."""

    name: str
    address: str
    because: str


@dataclass(frozen=True, kw_only=True)
class RankGpu:
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
    """The host of one rank: interfaces, limits, GPUs, variables; read without torch. ``resolves_to`` is what the host's own
    name resolves to; ``chosen`` and ``routed`` are the interface that the backend would take and the one that the kernel
    routes to the master by.

    ``tmp`` is the folder for temporary files that is asked for, ``tmp_free`` its bytes, 0 where it takes no more files.

    ``memlock``, ``nofile`` and ``address_space`` are this process's own limits (None: unlimited). ``variables`` are those
    that steer communication (NCCL_*, GLOO_*, TORCH_NCCL_* ...), without secrets. ``counters`` are the
    host's error counters before the test, read by its first rank.
    """

    hostname: str
    resolves_to: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    chosen: ChosenInterface | None = None
    routed: ChosenInterface | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    tmp: str = ""
    tmp_free: int | None = None
    memlock: int | None = None
    nofile: int | None = None
    address_space: int | None = None
    fabric: tuple[FabricPort, ...] = ()
    iommu: str | None = None
    acs: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    config_files: tuple[str, ...] = ()
    kernel: str | None = None
    driver: str | None = None
    gpus: tuple[RankGpu, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a rank writes to the store when it has come. ``address``:``port`` is where it listens for the mesh on the
    interface it would use, ``other``:``other_port`` on the interface that reaches the master, where that is another one.
    ``started`` and ``arrived`` are seconds since the epoch by its own clock, ``seen`` when rank 0 saw it, by rank 0's.
    ``delayed``: seconds in which it waited for a processor until it came. ``gpu`` is the UUID of its GPU. ``fingerprint`` are the
    versions and variables that should be the same everywhere."""

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
    delayed: float = 0.0
    backend: str = "gloo"
    fingerprint: dict[str, str] = field(default_factory=dict)
    local: Local | None = None

    @property
    def process(self) -> str:
        """The rank with its process, such as "rank 1 (nodeb, pid 4101)"."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks that exchange, as one of them sees it: ``device`` is "cpu" or "cuda:N"."""

    rank: int
    world: int
    device: str
    backend: str
    hosts: tuple[str, ...] = ()


# Ranks -> words for a finding: with their hosts, consecutive ranks as a range.


MAX_NAMED = 12
MAX_HOSTS = 4
"""Hosts that are named one by one."""


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks in words, with their hosts where these are known.

    >>> named((1,), ("a", "b")), named((1, 2, 3), ())
    ('rank 1 (b)', 'ranks 1-3')
    >>> named((0, 2, 3), ("a", "a", "b", "b"))
    'ranks 0 (a), 2-3 (b)'
    >>> named(tuple(range(4, 1000)), tuple(f"gpu{rank // 4:04d}" for rank in range(1000)))
    'ranks 4-999 (gpu[0001-0249])'
    """
    parts: list[tuple[int, int, str]] = []
    for rank in ranks:
        host = hosts[rank] if rank < len(hosts) else ""
        if parts and parts[-1][1] == rank - 1 and parts[-1][2] == host:
            parts[-1] = (parts[-1][0], rank, host)
        else:
            parts.append((rank, rank, host))
    if len(parts) > MAX_HOSTS:
        places = in_words(host for _, _, host in parts if host)
        return f"ranks {and_more(spans_of(ranks), MAX_NAMED)}{f' ({places})' if places else ''}"
    spans = [f"{first}-{last}" if last > first else str(first) for first, last, _ in parts]
    shown = [span + (f" ({host})" if host else "") for span, (_, _, host) in zip(spans, parts, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {and_more(shown, MAX_NAMED)}"


def by_rank(claims: Iterable[Claim]) -> tuple[str, ...]:
    """The host of every rank up to the last that is here, "" where none is."""
    hosts = {claim.rank: claim.host for claim in claims}
    return tuple(hosts.get(rank, "") for rank in range(max(hosts, default=-1) + 1))
