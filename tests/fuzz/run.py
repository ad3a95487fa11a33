"""Give readers what the grammars make, and say which of it ended in anything but a verdict or a sentence."""

import json
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.readers import READERS, Place, Words

CPU_SECONDS = 20
"""What no input of a few hundred KiB may cost."""
WALL_SECONDS = 300
"""Only for what waits: the machine may be busy with something else."""
STATUSES = {0, 1, 2, 3, 4, 6}
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufeff\u2028\u2029]"
)
OWN_ESCAPES = re.compile("\r|\x1b\\[(?:0m|K)")
QUOTE_TRACEBACKS = {"explain", "diagnose", "--version"}


@dataclass
class Tally:
    """What a reader was given, and how that ended."""

    inputs: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)

    def add(self, status: str, seconds: float) -> None:
        self.inputs += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        self.statuses[status] = self.statuses.get(status, 0) + 1


def wrong_with(words: Words, place: Place) -> tuple[str, str]:
    """The status of a command line, and what is wrong with how it ended: "" where nothing is."""
    status, out, err = place.ask(words)
    return str(status), _wrong_in(words, status, out, err)


def _wrong_in(words: Words, status: int, out: str, err: str) -> str:
    command = words[0] if words else ""
    if status not in STATUSES:
        return f"status {status}: {err[-300:]}"
    if "check-broken" in out and command == "check" and "--list" not in words:
        return out[max(0, out.index("check-broken") - 300) :][:400]
    if "reader-failed" in out and command == "diagnose":
        return out[max(0, out.index("reader-failed") - 100) :][:400]
    if "Traceback" in out + err and command not in QUOTE_TRACEBACKS:
        return (out + err)[-500:]
    shown = OWN_ESCAPES.sub("", out + err).replace("\n", "").replace("\t", "")
    if (found := STEERS.search(shown)) and command != "env":
        return f"{found[0]!a} came out: {shown[max(0, found.start() - 100) : found.end() + 50]!a}"
    if "--json" in words and "--html" not in words and status in {0, 1, 6}:
        try:
            json.loads(out)
        except ValueError:
            return f"no document: {out[:200]!r}"
    return ""


def tried(reader: str, number: int, seed: str, place: Place) -> tuple[Words | None, str, str]:
    """The command line of a number, how it ended, and what is wrong with it."""
    words: Words | None = None
    try:
        with limited():
            words = READERS[reader](Random(f"{seed} {reader} {number}"), place)
            status, wrong = ("", "") if words is None else wrong_with(words, place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return words, "raised", "".join(traceback.format_exception(error)[-6:])
    return words, status, wrong


class TooLong(BaseException):
    """Not one of the errors that a last resort catches."""


@contextmanager
def limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TooLong(f"longer than {CPU_SECONDS} CPU-s or {WALL_SECONDS} s")

    before = [(signal.signal(kind, late), kind) for kind in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for handler, kind in before:
            signal.signal(kind, handler)


def failures(
    reader: str, numbers: range, *, seed: str = "", tally: Tally | None = None
) -> Iterator[tuple[int, Words | None, str]]:
    """Each number that ended wrongly, its command line, and how."""
    with tempfile.TemporaryDirectory() as folder:
        place, before = Place(Path(folder)), Path.cwd()
        os.chdir(place.folder / "folder")
        try:
            for number in numbers:
                begun = time.process_time()
                words, status, wrong = tried(reader, number, seed, place)
                if tally is not None:
                    tally.add(status, time.process_time() - begun)
                if wrong:
                    yield number, words, wrong
        finally:
            os.chdir(before)
