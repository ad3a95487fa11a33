"""Chosen batches -> a trace file per rank, and the same in the guide's text format beside it."""

import contextlib
import io
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import append_text, open_new
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.stderr import write_stderr
from dsdoctor.core.version import __version__
from dsdoctor.overflow.frames import frame
from dsdoctor.overflow.frames import frame as guide_format
from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.frames.frame import Header, StepEnd
from dsdoctor.overflow.hooks import engine as engine_facts
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.hooks.ranks import ReportStore
from dsdoctor.overflow.trace.trace_file import SCHEMA, TraceWriter, file_name
from dsdoctor.overflow.verdict.verdict import judge

# Findings -> lines on stderr, and in a file if one is named: in full the first time, in one line later.


MARKS = {Severity.NOTE: "·", Severity.WARNING: "!", Severity.ERROR: "✗"}


class Announcer:
    """Prints each finding in full once, and later only that it came again. The caller decides which rank prints."""

    def __init__(self, *, report_file: str | None = None) -> None:
        self._said: dict[str, int] = {}
        self._file = None if report_file is None else Path(report_file)
        self.lines: list[str] = []

    def announce(
        self, findings: tuple[Finding, ...], rank_reports: list[RankReport], *, notes_once: bool = False
    ) -> None:
        """Print findings, a note in one line (every time, or only the first with ``notes_once``), and with an error seen for the
        first time the frames that led to it."""
        for finding in findings:
            key = key_of(finding)
            again = self._said[key] = self._said.get(key, 0) + 1
            if again == 1 or (finding.severity is Severity.NOTE and not notes_once):
                self._print(full_lines(finding))
            elif finding.severity is Severity.NOTE:
                continue
            elif again & (again - 1) == 0:
                self._print([f"{head(finding)}  (time {again})"])
        first = findings[0] if findings else None
        if first is not None and first.severity is Severity.ERROR and self._said[key_of(first)] == 1:
            self._print(frame_lines(rank_reports))
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


def head(finding: Finding) -> str:
    """The first line of a finding."""
    return f"dsdoctor: {MARKS[finding.severity]} {finding.title}  [{finding.rule}]"


def full_lines(finding: Finding) -> list[str]:
    """A finding in full; a note in one line."""
    if finding.severity is Severity.NOTE:
        return [head(finding)]
    fix = [] if finding.fix is None else [f"      Fix: {finding.fix.text}"]
    return [head(finding), *(f"      {line}" for line in finding.evidence), *fix]


def frame_lines(rank_reports: list[RankReport]) -> list[str]:
    """The frames of the first rank that has any, as the guide prints them."""
    return list(_frame_lines(rank_reports))


def _frame_lines(rank_reports: list[RankReport]) -> Iterator[str]:
    for rank_report in rank_reports:
        if rank_report.first_bad is not None and rank_report.frames:
            who = f" on rank {rank_report.rank}" if rank_report.world > 1 else ""
            yield f"Last {len(rank_report.frames)} frames{who}:"
            yield frame.COLUMNS
            yield frame.text(rank_report.frames)
            return


# The findings of a watch, in the order of their steps: those that all ranks came to together, and what single ranks saw.


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
    title = f"{finding.title}; the loss and the gradients of the step are finite, so it does no harm there"
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


FOLDER = "dsdoctor-trace"


class Tracer:
    """Writes records as they come: the forward when it is over, the backward when the step is.

    A process that was forked from this one has the same open files, and writes nothing: the trace is its parent's.
    """

    def __init__(self, engine: Any, options: Options) -> None:
        self._pid = os.getpid()
        path = unused(Path(options.trace_dir or FOLDER) / file_name(ranks.this_rank()))
        try:
            self._writer = TraceWriter(path, header_of(engine))
            self._text = io.TextIOWrapper(open_new(path.with_suffix(".txt")), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}", hint="name another folder with trace_dir"
            ) from error
        self._open: list[tuple[BatchRecord, int]] = []
        self._warned = False

    def forward(self, record: BatchRecord) -> None:
        """A forward is over. A record without gradients is complete with that."""
        if not self._is_of_this_process():
            return
        record.readings.peek()
        self._write(record, 0)
        if torch.is_grad_enabled():
            self._open.append((record, len(record.calls)))
        else:
            record.settle()

    def step_ends(self, overflow: bool | None, losses: list[Tensor], batches: int, scale: float | None) -> None:
        """Write the gradients of the step's records, and DeepSpeed's decision. ``scale``: the loss scale in the gradients."""
        if not self._open or not self._is_of_this_process():
            return
        for record, written in self._open:
            record.settle()
            self._write(record, written, scale)
        loss = ", ".join(f"{float(value):g}" for value in losses if value.numel() == 1)
        step = self._open[-1][0].position.step
        self._open = []
        self._writer.write((StepEnd(step=step, batch=batches - 1, overflow=overflow, loss_scale=scale, loss=loss),))

    def __del__(self) -> None:
        # the engine was dropped before the end of the script
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Write what is left, and close. A second call does nothing."""
        if not self._is_of_this_process():
            return
        self.step_ends(None, [], 0, None)
        self._writer.close()
        with contextlib.suppress(OSError):  # a full disk was reported before
            self._text.close()

    def _is_of_this_process(self) -> bool:
        return self._pid == os.getpid()

    def _write(self, record: BatchRecord, first: int, scale: float | None = None) -> None:
        frames = tuple(record.frames())[first:]
        if scale is not None and scale != 1:
            frames = tuple(msgspec.structs.replace(frame, loss_scale=scale) for frame in frames)
        self._writer.write(frames)
        try:
            self._text.write(guide_format.text(frames) + "\n")
            self._text.flush()
        except OSError as error:
            self._writer.broken = self._writer.broken or str(error.strerror)
        if self._writer.broken and not self._warned:
            self._warned = True
            write_stderr(
                f"dsdoctor: {self._writer.path}: {self._writer.broken}; the trace ends, the training goes on\n"
            )


def header_of(engine: Any) -> Header:
    """Who writes the trace."""
    deepspeed = sys.modules.get("deepspeed")
    return Header(
        schema=SCHEMA,
        dsdoctor=__version__,
        rank=ranks.this_rank(),
        world=ranks.world(),
        host=platform.node(),
        torch=str(torch.__version__),
        deepspeed=str(getattr(deepspeed, "__version__", "")),
        zero_stage=engine_facts.zero_stage(engine),
        stage=engine_facts.pipeline_stage(engine)[0] if engine_facts.is_pipeline(engine) else None,
        dtype=str(engine_facts.dtype(engine)).removeprefix("torch."),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def unused(path: Path) -> Path:
    """The path, or one beside it with a number: a second engine, or a job that is started again, overwrites no trace."""
    number = 2
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return free
