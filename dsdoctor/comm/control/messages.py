"""The messages between the processes of a test: rank 0's orders, the ranks' answers, the data process's messages. Data only."""

from dataclasses import dataclass, field

from dsdoctor.comm.models import CommPhase, CommSettings, Local, Mode, Rank
from dsdoctor.comm.results import Exchange, PhaseResult, Reach, Report, SkippedStep, Speeds, Stuck
from dsdoctor.core.finding import Finding

EXCHANGES = frozenset({CommPhase.RIGHT, CommPhase.NODES, CommPhase.SPEED, CommPhase.DEEPSPEED})
"""The phases whose orders are done in a data process."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """Rank 0's order to all ranks: the work of a phase (of LOCAL: to read the host's counters again), or the end, with the exit
    ``status``. ``groups`` are disjoint sets of ranks that exchange among themselves (empty: all together);
    ``variables`` are added to the data process's environment; ``seconds`` limit the work on every rank. ``group`` is the number of
    the order for which the ranks joined the group that it is done in: a rank that is in another one joins anew."""

    number: int
    group: int = 0
    phase: CommPhase
    seconds: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    status: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExchangeResult:
    """The result of a data process: how many exchanges, those that were wrong or not possible, times."""

    done: int = 0
    exchanges: tuple[Exchange, ...] = ()
    speeds: Speeds | None = None


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """One rank's answer to an order: what it found, or where it was stuck; ``left_out`` are the steps that it did not take part
    in because something raised there; ``nccl`` are the relevant lines of NCCL's log, ``counters`` the host's; ``speeds`` is
    what was timed where that did not come to its end; ``supervisor`` is the kernel's letter for the process that the launcher
    started, ``process`` the data process's number."""

    rank: int
    reaches: tuple[Reach, ...] = ()
    result: ExchangeResult | None = None
    stuck: Stuck | None = None
    left_out: tuple[SkippedStep, ...] = ()
    speeds: Speeds | None = None
    nccl: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    supervisor: str = ""
    process: int = 0


@dataclass(frozen=True, kw_only=True)
class Join:
    """What a new data process needs to join its group: ``rank`` and ``world`` are those of the group."""

    rank: int
    world: int
    backend: str
    device: str
    hosts: tuple[str, ...]
    master: str
    port: int
    prefix: str
    seconds: float
    variables: dict[str, str]
    folder: str


@dataclass(frozen=True, kw_only=True)
class Do:
    """What a data process is to do next; ``phase`` None: write what the flight recorder holds to a file."""

    phase: CommPhase | None = None
    mode: Mode = Mode.QUICK
    seconds: float = 30.0


@dataclass(frozen=True, kw_only=True)
class ExchangeMessage:
    """A message of a data process: which exchange it begins, or why this rank left that one out (``skipped``), or what it timed
    so far, or its result, or how it failed and where (``stack``: frames, innermost first)."""

    step: int = 0
    at: str = ""
    skipped: str | None = None
    speeds: Speeds | None = None
    result: ExchangeResult | None = None
    error: str | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Briefing:
    """What a rank's control process is started with. ``began`` is time.monotonic() at the start of the rank."""

    rank: Rank
    settings: CommSettings
    local: Local
    folder: str
    began: float


@dataclass(frozen=True, kw_only=True)
class News:
    """A message of a control process to its supervisor: where it is now, a phase that ended, the whole report; for a rank that
    follows, the status that rank 0 gave (``end``) or that no order came (``lost``); ``alone`` is what a rank found that
    never reached the others."""

    at: str = ""
    phase: PhaseResult | None = None
    report: Report | None = None
    end: int | None = None
    lost: bool = False
    alone: tuple[Finding, ...] | None = None
