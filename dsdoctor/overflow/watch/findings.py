"""The findings of a watch: printed on stderr, and in a file if one is named; kept in the order of their steps.

In full the first time, in one line later. Some all ranks came to together, others single ranks saw."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from dsdoctor.core.files import append_text
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.script import write_stderr
from dsdoctor.overflow.frames import frame
from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.ranks import ReportStore
from dsdoctor.overflow.verdict.verdict import judge

MARKS = {Severity.NOTE: "·", Severity.WARNING: "!", Severity.ERROR: "✗"}


class LocalFinding(msgspec.Struct, frozen=True):
    """What one rank saw by itself. ``harmless``: loss and gradients are finite."""

    report: RankReport
    harmless: bool


class Announcer:
    """Prints each finding in full once, and later only that it came again. The caller decides which rank prints."""

    def __init__(self, *, report_file: str | None = None) -> None:
        self._printed: dict[str, int] = {}
        self._file = None if report_file is None else Path(report_file)
        self.lines: list[str] = []

    def announce(
        self, findings: tuple[Finding, ...], rank_reports: list[RankReport], *, notes_once: bool = False
    ) -> None:
        """Print findings, a note in one line (every time, or only the first with ``notes_once``), and with an error seen for the
        first time the frames that led to it."""
        for finding in findings:
            key = key_of(finding)
            again = self._printed[key] = self._printed.get(key, 0) + 1
            if again == 1 or (finding.severity is Severity.NOTE and not notes_once):
                self._print(full_lines(finding))
            elif finding.severity is Severity.NOTE:
                continue
            elif again & (again - 1) == 0:
                self._print([f"{head(finding)}  ({ordinal(again)} time)"])
        first = findings[0] if findings else None
        if first is not None and first.severity is Severity.ERROR and self._printed[key_of(first)] == 1:
            self._print(list(frame_lines(rank_reports)))
        self._append(findings, rank_reports)

    def say(self, line: str) -> None:
        """Print one line that is no finding."""
        self._print([f"dsdoctor: {line}"])

    def _print(self, lines: list[str]) -> None:
        self.lines += lines
        for line in lines:
            write_stderr(f"{line}\n")

    def _append(self, findings: tuple[Finding, ...], rank_reports: list[RankReport]) -> None:
        if self._file is None:
            return
        plain = [msgspec.to_builtins(finding) for finding in findings]
        step = rank_reports[0].step if rank_reports else None
        try:
            document = {"schema": "dsdoctor/1", "command": "run", "step": step, "findings": plain}
            append_text(self._file, json.dumps(document) + "\n")
        except OSError as error:
            self._print(
                [
                    f"dsdoctor: {self._file} cannot be written ({os.strerror(error.errno or 0)}): reports go to stderr only"
                ]
            )
            self._file = None


def key_of(finding: Finding) -> str:
    """What makes two findings the same. A note is not the error that comes of it later."""
    return f"{finding.rule} {finding.affects} {finding.severity is Severity.NOTE}"


def ordinal(number: int) -> str:
    """A power of two from 2 on, as a place in a row.

    >>> [ordinal(number) for number in (2, 4, 32, 512)]
    ['2nd', '4th', '32nd', '512th']
    """
    return f"{number}{'nd' if number % 10 == 2 and number % 100 != 12 else 'th'}"


def head(finding: Finding) -> str:
    """The first line of a finding."""
    return f"dsdoctor: {MARKS[finding.severity]} {finding.title}  [{finding.rule}]"


def full_lines(finding: Finding) -> list[str]:
    """A finding in full; a note in one line."""
    if finding.severity is Severity.NOTE:
        return [head(finding)]
    fix = [] if finding.fix is None else [f"      Fix: {finding.fix.text}"]
    return [head(finding), *(f"      {line}" for line in finding.evidence), *fix]


def frame_lines(rank_reports: list[RankReport]) -> Iterator[str]:
    """The frames of the first rank that has any, as the guide prints them."""
    for rank_report in rank_reports:
        if rank_report.first_bad is not None and rank_report.frames:
            who = f" on rank {rank_report.rank}" if rank_report.world > 1 else ""
            yield f"Last {len(rank_report.frames)} frames{who}:"
            yield frame.COLUMNS
            yield frame.text(rank_report.frames)
            return


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
        harmless = "the loss and the gradients of the step are finite, so it is harmless"
        return tuple(
            replace(each, severity=Severity.NOTE, title=f"{each.title}; {harmless}", fix=None) for each in findings
        )
    return tuple(
        replace(each, severity=Severity.WARNING) if each.severity is Severity.ERROR else each for each in findings
    )


def among_all(seen: list[LocalFinding]) -> list[LocalFinding]:
    """With an empty report for each rank that saw nothing."""
    known = {each.report.rank: each for each in seen}
    first = seen[0].report
    return [
        known.get(rank)
        or LocalFinding(RankReport(rank=rank, world=first.world, step=first.step, dtype=first.dtype), seen[0].harmless)
        for rank in range(first.world)
    ]
