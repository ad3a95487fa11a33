"""How a static check says its finding: one call for each severity."""

from dsdoctor.core.finding import Finding, Fix, Severity


def error(rule: str, title: str, evidence: tuple[str, ...], fix: str, *commands: str) -> Finding:
    """It stands in the way."""
    return _finding(Severity.ERROR, rule, title, evidence, fix, commands)


def warning(rule: str, title: str, evidence: tuple[str, ...], fix: str, *commands: str) -> Finding:
    """It may bite, or stands in the way of one launcher only."""
    return _finding(Severity.WARNING, rule, title, evidence, fix, commands)


def _finding(
    severity: Severity, rule: str, title: str, evidence: tuple[str, ...], fix: str, commands: tuple[str, ...]
) -> Finding:
    return Finding(rule=rule, severity=severity, title=title, evidence=evidence, fix=Fix(text=fix, commands=commands))
