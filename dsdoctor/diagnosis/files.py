"""The diagnoses of several logs of one run, a log for each rank -> what only follows is told as such."""

from dataclasses import replace

from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.diagnosis.models import Diagnosis


def together(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Where one log has a failure of its own, the others' closed connections and timeouts are notes."""
    own = [diagnosis for diagnosis in diagnoses if has_error(diagnosis.findings) and not diagnosis.follows]
    if not own:
        return diagnoses
    return [_as_notes(diagnosis) if diagnosis.follows else diagnosis for diagnosis in diagnoses]


def problem_of(finding: Finding, diagnosis: Diagnosis) -> tuple[str, str]:
    """What makes findings of several logs one problem: the rule, and the title without the rank."""
    return finding.rule, finding.title.removeprefix(f"{diagnosis.where}: ")


def _as_notes(diagnosis: Diagnosis) -> Diagnosis:
    findings = tuple(replace(finding, severity=Severity.NOTE) for finding in diagnosis.findings)
    return replace(diagnosis, findings=findings)
