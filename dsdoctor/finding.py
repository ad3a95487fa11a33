"""A finding: what is the matter, how we know, what it affects and what mends it. Data only."""

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """How much a finding matters: a NOTE informs, a WARNING may bite later, an ERROR stands in the way."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One sentence, then commands that can be pasted into a shell."""

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One ill. ``rule`` names it for good (ids are never reused); ``affects`` names the ops it stands in the way of."""

    rule: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    fix: Fix | None = None


def has_error(findings: tuple[Finding, ...]) -> bool:
    """Whether any finding stands in the way.

    >>> has_error((Finding(rule="r", severity=Severity.WARNING, title="t"),))
    False
    """
    return any(finding.severity is Severity.ERROR for finding in findings)
