"""A log that is still being written: its lines as they come, and what they show whenever the writer pauses."""

import contextlib
import os
import select
import stat
import time
from collections.abc import Callable

from dsdoctor.diagnosis.diagnose import diagnosis_of
from dsdoctor.diagnosis.lines import LONGEST
from dsdoctor.diagnosis.models import Diagnosis, LogVerdict
from dsdoctor.diagnosis.prefilter import Patterns
from dsdoctor.diagnosis.scan import Scan, begin, finish, read_into, so_far

CHUNK = 1 << 16
PAUSE_SECONDS = 1.0
"""A writer that prints nothing for so long has paused: what it printed is judged."""
POLL_SECONDS = 0.2
"""How often a file is asked whether it has grown."""


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
        self._rest = rest if len(rest) <= 2 * CHUNK else rest[:LONGEST] + b" " + rest[-LONGEST:]
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
                    return os.read(self._descriptor, CHUNK)
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
        return os.read(self._descriptor, CHUNK)


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


def _signs(whole: Scan) -> int:
    """How many signs of trouble were read: without a new one no new failure is there to be told."""
    timeline = whole.timeline
    return (
        len(whole.hits) + len(timeline.failures) + len(timeline.exits) + len(whole.health.errors) + whole.last_exception
    )
