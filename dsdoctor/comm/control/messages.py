"""The messages between the processes of a test: rank 0's orders, the ranks' answers, the data process's messages. Data only."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from dsdoctor.comm.models import CommPhase, CommSettings, Local, Mode, PhaseState, Rank
from dsdoctor.comm.results import Exchange, PhaseResult, Reach, Report, SkippedStep, Speeds, Stuck
from dsdoctor.core.finding import Finding, Severity

EXCHANGES = frozenset({CommPhase.RIGHT, CommPhase.NODES, CommPhase.SPEED, CommPhase.DEEPSPEED})
"""The phases whose orders are done in a data process."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """Rank 0's order to all ranks: the work of a phase (of SAME: to tell what torch it is, once that is imported; of LOCAL: to read
    the host's counters again), or the end, with the exit
    ``status`` and the ``verdict``. ``groups`` are disjoint sets of ranks that exchange among themselves (empty: all together);
    ``variables`` are added to the data process's environment; ``seconds`` limit the work on every rank. ``group`` is the number of
    the order for which the ranks joined the group that it is done in: a rank that is in another one joins anew."""

    number: int
    group: int = 0
    phase: CommPhase
    seconds: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class ExchangeResult:
    """The result of a data process: how many exchanges, those that were wrong or not possible, times."""

    done: int = 0
    exchanges: tuple[Exchange, ...] = ()
    speeds: Speeds | None = None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """What a rank knows once it has imported torch, or why it cannot take part: ``unable`` in words, by which ``rule``, with its
    ``error`` and its ``kind``, or how the import ended it and by which limit. ``seconds`` since the start of the rank;
    ``delayed``: in which the import waited for a processor."""

    versions: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    unable: str = ""
    rule: str = ""
    error: str = ""
    kind: str = ""
    cause: str = ""
    perhaps: str = ""
    seconds: float = 0.0
    delayed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """One rank's answer to an order: what it found, or where it was stuck; ``left_out`` are the steps that it did not take part
    in because something raised there; ``nccl`` are the relevant lines of NCCL's log, ``counters`` the host's; ``speeds`` is
    what was timed where that did not come to its end; ``supervisor`` is the kernel's letter for the process that the launcher
    started, ``process`` the data process's number. ``torch`` is what it knows once it has imported torch, ``doing`` what it was
    in for how many ``seconds`` where that was not over."""

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
    torch: TorchFacts | None = None
    doing: str = ""
    seconds: float = 0.0


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
class Task:
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
class StartInfo:
    """What a rank's control process is started with. ``began`` is time.monotonic() at the start of the rank."""

    rank: Rank
    settings: CommSettings
    local: Local
    folder: str
    began: float


@dataclass(frozen=True, kw_only=True)
class Update:
    """A message of a control process to its supervisor: where it is now, what was ``found`` before its phase has ended, a phase
    that ended, the whole report; for a rank that follows, the status (``end``) and ``verdict`` that rank 0 gave, or that no order
    came (``lost``); ``alone`` is what a rank found that never reached the others."""

    at: str = ""
    found: tuple[Finding, ...] = ()
    phase: PhaseResult | None = None
    report: Report | None = None
    end: int | None = None
    verdict: str = ""
    lost: bool = False
    alone: tuple[Finding, ...] | None = None


# The phases of a test: each is reported when it ends, and kept for the report; skipped ones with a reason.


SLOWNESS = frozenset({CommPhase.RENDEZVOUS, CommPhase.SAME, CommPhase.MESH, CommPhase.NODES, CommPhase.SPEED})
"""Phases whose warnings mean that ranks are slow, late or different; in other phases a warning is only advice."""


def state_of(phase: CommPhase, findings: Iterable[Finding]) -> PhaseState:
    """How a phase ended, by what was found.

    >>> state_of(CommPhase.MESH, [])
    <PhaseState.OK: 'ok'>
    """
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return PhaseState.BROKEN
    return PhaseState.SLOW if Severity.WARNING in severities and phase in SLOWNESS else PhaseState.OK


class Phase:
    """A phase that is running; its findings are filled in by the function that runs it."""

    def __init__(self) -> None:
        self.said = ""
        self.findings: tuple[Finding, ...] = ()
        self.skipped: str | None = None
        self.began = time.monotonic()


class PhaseLog:
    """All phases so far. ``say`` is called when a phase begins and when it ends."""

    def __init__(self, say: Callable[[Update], None]) -> None:
        self._say = say
        self.phases: list[PhaseResult] = []

    @contextmanager
    def phase(self, phase: CommPhase) -> Iterator[Phase]:
        """Write one phase; its time is that of the block."""
        self._say(Update(at=phase.value))
        written = Phase()
        yield written
        if written.skipped is not None:
            self.skip(phase, written.skipped)
            return
        self._add(
            PhaseResult(
                phase=phase,
                state=state_of(phase, written.findings),
                seconds=time.monotonic() - written.began,
                said=written.said,
                findings=written.findings,
            )
        )

    def skip(self, phase: CommPhase, reason: str) -> None:
        """A phase that does not take place, and why."""
        self._add(PhaseResult(phase=phase, state=PhaseState.SKIPPED, seconds=0.0, said=reason))

    def add_to(self, phase: CommPhase, findings: tuple[Finding, ...]) -> None:
        """Findings that show only at the end, put into the phase that they concern."""
        if findings:
            self.change(phase, lambda before: before + findings)

    def change(self, phase: CommPhase, into: Callable[[tuple[Finding, ...]], tuple[Finding, ...]]) -> None:
        """The findings of a phase in the light of later ones."""
        for place, result in enumerate(self.phases):
            if result.phase is phase:
                findings = into(result.findings)
                self.phases[place] = replace(result, findings=findings, state=state_of(phase, findings))
                self._say(Update(found=findings))

    @property
    def broken(self) -> bool:
        """Whether a phase so far was broken."""
        return any(phase.state is PhaseState.BROKEN for phase in self.phases)

    def _add(self, result: PhaseResult) -> None:
        self.phases.append(result)
        self._say(Update(phase=result))
