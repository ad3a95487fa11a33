"""``diagnose`` for tests: all logs of a session share the patterns, which are compiled once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dsdoctor.diagnosis import diagnose as room
from dsdoctor.diagnosis.findings import GENERAL
from dsdoctor.diagnosis.models import Diagnosis
from dsdoctor.diagnosis.scan import INDEX, Patterns, Scan
from dsdoctor.diagnosis.scan import scan as scan_once

PATTERNS = Patterns(INDEX)
NO_RULE = frozenset({"unexplained-failure", *(rule.id for rule in GENERAL)})
"""The rules of an exception that no wording of a log knows: the general answers, and the last one."""


def without_general(rule: str) -> str:
    """A rule's id; one name for all answers to an exception that no wording knows."""
    return "unexplained-failure" if rule in NO_RULE else rule


LISTENERS: list[list[list[bytes | str]]] = []
"""Who collects the logs that are read."""


@contextmanager
def collected() -> Iterator[list[list[bytes | str]]]:
    """All logs that tests have diagnosed meanwhile."""
    logs: list[list[bytes | str]] = []
    LISTENERS.append(logs)
    try:
        yield logs
    finally:
        LISTENERS.remove(logs)


def diagnose(lines: Iterable[bytes | str], *, name: str = "") -> Diagnosis:
    """The diagnosis of a log."""
    if LISTENERS:
        lines = list(lines)
        for logs in LISTENERS:
            logs.append(lines)
    return room.diagnose(lines, name=name, patterns=PATTERNS)


def scan(lines: Iterable[bytes | str]) -> Scan:
    """A log that is read."""
    return scan_once(lines, PATTERNS)
