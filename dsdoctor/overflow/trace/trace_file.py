"""A trace on disk: JSON lines, one file per rank. Writing loses at most what was not flushed; reading streams."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import make_folder, open_new, open_regular
from dsdoctor.core.text import decode
from dsdoctor.overflow.frames.frame import Frame, Header, Line

SCHEMA = "dsdoctor/trace/1"
LONGEST_HEADER = 1 << 16
"""Bytes. A checkpoint that was given by mistake may have no line end at all."""
LONGEST_LINE = 64 << 20
"""Bytes. A frame has some KiB."""
FRAME_OF = re.compile(rb'\{"t":"frame","batch":(\d+),')
"""How a frame's line begins, as the writer writes it: its batch is known without decoding the line."""
_encode = msgspec.json.Encoder(enc_hook=str).encode  # torch.__version__ is no plain str
_decode: Callable[[bytes], Line] = msgspec.json.Decoder(Line).decode


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
        yield _header(path, file.readline(LONGEST_HEADER))
        yield from _lines(path, file, wanted)


def read_header(path: Path) -> Header:
    """The first line of a trace. Raises UsageError as ``read`` does."""
    with _opened(path) as file:
        return _header(path, file.readline(LONGEST_HEADER))


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
    while raw := file.readline(LONGEST_LINE):
        if len(raw) == LONGEST_LINE:
            raise UsageError(
                f"{path} has a line of more than {LONGEST_LINE >> 20} MiB",
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
        raise UsageError(f"{path} is empty: no batch was traced yet", hint="look again when the job has run a while")
    try:
        plain = decode(first, dict)
        schema = plain["schema"]
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is no trace of dsdoctor: its first line is no header", hint="traces are named trace-rank*.jsonl"
        ) from error
    if schema != SCHEMA:
        raise UsageError(
            f"{path} is of version {schema}, and this dsdoctor reads {SCHEMA}",
            hint="read it with the dsdoctor that wrote it",
        )
    try:
        return msgspec.convert(plain, Header)
    except ValueError as error:
        raise UsageError(f"{path}, line 1: {error}", hint="the trace was damaged") from error


Span = tuple[int, int]


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
