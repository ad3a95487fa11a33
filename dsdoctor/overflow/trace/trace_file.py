"""A trace on disk: JSON lines, one file per rank; and the wanted lines of several, merged in the order of batch and rank.

Writing loses at most what was not flushed; reading streams.
"""

import errno
import fnmatch
import heapq
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import msgspec

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import make_folder, open_new, open_regular, real_path
from dsdoctor.core.finding import step
from dsdoctor.core.text import decode
from dsdoctor.overflow.frames.frame import CallPhase, Frame, Header, Line, StepEnd

SCHEMA = "dsdoctor/trace/1"
MAX_HEADER_BYTES = 1 << 16
"""Bytes. A checkpoint that was given by mistake may have no line end at all."""
MAX_LINE_BYTES = 64 << 20
"""Bytes. A frame has some KiB."""
FRAME_OF = re.compile(rb'\{"t":"frame","batch":(\d+),')
"""How a frame's line begins, as the writer writes it: its batch is known without decoding the line."""
_encode = msgspec.json.Encoder(enc_hook=str).encode  # torch.__version__ is no plain str
_decode: Callable[[bytes], Line] = msgspec.json.Decoder(Line).decode
Span = tuple[int, int]
PATTERN = "trace-rank*.jsonl"
PHASES = {"all": None, "forward": CallPhase.FORWARD, "backward": CallPhase.BACKWARD}
Ranked = tuple[int, Frame | StepEnd]
"""A line and the rank that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The byte ranges of each batch's frames. Batches of a pipeline interleave: one may have several ranges."""

    path: Path
    spans: dict[int, list[Span]] = field(default_factory=dict)

    def frames(self, batch: int) -> tuple[Frame, ...]:
        """The frames of one batch, in the order they were written. None: this trace has no such batch."""
        found: list[Frame] = []
        with self.path.open("rb") as file:
            for start, end in self.spans.get(batch, ()):
                file.seek(start)
                lines = (decoded(self.path, raw) for raw in file.read(end - start).splitlines())
                found += [line for line in lines if isinstance(line, Frame)]
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The trace of one rank."""

    path: Path
    header: Header

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return self.header.rank


@dataclass(frozen=True)
class Numbers:
    """A set of numbers, as ranges."""

    ranges: tuple[range, ...]

    def __contains__(self, number: int) -> bool:
        return any(number in span for span in self.ranges)


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


def file_name(rank: int) -> str:
    """The name of a rank's trace.

    >>> file_name(3)
    'trace-rank00003.jsonl'
    """
    return f"trace-rank{rank:05d}.jsonl"


class TraceWriter:
    """Appends the lines of one rank to a file. A disk that is full ends the trace with one warning, not the training."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.broken = ""
        make_folder(path.parent)
        self._file = open_new(path)
        self.write((header,))

    def write(self, lines: tuple[Line, ...]) -> None:
        """Write lines and hand them to the system: what is written survives the death of the process."""
        if self.broken or not lines:
            return
        try:
            self._file.write(b"".join(_encode(line) + b"\n" for line in lines))
            self._file.flush()
        except OSError as error:
            self.broken = f"{error.strerror or error}"

    def close(self) -> None:
        """Close the file. Never raises for a disk that is full: that was reported before."""
        try:
            self._file.close()
        except OSError as error:
            self.broken = self.broken or f"{error.strerror or error}"


def read(path: Path, wanted: Callable[[int], bool] | None = None) -> Iterator[Line]:
    """The lines of a trace, streamed. A torn last line is left out: the job died or still runs.

    ``wanted``: says for a batch number whether its frames are to be decoded; the others are skipped, which is five times
    faster. Raises UsageError for a file that is no trace, is of another version, or is damaged before its end.
    """
    with _opened(path) as file:
        yield _header(path, file.readline(MAX_HEADER_BYTES))
        yield from _lines(path, file, wanted)


def read_header(path: Path) -> Header:
    """The first line of a trace. Raises UsageError as ``read`` does."""
    with _opened(path) as file:
        return _header(path, file.readline(MAX_HEADER_BYTES))


def is_torn(path: Path) -> bool:
    """Whether the last line has no end: the job died while it wrote, or is writing."""
    with _opened(path) as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A trace as bytes. Raises UsageError where there is none to read."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        many = "all ranks are read at once: ulimit -n 65536, or fewer of them: --rank 0-99"
        hint = many if error.errno == errno.EMFILE else "name traces, or the folder that holds them"
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from error


