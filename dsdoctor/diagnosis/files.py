"""Where a diagnosis gets its lines: the logs of a job's folder, a file, also packed, and a log that is still being written."""

import contextlib
import gzip
import io
import os
import re
import select
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import open_regular
from dsdoctor.diagnosis.diagnose import diagnose, diagnosis_of
from dsdoctor.diagnosis.lines import LONGEST, raw_lines
from dsdoctor.diagnosis.models import Diagnosis, LogVerdict
from dsdoctor.diagnosis.scan import Patterns, Scan, begin, finish, read_into, so_far

NO_LOGS = (b"\x89PNG", b"PK\x03\x04", b"\x7fELF", b"%PDF", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"\x80\x02")
"""How pictures, archives, programs and pickles begin."""

CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r\v\f\b\a\x1b")

MOSTLY = 0.97  # what share of a log's bytes is no control character


def is_text(sample: bytes) -> bool:
    """Whether the first bytes of a file may be those of a log: in any encoding, with colours and zeros.

    >>> is_text("Getötet".encode("latin-1")), is_text("a log".encode("utf-16")), is_text(bytes(range(256)))
    (True, True, False)
    """
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return True
    if sample.startswith(NO_LOGS):
        return False
    letters = sample.replace(b"\0", b"")
    return len(letters.translate(None, CONTROLS)) >= len(letters) * MOSTLY


MAX_DEPTH = 6  # folders below these are not looked into: torchrun's logs lie four deep
MAX_LOGS = 20_000

A_LOG = re.compile(r"(?:\.(?:log|out|err|stdout|stderr|txt)(?:\.\d{1,3})?(?:\.gz)?|^(?:stdout|stderr)(?:\.\w{1,10})?)$")

SAMPLE_BYTES = 8192  # so many bytes of a file show whether it is text: an a.out is none
NO_LOG = re.compile(r"^(?:requirements|constraints|README|LICENSE|hostfile)|^\.")

GZIP = b"\x1f\x8b"

CHUNK_BYTES = 1 << 16

PAUSE_SECONDS = 1.0  # a writer that prints nothing for so long has paused: what it printed is judged
POLL_SECONDS = 0.2  # how often a file is asked whether it has grown


def logs_in(folder: Path) -> list[str]:
    """The logs below a folder in the order of their names, numbers by their value.

    Links are not followed; what is empty, no text or gone by then is left out.

    Raises UsageError where there are none, or a folder cannot be read.
    """
    found: list[str] = []
    for place, folders, files in os.walk(folder, onerror=_refused):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [] if depth >= MAX_DEPTH else [name for name in folders if not name.startswith(".")]
        names = (name for name in files if A_LOG.search(name) and not NO_LOG.match(name))
        found += [str(path) for name in names if _is_log(path := Path(place) / name)]
    if not found:
        raise UsageError(
            f"{folder} has no logs (*.log, *.out, *.err, *.txt, also .gz)", hint="name the log files themselves"
        )
    if len(found) > MAX_LOGS:
        raise UsageError(
            f"{folder} has {len(found):,} logs, at most {MAX_LOGS:,} are read at once",
            hint="name the folder of one job",
        )
    return sorted(found, key=_in_order)


def diagnose_file(name: str, *, tell: Callable[[Diagnosis], None], follow: bool = False) -> Diagnosis:
    """Diagnose a file, or stdin for "-". What is still being written is read as it comes, and ``tell`` is given each new failure.

    Raises UsageError for what is no log.
    """

    def check(sample: bytes) -> None:
        if not is_text(sample):
            raise UsageError(
                f"{name} is no text", hint="give what the program printed; unpack archives other than .gz first"
            )

    with _opened(name, follow=follow) as stream:
        try:
            if follow or _is_pipe(stream):
                return diagnose_live(stream.fileno(), name=name, tell=tell, check=check, follow=follow)
            check(cast(io.BufferedReader, stream).peek(SAMPLE_BYTES))
            return diagnose(raw_lines(stream), name=name)
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(
                f"{name} cannot be read: {error}", hint="give a text file, or one packed by gzip"
            ) from error


