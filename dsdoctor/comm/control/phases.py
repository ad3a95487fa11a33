"""The phases of a test: each is reported when it ends, and kept for the report; skipped ones with a reason."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dsdoctor.comm.control.messages import News
from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.comm.results import PhaseResult
from dsdoctor.core.finding import Finding, Severity

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

    def __init__(self, say: Callable[[News], None]) -> None:
        self._say = say
        self.phases: list[PhaseResult] = []

    @contextmanager
    def phase(self, phase: CommPhase) -> Iterator[Phase]:
        """Write one phase; its time is that of the block."""
        self._say(News(at=phase.value))
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

    @property
    def broken(self) -> bool:
        """Whether a phase so far was broken."""
        return any(phase.state is PhaseState.BROKEN for phase in self.phases)

    def _add(self, result: PhaseResult) -> None:
        self.phases.append(result)
        self._say(News(phase=result))
