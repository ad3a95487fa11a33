"""The results of a communication test: connections, exchanges, times, stuck ranks, phases, the report. Data only.

Times are seconds, sizes bytes, bandwidths bytes a second.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from dsdoctor.comm.models import MAX_RANKS, Claim, CommPhase, Mode, PhaseState
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import decode
from dsdoctor.hosts.ssh import RemoteFinding

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
"""Bytes a second. A report that another process wrote is refused where it holds anything else."""


class ConnectOutcome(enum.Enum):
    """How one rank's attempt to connect to another ended."""

    REACHED = "reached"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    NO_ROUTE = "no route"
    UNREACHABLE = "unreachable"
    NO_NAME = "name not found"
    SILENT = "connected, no answer"
    STRANGER = "somebody else answers"
    STALLED = "large messages stall"
    CUT_OFF = "cut off in the middle"


@dataclass(frozen=True, kw_only=True)
class Reach:
    """One direction between two ranks over plain TCP. ``bandwidth`` is that of the large message; ``retransmits`` of
    ``segments`` sent, ``mss``, ``pmtu`` and ``rtt`` (seconds) are the kernel's (TCP_INFO). ``via_other``: only its other address
    answered. ``sent_from``: the address that the kernel sends from, where that is not the rank's own; ``seen_as``: the one that the
    target saw, where that is another; ``usable``: of a message that stalled, the bytes of the largest packet that arrived."""

    source: RankNumber
    target: RankNumber
    outcome: ConnectOutcome
    address: str = ""
    seconds: float = 0.0
    bandwidth: Amount | None = None
    mss: int | None = None
    pmtu: int | None = None
    retransmits: int = 0
    segments: int = 0
    rtt: float | None = None
    via_other: bool = False
    sent_from: str = ""
    seen_as: str = ""
    usable: int | None = None


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Wrong data in a result: the first wrong index, what stood there (None: nan or inf) and what should, how many are wrong.
    ``whose`` are the ranks whose contribution is wrong, empty where that is not known. ``again``: whether it was wrong again
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
    wrong: Wrong | None = None
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One collective's times on one rank, seconds per call. ``size`` is nccl-tests' S: bytes a rank for all_reduce, broadcast
    and reduce, all ranks' bytes for the others."""

    op: str
    size: Count
    calls: int
    least: float
    median: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class PairTime:
    """The best time of one message of ``size`` bytes from rank ``source`` to ``target`` and back, halved; ``latency`` is that of
    one byte."""

    source: RankNumber
    target: RankNumber
    size: Count
    seconds: float
    latency: float = 0.0

    @property
    def transfer(self) -> float:
        """Seconds for the bytes themselves, at least a tenth of the whole."""
        return max(self.seconds - self.latency, self.seconds / 10)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a rank is by itself (``compute``: median seconds of a fixed piece of work) and how long it waited for the
    others at barriers after equal work (``waited``: median). The late rank waits least. ``cpu``: least seconds of processor time of
    that work, 0 where it is not the processor's; ``delayed``: the part of its time in which the rank waited for a processor
    (median); ``equals``: ranks with which it shares processors by the same rights."""

    rank: RankNumber
    compute: float
    waited: float
    cpu: float = 0.0
    delayed: float = 0.0
    equals: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the processor quota of a rank's control group did meanwhile: ``quota`` in processors (0: none), the ``periods`` that
    passed, and in how many of them it was used up (``throttled``)."""

    rank: RankNumber
    quota: float = 0.0
    periods: int = 0
    throttled: int = 0


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Everything timed on one rank."""

    rank: RankNumber
    timings: tuple[Timing, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    pace: Pace | None = None
    held: Held | None = None


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A step that a rank left out because something raised there: its number, what it was, and the reason."""

    step: int
    at: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Where a rank was when a phase ended it or it died. ``at`` is the exchange it was in and ``step`` its number (0 before
    the first); ``process`` its state in the kernel's letters ("S", "T" stopped, "D"); ``ended`` how it died, if it did.
    ``error`` is what it raised, ``stack`` where it stands or raised that, innermost first; ``sequence`` and ``operation`` are the
    last collective that it began, by torch's flight recorder. ``quiet``: seconds since it last made progress.
    ``cause``: the limit that ended it, where one is known to; ``perhaps``: what else may have."""

    rank: RankNumber
    at: str
    step: int
    seconds: float
    process: str = ""
    ended: str | None = None
    error: str | None = None
    stack: tuple[str, ...] = ()
    sequence: int | None = None
    operation: str = ""
    quiet: float = 0.0
    cause: str = ""
    perhaps: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """One line of the report: a phase, how it ended, what was seen (``said``) and its findings."""

    phase: CommPhase
    state: PhaseState
    seconds: float
    said: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a link can do, one way, in bytes a second, and which link and source that is."""

    bandwidth: Amount
    link: str
    because: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One collective at one size over all ranks. ``seconds`` is the slowest rank's median; algbw and busbw follow from it
    by nccl-tests' formulas, in bytes a second. ``medians`` are every rank's."""

    op: str
    size: Count
    seconds: float
    p50: float
    p99: float
    algbw: float
    busbw: float
    slowest: RankNumber
    medians: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole test, as rank 0 reports it. ``verdict`` is one line; ``ranks`` are those that came; ``limit`` what the slowest link
    between them can do, if that is known. ``hosts`` is the host of every expected rank, "" where it is not known. ``wrong``
    are the ranks whose contribution to a result was wrong; ``left_out`` the bad hosts of a hostfile, with the reason."""

    world: int
    backend: str
    launcher: str
    mode: Mode
    verdict: str
    state: PhaseState
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
    left_out: dict[str, str] = field(default_factory=dict)
    out: str | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings: errors first, warnings that made a phase slow before mere advice, and then in the order of the phases."""
        order = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
        found = [(phase.state is PhaseState.OK, finding) for phase in self.phases for finding in phase.findings]
        found.sort(key=lambda each: (order.index(each[1].severity), each[0]))
        return tuple(finding for _, finding in found)


# A Report -> the ranks that are themselves the cause of what is broken, and why. Of ranks that only waited it names none.


def bad_ranks(report: Report) -> dict[int, str]:
    """Those without which the others could go on; empty where the findings do not decide it."""
    if report.state is not PhaseState.BROKEN:
        return {}
    rules = {finding.rule for finding in report.findings if finding.severity is Severity.ERROR}
    return {rank: why for needed, rank, why in _candidates(report) if needed & rules}


def _candidates(report: Report) -> Iterator[tuple[set[str], int, str]]:
    """The rules of which one must have been found, a rank, and what is the matter with it."""
    came = {claim.rank for claim in report.ranks}
    for rank in range(report.world) if came else ():
        if rank not in came:
            yield (
                {"rank-missing", "rank-unable", "rank-starting", "master-unreachable"},
                rank,
                "it did not join the rendezvous",
            )
    for rank in report.wrong:
        yield {"data-is-wrong"}, rank, "its data is wrong"
    for stuck in report.stuck:
        if stuck.process == "T":
            yield {"rank-stopped"}, stuck.rank, f"it was stopped by a signal, in {stuck.at}"
        elif stuck.ended:
            yield {"rank-died", "host-vanished", "rank-stopped"}, stuck.rank, f"lost in {stuck.at}: {stuck.ended}"


# Rank 0's JSON document -> its Report. What another host wrote has no steps: its commands are told as evidence.


@dataclass(frozen=True, kw_only=True)
class _Document:
    report: Report | None = None


def read_own_report(document: str) -> Report | None:
    """The report of a rank 0 that is a process of this machine, started by us; None where the document holds none."""
    try:
        return decode(document, _Document).report
    except msgspec.MsgspecError:
        return None


def read_remote_report(document: str) -> Report | None:
    """The report of a rank 0 on another host, which may have written anything; None where the document holds none."""
    try:
        whole: Any = decode(document, object)
        for phase in whole["report"]["phases"]:
            told = msgspec.convert(phase.get("findings", ()), type=tuple[RemoteFinding, ...])
            phase["findings"] = msgspec.to_builtins([finding.ours() for finding in told])
        return msgspec.convert(whole, type=_Document).report
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, AttributeError):
        # what stands there is no object, or no list
        return None


# The phases of a test -> how it ended, and one line that says which rank, on which host, and why. Looks at nothing else.


ORDER = tuple(CommPhase)
CLAIMS = (
    (CommPhase.RIGHT, "reach each other and get the same results"),
    (CommPhase.MESH, "reach each other over TCP"),
    (CommPhase.RENDEZVOUS, "have met"),
)
"""What is true when a phase went well; the first that applies says most."""
CUT = ((CommPhase.RIGHT, "get the same results"), (CommPhase.RENDEZVOUS, "have met"))
"""The same where some ranks do not reach others."""


def ended(phases: Iterable[PhaseResult]) -> PhaseState:
    """How the whole test ended: as badly as its worst phase; SKIPPED where nothing was tested at all."""
    states = {phase.state for phase in phases}
    if PhaseState.BROKEN in states:
        return PhaseState.BROKEN
    if PhaseState.SLOW in states:
        return PhaseState.SLOW
    return PhaseState.OK if PhaseState.OK in states else PhaseState.SKIPPED


def verdict(phases: Iterable[PhaseResult], *, world: int, hosts: Sequence[str], backend: str) -> str:
    """One line, with its mark. ``hosts`` is the host of every expected rank, "" where it is not known.

    >>> met = PhaseResult(phase=CommPhase.RENDEZVOUS, state=PhaseState.OK, seconds=0.4, said="")
    >>> right = PhaseResult(phase=CommPhase.RIGHT, state=PhaseState.OK, seconds=2.0, said="")
    >>> verdict([met, right], world=2, hosts=("nodea", "nodea"), backend="gloo")
    '✓ 2 of 2 ranks reach each other and get the same results (gloo, 1 host)'
    """
    phases = sorted(phases, key=lambda phase: ORDER.index(phase.phase))
    state, claim = ended(phases), _claim(phases, world, hosts, backend)
    if state is PhaseState.OK:
        return f"✓ {claim}"
    if state is PhaseState.SKIPPED:
        return "· nothing was tested"
    if state is PhaseState.BROKEN:
        return f"✗ {_reason(phases, PhaseState.BROKEN)}"
    return f"! {claim}, but {_reason(phases, PhaseState.SLOW)}"


REASONS = {PhaseState.BROKEN: Severity.ERROR, PhaseState.SLOW: Severity.WARNING}


def reason(phases: Iterable[PhaseResult]) -> tuple[PhaseResult, Finding] | None:
    """The finding that the verdict on these phases names, and its phase; None where it names none."""
    phases = sorted(phases, key=lambda phase: ORDER.index(phase.phase))
    state = ended(phases)
    severity = REASONS.get(state)
    return first_finding((phase for phase in phases if phase.state is state), severity) if severity else None


def _reason(phases: Sequence[PhaseResult], state: PhaseState) -> str:
    """The finding that is the reason, with its phase; without any, what the first phase with that state says."""
    if found := reason(phases):
        return f"{found[0].phase.value}: {found[1].title}"
    phase = next(phase for phase in phases if phase.state is state)
    return f"{phase.phase.value}: {phase.said}"


def first_finding(phases: Iterable[PhaseResult], severity: Severity) -> tuple[PhaseResult, Finding] | None:
    """The first finding of a severity, and the phase that made it."""
    return next(
        ((phase, finding) for phase in phases for finding in phase.findings if finding.severity is severity), None
    )


def _claim(phases: Sequence[PhaseResult], world: int, hosts: Sequence[str], backend: str) -> str:
    went_well = {phase.phase for phase in phases if phase.state in {PhaseState.OK, PhaseState.SLOW}}
    mesh = (finding.rule for phase in phases if phase.phase is CommPhase.MESH for finding in phase.findings)
    cut = any(rule.startswith("mesh-") and rule != "mesh-lossy" for rule in mesh)
    said = next((claim for phase, claim in (CUT if cut else CLAIMS) if phase in went_well), None)
    known = len(set(hosts) - {""})
    where = f"{backend}, {known} host{'' if known == 1 else 's'}" if known else backend
    if said is None:
        names = ", ".join(phase.phase.value for phase in phases if phase.phase in went_well)
        return f"no problems; tested only: {names} ({where})"
    return f"{world} of {world} ranks {said} ({where})"
