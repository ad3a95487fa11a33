"""``diagnose`` for tests: all logs of a session share the patterns, which are compiled once."""

from collections.abc import Iterable

from dsdoctor.diagnosis import diagnose as room
from dsdoctor.diagnosis.models import Diagnosis
from dsdoctor.diagnosis.prefilter import INDEX, Patterns
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.scan import scan as scan_once

PATTERNS = Patterns(INDEX)


def diagnose(lines: Iterable[bytes | str], *, name: str = "") -> Diagnosis:
    """The diagnosis of a log."""
    return room.diagnose(lines, name=name, patterns=PATTERNS)


def scan(lines: Iterable[bytes | str]) -> Scan:
    """A log that is read."""
    return scan_once(lines, PATTERNS)
