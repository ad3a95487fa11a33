"""How a check says its finding: one call for each severity."""

from collections.abc import Iterable, Sequence

from dsdoctor.core.finding import Finding, Fix, Severity

BUILD_WHEEL = "python -m dsdoctor build-wheel"
USE_ENV = 'eval "$(python -m dsdoctor env)"'


MOST_NAMES = 5


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def error(
    rule: str,
    title: str,
    *,
    evidence: Iterable[str] = (),
    affects: Iterable[str] = (),
    fix: str = "",
    commands: Iterable[str] = (),
) -> Finding:
    """It stands in the way."""
    return _finding(Severity.ERROR, rule, title, evidence, affects, fix, commands)


def warning(
    rule: str,
    title: str,
    *,
    evidence: Iterable[str] = (),
    affects: Iterable[str] = (),
    fix: str = "",
    commands: Iterable[str] = (),
) -> Finding:
    """It may bite later, or stands in the way of some ops only."""
    return _finding(Severity.WARNING, rule, title, evidence, affects, fix, commands)


def note(
    rule: str, title: str, *, evidence: Iterable[str] = (), fix: str = "", commands: Iterable[str] = ()
) -> Finding:
    """It informs."""
    return _finding(Severity.NOTE, rule, title, evidence, (), fix, commands)


def _finding(
    severity: Severity,
    rule: str,
    title: str,
    evidence: Iterable[str],
    affects: Iterable[str],
    fix: str,
    commands: Iterable[str],
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        title=title,
        evidence=tuple(evidence),
        affects=tuple(affects),
        fix=Fix(text=fix, commands=tuple(commands)) if fix else None,
    )
