"""The phases of a test as they end: told at once, kept for the report, the rest skipped with a reason."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from dsdoctor.comm.control.messages import News
from dsdoctor.comm.models import Phase, State
from dsdoctor.comm.results import PhaseResult
from dsdoctor.core.finding import Finding, Severity

SLOWNESS = frozenset({Phase.RENDEZVOUS, Phase.SAME, Phase.MESH, Phase.SPEED})
"""Phases whose warnings mean that ranks are slow, late or unlike; a warning elsewhere advises."""


def state_of(phase: Phase, findings: Iterable[Finding]) -> State:
    """How a phase ended, by what was found.

    >>> state_of(Phase.MESH, [])
    <State.OK: 'ok'>
    """
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return State.BROKEN
    return State.SLOW if Severity.WARNING in severities and phase in SLOWNESS else State.OK


class Page:
    """A phase that is being written."""

    def __init__(self) -> None:
        self.said = ""
        self.findings: tuple[Finding, ...] = ()
        self.skipped: str | None = None
        self.began = time.monotonic()


class Book:
    """``say`` hears of each phase when it begins and when it ends."""

    def __init__(self, say: Callable[[News], None]) -> None:
        self._say = say
        self.phases: list[PhaseResult] = []

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[Page]:
        """Write one phase; its time is that of the block."""
        self._say(News(at=phase.value))
        page = Page()
        yield page
        if page.skipped is not None:
            self.skip(phase, page.skipped)
            return
        self._add(
            PhaseResult(
                phase=phase,
                state=state_of(phase, page.findings),
                seconds=time.monotonic() - page.began,
                said=page.said,
                findings=page.findings,
            )
        )

    def skip(self, phase: Phase, reason: str) -> None:
        """A phase that does not take place, and why."""
        self._add(PhaseResult(phase=phase, state=State.SKIPPED, seconds=0.0, said=reason))

    def add_to(self, phase: Phase, findings: tuple[Finding, ...]) -> None:
        """Findings that show only at the end, put into the phase that they concern."""
        for place, result in enumerate(self.phases):
            if result.phase is phase and findings:
                state = state_of(phase, result.findings + findings)
                self.phases[place] = replace(result, findings=result.findings + findings, state=state)

    @property
    def broken(self) -> bool:
        """Whether a phase so far was broken."""
        return any(phase.state is State.BROKEN for phase in self.phases)

    def _add(self, result: PhaseResult) -> None:
        self.phases.append(result)
        self._say(News(phase=result))
