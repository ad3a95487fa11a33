"""Which frames are wanted: filters, and the lines of several traces merged in the order of batch and rank."""

import fnmatch
import heapq
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import step
from dsdoctor.overflow.frames.frame import CallPhase, Frame, Header, StepEnd
from dsdoctor.overflow.trace.trace_file import is_torn, read, read_header

PATTERN = "trace-rank*.jsonl"


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The trace of one rank."""

    path: Path
    header: Header

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return self.header.rank


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The traces of one run in the order of their ranks. ``notes``: what a reader should know, a line each."""

    sources: tuple[RankTrace, ...]
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that there are traces of."""
        return tuple(source.rank for source in self.sources)

    def of(self, rank: int) -> RankTrace:
        """The trace of a rank. Raises UsageError where there is none."""
        for source in self.sources:
            if source.rank == rank:
                return source
        known = ", ".join(map(str, self.ranks))
        raise UsageError(f"there is no trace of rank {rank} among these", hint=f"there are traces of rank {known}")


def sources(paths: Iterable[Path]) -> Traces:
    """The traces that files and folders hold. A file that is named twice, or in a folder as well, counts once.

    Raises UsageError for what is no trace, for two traces of one rank, and for ranks of different runs.
    """
    found: dict[Path, RankTrace] = {}
    notes: list[str] = []
    for path, asked in _files(paths):
        if not asked and not path.stat().st_size:
            notes.append(f"{path} is empty and was left out")
        elif path.resolve() not in found:
            found[path.resolve()] = RankTrace(path=path, header=read_header(path))
    ordered = tuple(sorted(found.values(), key=lambda source: source.rank))
    _check(ordered)
    notes += [
        f"the last line of {source.path} is torn and was left out: its job died or still runs"
        for source in ordered
        if is_torn(source.path)
    ]
    return Traces(sources=ordered, notes=tuple(notes))


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was named itself: one in a folder may be empty."""
    for path in paths:
        if not path.is_dir():
            yield path, True
            continue
        inside = sorted(path.glob(PATTERN))
        if not inside:
            raise UsageError(f"{path} holds no trace ({PATTERN})", hint="name the folder that the job wrote them into")
        yield from ((file, False) for file in inside)


def _check(ordered: tuple[RankTrace, ...]) -> None:
    if not ordered:
        raise UsageError(
            "all traces are empty: no batch was traced yet", hint="look again when the job has run a while"
        )
    for first, second in itertools.pairwise(ordered):
        if first.rank == second.rank:
            compare = step("dsdoctor trace compare {a} {b}", a=str(first.path), b=str(second.path))
            raise UsageError(
                f"{first.path} and {second.path} are both of rank {first.rank}",
                hint=f"one run has one trace a rank; two runs: {compare.line}",
            )
        if first.header.world != second.header.world:
            raise UsageError(
                f"{first.path} is of a run with {first.header.world} ranks, {second.path} of one with {second.header.world}",
                hint="name the traces of one run",
            )


PHASES = {"all": None, "forward": CallPhase.FORWARD, "backward": CallPhase.BACKWARD}
Ranked = tuple[int, Frame | StepEnd]
"""A line and the rank that wrote it."""


@dataclass(frozen=True)
class Numbers:
    """A set of numbers, as ranges."""

    ranges: tuple[range, ...]

    def __contains__(self, number: int) -> bool:
        return any(number in span for span in self.ranges)


def numbers(text: str, option: str) -> Numbers:
    """Parse numbers and ranges. Raises UsageError, naming the option.

    >>> chosen = numbers("3,10-12", "--batch")
    >>> [number for number in range(20) if number in chosen]
    [3, 10, 11, 12]
    """
    ranges = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise UsageError(f"{option} {text!r} is no list of numbers", hint=f"such as {option} 3,10-12")
        ranges.append(range(first, last + 1))
    return Numbers(tuple(ranges))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which frames to take; None or nothing: all. ``modules``: globs. ``bad``: only frames that hold a nan or an inf."""

    modules: tuple[str, ...] = ()
    batches: Numbers | None = None
    ranks: Numbers | None = None
    phase: CallPhase | None = None
    bad: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(fnmatch.translate(glob) for glob in self.modules))

    def takes_batch(self, batch: int) -> bool:
        """Whether frames of this batch are wanted at all."""
        return self.batches is None or batch in self.batches

    def takes(self, line: Frame | StepEnd) -> bool:
        """Whether a line is wanted. The end of a step belongs to its batch, and to no module."""
        if not self.takes_batch(line.batch):
            return False
        if isinstance(line, StepEnd):
            return not self.modules and self.phase is None and (not self.bad or bool(line.overflow))
        return (
            (self.phase is None or line.phase is self.phase)
            and (not self.modules or self._pattern.match(line.module) is not None)
            and (not self.bad or any(tensor.is_bad for tensor in line.measured))
        )


def selected(traces: Traces, selection: Selection) -> Iterator[Ranked]:
    """The wanted lines of all traces, streamed: batch by batch, and within a batch rank by rank.

    Each trace keeps its own order: a pipeline's, where batches interleave, too.
    """
    wanted = [source for source in traces.sources if selection.ranks is None or source.rank in selection.ranks]
    if not wanted:
        known = ", ".join(map(str, traces.ranks))
        raise UsageError("no trace is of a rank that was asked for", hint=f"there are traces of rank {known}")
    streams = [_lines(source, selection) for source in wanted]
    if len(streams) == 1:
        return streams[0]
    return heapq.merge(*streams, key=lambda ranked: (ranked[1].batch, ranked[0]))


def _lines(source: RankTrace, selection: Selection) -> Iterator[Ranked]:
    wanted = None if selection.batches is None else selection.takes_batch
    for line in read(source.path, wanted):
        if not isinstance(line, Header) and selection.takes(line):
            yield source.rank, line


def last_of_each(lines: Iterator[Ranked], count: int) -> Iterator[Ranked]:
    """The last frames of each rank, rank by rank, without the ends of steps."""
    kept: dict[int, deque[Ranked]] = {}
    for ranked in lines:
        if isinstance(ranked[1], Frame):
            kept.setdefault(ranked[0], deque(maxlen=count)).append(ranked)
    for _, frames in sorted(kept.items(), key=itemgetter(0)):
        yield from frames
