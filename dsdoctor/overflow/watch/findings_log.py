"""The findings of a watch, in the order of their steps: those that all ranks came to together, and what single ranks saw."""

from dataclasses import replace

import msgspec

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.ranks import ReportStore
from dsdoctor.overflow.verdict.verdict import judge


class LocalFinding(msgspec.Struct, frozen=True):
    """What one rank saw by itself. ``harmless``: loss and gradients are finite."""

    report: RankReport
    harmless: bool


class FindingsLog:
    """What was found so far. Rank 0 knows what every rank found, the others what they found themselves and together."""

    def __init__(self) -> None:
        self._together: list[tuple[int, Finding]] = []
        self._alone: dict[tuple[int, int], list[LocalFinding]] = {}
        self._store = ReportStore()

    def add_together(self, step: int, findings: tuple[Finding, ...]) -> None:
        """Findings that all ranks have."""
        self._together += [(step, finding) for finding in findings]

    def add_alone(self, seen: LocalFinding) -> tuple[Finding, ...]:
        """What this rank saw by itself, also for rank 0 to read. Returns what that is, as far as this rank can tell."""
        self._keep(seen)
        if ranks.this_rank() != 0:
            self._store.write(msgspec.msgpack.encode(seen))
        return judged([seen])

    def all(self) -> tuple[Finding, ...]:
        """All findings, in the order of their steps."""
        if ranks.this_rank() == 0:
            for written in self._store.read():
                self._keep(msgspec.msgpack.decode(written, type=LocalFinding))
        found = [*self._together]
        for (step, _), seen in self._alone.items():
            mine_alone = ranks.this_rank() != 0
            found += [(step, finding) for finding in judged(seen if mine_alone else among_all(seen))]
        return tuple(finding for _, finding in sorted(found, key=lambda pair: pair[0]))

    def _keep(self, seen: LocalFinding) -> None:
        self._alone.setdefault((seen.report.step, seen.report.batch), []).append(seen)


def judged(seen: list[LocalFinding]) -> tuple[Finding, ...]:
    """The findings of one step. Where nothing came of it, a warning at most, and of a value that reached neither the loss nor a
    gradient a note."""
    findings = judge([each.report for each in seen])
    if not all(each.harmless for each in seen):
        return findings
    if any(each.report.first_bad is not None for each in seen):
        return tuple(_as_note(finding) for finding in findings)
    return tuple(replace(finding, severity=min_severity(finding.severity)) for finding in findings)


def _as_note(finding: Finding) -> Finding:
    title = f"{finding.title}; the loss and the gradients of the step are finite, so it does no harm"
    return replace(finding, severity=Severity.NOTE, title=title, fix=None)


def among_all(seen: list[LocalFinding]) -> list[LocalFinding]:
    """With an empty report for each rank that saw nothing."""
    known = {each.report.rank: each for each in seen}
    first = seen[0].report
    return [
        known.get(rank)
        or LocalFinding(RankReport(rank=rank, world=first.world, step=first.step, dtype=first.dtype), seen[0].harmless)
        for rank in range(first.world)
    ]


def min_severity(severity: Severity) -> Severity:
    """A warning at most."""
    return Severity.WARNING if severity is Severity.ERROR else severity