def diagnose_live(
    descriptor: int,
    *,
    name: str,
    tell: Callable[[Diagnosis], None],
    check: Callable[[bytes], None],
    follow: bool = False,
    patterns: Patterns | None = None,
) -> Diagnosis:
    """Read a log while it is written, and say what it comes to at its end, or at Ctrl-C.

    ``tell`` is given each new failure when the writer pauses behind it; ``check`` may refuse the log by its first bytes. Raises
    OSError where the log cannot be read.
    """
    whole = begin(patterns)
    told: set[tuple[str, str]] = set()
    seen = -1

    def judge() -> None:
        nonlocal seen
        trouble = _signs(whole)
        if trouble == seen:
            return
        seen = trouble
        diagnosis = diagnosis_of(so_far(whole), name=name)
        first = diagnosis.findings[0] if diagnosis.findings else None
        if first and diagnosis.verdict is LogVerdict.FAILED and (first.rule, first.title) not in told:
            told.add((first.rule, first.title))
            tell(diagnosis)

    lines = LiveLines(descriptor, judge, follow=follow)
    with contextlib.suppress(KeyboardInterrupt):  # who ends it wants to know what is known so far
        check(lines.begin())
        read_into(whole, lines, lines.at_hand)
    return diagnosis_of(finish(whole), name=name)


class LiveLines:
    """The lines of a pipe, or of a file that grows. Lines beyond 64 KiB keep their head and tail.

    ``follow``: the end of a file is no end, more may come. ``on_pause`` is called once in each pause of the writer.
    """

    def __init__(self, descriptor: int, on_pause: Callable[[], None], *, follow: bool = False) -> None:
        self._descriptor, self._on_pause, self._follow = descriptor, on_pause, follow
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._whole: list[bytes] = []
        self._rest = b""
        self._ended = False

    def __iter__(self) -> "LiveLines":
        return self

    def __next__(self) -> bytes:
        while not self._whole:
            if self._ended:
                if not self._rest:
                    raise StopIteration
                self._whole, self._rest = [self._rest], b""
            else:
                self._read()
        return self._whole.pop()

    def at_hand(self) -> bool:
        """Whether another line can be had without waiting."""
        return bool(self._whole)

    def begin(self) -> bytes:
        """Wait for the first bytes; they belong to the first lines, too."""
        return self._read()

    def _read(self) -> bytes:
        data = self._more()
        self._ended = not data
        *lines, rest = (self._rest + data).split(b"\n")
        self._whole = [line + b"\n" for line in reversed(lines)]
        self._rest = rest if len(rest) <= 2 * CHUNK_BYTES else rest[:LONGEST] + b" " + rest[-LONGEST:]
        return data

    def _more(self) -> bytes:
        """The next bytes; nothing at the end of a pipe, and of a file that is not followed."""
        waited, told = 0.0, False
        while True:
            if self._is_file:
                if data := self._of_the_file():
                    return data
                if not self._follow:
                    return b""
                time.sleep(POLL_SECONDS)
                waited += POLL_SECONDS
            else:
                ready, _, _ = select.select([self._descriptor], [], [], None if told else PAUSE_SECONDS)
                if ready:
                    return os.read(self._descriptor, CHUNK_BYTES)
                waited = PAUSE_SECONDS
            if waited >= PAUSE_SECONDS and not told:
                told = True
                self._on_pause()

    def _of_the_file(self) -> bytes:
        """What was added to the file; from its start where it was truncated."""
        place = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if os.fstat(self._descriptor).st_size < place:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self._rest = b""
        return os.read(self._descriptor, CHUNK_BYTES)


def _signs(whole: Scan) -> int:
    """How many signs of trouble were read: without a new one no new failure is there to be told."""
    timeline = whole.timeline
    return (
        len(whole.hits) + len(timeline.failures) + len(timeline.exits) + len(whole.health.errors) + whole.last_exception
    )


@contextmanager
def _opened(name: str, *, follow: bool) -> Iterator[BinaryIO]:
    """A log as a stream of bytes. Raises UsageError where there is none to read."""
    if name == "-":
        if sys.stdin.isatty():
            raise UsageError(
                "no log was given", hint="name a file, or pipe it: COMMAND 2>&1 | python -m dsdoctor diagnose -"
            )
        buffered = io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer))
        try:
            yield cast(BinaryIO, buffered)
        finally:
            buffered.detach()
        return
    try:
        with cast(io.BufferedReader, open_regular(Path(name))) as stream:
            packed = not follow and stream.peek(2).startswith(GZIP)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror or error}", hint="name a log file, or - for stdin"
        ) from error


def _is_pipe(stream: BinaryIO) -> bool:
    if isinstance(stream, gzip.GzipFile):
        return False
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except io.UnsupportedOperation:  # standard input that somebody replaced
        return False


def _refused(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} cannot be read: {error.strerror}", hint="name the log files themselves"
    ) from error


def _is_log(path: Path) -> bool:
    """Whether a file has text in it. One that may not be read is taken: that it cannot be is told when it is opened."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with open_regular(path) as stream:
            sample = stream.read(SAMPLE_BYTES)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return bool(sample) and (path.suffix == ".gz" or is_text(sample))


def _in_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d{1,12})", path)]
