"""A finding: what the problem is, how it was noticed, what it affects and how to fix it. Data only."""

import enum
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace


class Severity(enum.Enum):
    """How much a finding matters: a NOTE informs, a WARNING may cause trouble later, an ERROR stands in the way."""

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
    """One problem. ``rule`` is its id, which is never reused; ``affects`` names the ops that it stands in the way of."""

    rule: str
    severity: Severity
    title: str
    evidence: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    fix: Fix | None = None

    @classmethod
    def error(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        commands: Iterable[str] = (),
    ) -> "Finding":
        """It stands in the way."""
        return cls._of(Severity.ERROR, rule, title, evidence, affects, fix, commands)

    @classmethod
    def warning(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        commands: Iterable[str] = (),
    ) -> "Finding":
        """It may cause trouble later, or stands in the way of some ops only."""
        return cls._of(Severity.WARNING, rule, title, evidence, affects, fix, commands)

    @classmethod
    def note(
        cls,
        rule: str,
        title: str,
        *,
        evidence: Iterable[str] = (),
        affects: Iterable[str] = (),
        fix: str = "",
        commands: Iterable[str] = (),
    ) -> "Finding":
        """It informs."""
        return cls._of(Severity.NOTE, rule, title, evidence, affects, fix, commands)

    @classmethod
    def _of(
        cls,
        severity: Severity,
        rule: str,
        title: str,
        evidence: Iterable[str],
        affects: Iterable[str],
        fix: str,
        commands: Iterable[str],
    ) -> "Finding":
        return cls(
            rule=rule,
            severity=severity,
            title=title,
            evidence=tuple(evidence),
            affects=tuple(affects),
            fix=Fix(text=fix, commands=tuple(commands)) if fix else None,
        )


def for_python(finding: Finding, python: str) -> Finding:
    """The finding with its commands for another interpreter's environment than the one that runs dsdoctor.

    >>> fix = Fix(text="t", commands=('eval "$(python -m dsdoctor env)"', "python -m pip install x"))
    >>> finding = for_python(Finding(rule="r", severity=Severity.NOTE, title="t", fix=fix), "/a b/python")
    >>> print(*finding.fix.commands, sep="\\n")
    eval "$(python -m dsdoctor env --python '/a b/python')"
    '/a b/python' -m pip install x
    """
    if finding.fix is None:
        return finding
    quoted = shlex.quote(python).replace("\\", "\\\\")
    ours = re.compile(r"(\bpython -m dsdoctor (?:build-wheel|prebuild|toolkit|env|check))\b(?! --python)")
    commands = (ours.sub(rf"\1 --python {quoted}", command) for command in finding.fix.commands)
    pip = re.compile(r"^python -m pip\b")
    return replace(
        finding, fix=replace(finding.fix, commands=tuple(pip.sub(f"{quoted} -m pip", command) for command in commands))
    )


def has_error(findings: tuple[Finding, ...]) -> bool:
    """Whether any finding stands in the way.

    >>> has_error((Finding(rule="r", severity=Severity.WARNING, title="t"),))
    False
    """
    return any(finding.severity is Severity.ERROR for finding in findings)
