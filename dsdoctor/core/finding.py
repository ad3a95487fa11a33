"""A finding: what the problem is, how it was noticed, what it affects and how to fix it. Data only."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dsdoctor.core import fix as fixes
from dsdoctor.core.fix import Fix, Step
from dsdoctor.core.pages import page_address


class Severity(enum.Enum):
    """How much a finding matters: a NOTE informs, a WARNING may cause trouble later, an ERROR stands in the way."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem. ``rule`` is its id, which is never reused; ``affects`` names the ops that it stands in the way of."""

    rule: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    fix: Fix | None = None
    url: str = field(init=False, compare=False, repr=False, default="")
    """The address of its rule's page."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", page_address(self.rule))

    @classmethod
    def error(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        steps: Iterable[Step] = (),
    ) -> "Finding":
        """It stands in the way."""
        return cls._of(Severity.ERROR, rule, title, evidence, affects, fix, steps)

    @classmethod
    def warning(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        steps: Iterable[Step] = (),
    ) -> "Finding":
        """It may cause trouble later, or stands in the way of some ops only."""
        return cls._of(Severity.WARNING, rule, title, evidence, affects, fix, steps)

    @classmethod
    def note(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        steps: Iterable[Step] = (),
    ) -> "Finding":
        """It informs."""
        return cls._of(Severity.NOTE, rule, title, evidence, affects, fix, steps)

    @classmethod
    def _of(
        cls,
        severity: Severity,
        rule: str,
        title: str,
        evidence: Iterable[str],
        affects: Iterable[str],
        fix: str,
        steps: Iterable[Step],
    ) -> "Finding":
        return cls(
            rule=rule,
            severity=severity,
            title=title,
            evidence=tuple(evidence),
            affects=tuple(affects),
            fix=Fix(text=fix, steps=tuple(steps)) if fix else None,
        )


def for_python(finding: Finding, python: str) -> Finding:
    """The finding with its steps for another interpreter's environment than the one that runs dsdoctor."""
    return replace(finding, fix=fixes.for_python(finding.fix, python)) if finding.fix else finding


def has_error(findings: tuple[Finding, ...]) -> bool:
    """Whether any finding stands in the way.

    >>> has_error((Finding(rule="r", severity=Severity.WARNING, title="t"),))
    False
    """
    return any(finding.severity is Severity.ERROR for finding in findings)
