"""The phases of a test -> how it ended, and one line that says which rank, on which host, and why. Looks at nothing else."""

from collections.abc import Iterable, Sequence

from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.comm.results import PhaseResult
from dsdoctor.core.finding import Finding, Severity

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


def verdict(phases: Iterable[PhaseResult], *, world: int, hosts: Sequence[str], backend: str, also: str = "") -> str:
    """One line, with its mark. ``hosts`` is the host of every expected rank, "" where it is not known; ``also`` is said with
    what went well.

    >>> met = PhaseResult(phase=CommPhase.RENDEZVOUS, state=PhaseState.OK, seconds=0.4, said="")
    >>> right = PhaseResult(phase=CommPhase.RIGHT, state=PhaseState.OK, seconds=2.0, said="")
    >>> verdict([met, right], world=2, hosts=("nodea", "nodea"), backend="gloo")
    '✓ 2 of 2 ranks reach each other and get the same results (gloo, 1 host)'
    """
    phases = sorted(phases, key=lambda phase: ORDER.index(phase.phase))
    state, claim = ended(phases), _claim(phases, world, hosts, backend, also)
    if state is PhaseState.OK:
        return f"✓ {claim}"
    if state is PhaseState.SKIPPED:
        return "· nothing was tested"
    if state is PhaseState.BROKEN:
        return f"✗ {_reason(phases, Severity.ERROR, PhaseState.BROKEN)}"
    return f"! {claim}, but {_reason(phases, Severity.WARNING, PhaseState.SLOW)}"


def _reason(phases: Sequence[PhaseResult], severity: Severity, state: PhaseState) -> str:
    """The first finding of a severity, with its phase; without any, what the first phase with that state says."""
    phases = [phase for phase in phases if phase.state is state]
    found = first_finding(phases, severity)
    if found:
        return f"{found[0].phase.value}: {found[1].title}"
    phase = phases[0]
    return f"{phase.phase.value}: {phase.said}"


def first_finding(phases: Iterable[PhaseResult], severity: Severity) -> tuple[PhaseResult, Finding] | None:
    """The first finding of a severity, and the phase that made it."""
    return next(
        ((phase, finding) for phase in phases for finding in phase.findings if finding.severity is severity), None
    )


def _claim(phases: Sequence[PhaseResult], world: int, hosts: Sequence[str], backend: str, also: str) -> str:
    went_well = {phase.phase for phase in phases if phase.state in {PhaseState.OK, PhaseState.SLOW}}
    mesh = (finding.rule for phase in phases if phase.phase is CommPhase.MESH for finding in phase.findings)
    cut = any(rule.startswith("mesh-") and rule != "mesh-lossy" for rule in mesh)
    said = next((claim for phase, claim in (CUT if cut else CLAIMS) if phase in went_well), None)
    known = len(set(hosts) - {""})
    where = f"{backend}, {known} host{'' if known == 1 else 's'}" if known else backend
    if said is None:
        names = ", ".join(phase.phase.value for phase in phases if phase.phase in went_well)
        return f"no problem was found; only this was tested: {names}{also and f'; {also}'} ({where})"
    return f"{world} of {world} ranks {said}{also and f'; {also}'} ({where})"