def _raw_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The lines as bytes. Raises UsageError for one that no writer of ours would write, before all of it is in memory."""
    while raw := file.readline(MAX_LINE_BYTES):
        if len(raw) == MAX_LINE_BYTES:
            raise UsageError(
                f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB",
                hint="the trace was damaged: copy it again from the machine that wrote it",
            )
        yield raw


def _lines(path: Path, file: BinaryIO, wanted: Callable[[int], bool] | None) -> Iterator[Line]:
    for number, raw in enumerate(_raw_lines(path, file), start=2):
        if not raw.endswith(b"\n"):
            return
        if wanted is not None and (found := FRAME_OF.match(raw)) and not wanted(int(found[1])):
            continue
        yield decoded(path, raw, number)


def decoded(path: Path, raw: bytes, number: int | None = None) -> Line:
    """One line of a trace. ``number``: which line of the file it is, for the message."""
    try:
        return _decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is text that is no UTF-8
        where = f"{path}, line {number}" if number else f"{path}"
        raise UsageError(
            f"{where}: {error}", hint="the trace was damaged: copy it again from the machine that wrote it"
        ) from error


def _header(path: Path, first: bytes) -> Header:
    """The first line, which must be a header of a version that we read."""
    if not first:
        raise UsageError(f"{path} is empty: no batch was traced yet", hint="try again when the job has run for a while")
    try:
        plain = decode(first, dict)
        schema = plain["schema"]
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is not a dsdoctor trace: its first line is not a header", hint="traces are named trace-rank*.jsonl"
        ) from error
    if schema != SCHEMA:
        raise UsageError(
            f"{path} is of version {schema}, but this dsdoctor reads {SCHEMA}",
            hint="read it with the dsdoctor that wrote it",
        )
    try:
        return msgspec.convert(plain, Header)
    except ValueError as error:
        raise UsageError(f"{path}, line 1: {error}", hint="the trace was damaged") from error


def find_batches(path: Path) -> Batches:
    """Find the batches of a trace. A frame is recognised by how its line begins, and nothing is decoded."""
    read_header(path)
    spans: dict[int, list[Span]] = {}
    place = 0
    with path.open("rb") as file:
        for raw in _raw_lines(path, file):
            found = FRAME_OF.match(raw) if raw.endswith(b"\n") else None
            if found:
                _extend(spans.setdefault(int(found[1]), []), place, place + len(raw))
            place += len(raw)
    return Batches(path=path, spans=spans)


def _extend(spans: list[Span], start: int, end: int) -> None:
    """Add a range; one that follows the last makes it longer."""
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((start, end))


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
        raise UsageError(f"no trace of rank {rank} among these", hint=f"there are traces of rank {known}")


def sources(paths: Iterable[Path]) -> Traces:
    """The traces that files and folders hold. A file that is named twice, or in a folder as well, counts once.

    Raises UsageError for what is no trace, for two traces of one rank, and for ranks of different runs.
    """
    found: dict[str, RankTrace] = {}
    notes: list[str] = []
    for path, asked in _files(paths):
        if not asked and not path.stat().st_size:
            notes.append(f"{path} is empty and was left out")
        # Path.resolve raises RuntimeError for a link that leads to itself, before Python 3.13
        elif (real := real_path(path)) not in found:
            found[real] = RankTrace(path=path, header=read_header(path))
    ordered = tuple(sorted(found.values(), key=lambda source: source.rank))
    _check(ordered)
    notes += [
        f"the last line of {source.path} is incomplete and was left out: its job died or is still running"
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
            raise UsageError(f"{path} holds no trace ({PATTERN})", hint="name the folder that the job wrote them to")
        yield from ((file, False) for file in inside)


def _check(ordered: tuple[RankTrace, ...]) -> None:
    if not ordered:
        raise UsageError(
            "all traces are empty: no batch was traced yet", hint="try again when the job has run for a while"
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
            raise UsageError(f"{option} {text!r} is not a list of numbers", hint=f"such as {option} 3,10-12")
        ranges.append(range(first, last + 1))
    return Numbers(tuple(ranges))


def selected(traces: Traces, selection: Selection) -> Iterator[Ranked]:
    """The wanted lines of all traces, streamed: batch by batch, and within a batch rank by rank.

    Each trace keeps its own order: a pipeline's, where batches interleave, too.
    """
    wanted = [source for source in traces.sources if selection.ranks is None or source.rank in selection.ranks]
    if not wanted:
        known = ", ".join(map(str, traces.ranks))
        raise UsageError("no trace is from a requested rank", hint=f"there are traces of rank {known}")
    streams = [_selected_lines(source, selection) for source in wanted]
    if len(streams) == 1:
        return streams[0]
    return heapq.merge(*streams, key=lambda ranked: (ranked[1].batch, ranked[0]))


def _selected_lines(source: RankTrace, selection: Selection) -> Iterator[Ranked]:
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
