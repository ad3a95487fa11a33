"""Real logs: the first finding is what the file is named after."""

from pathlib import Path

from dsdoctor.core.finding import has_error
from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome
from tests.diagnosis.reading import diagnose
from tests.each import each

LOGS = sorted(path for path in (Path(__file__).parent / "logs").glob("*.log") if path.stat().st_size)


def read(path: Path) -> Diagnosis:
    with path.open("rb") as stream:
        return diagnose(raw_lines(stream), name=path.name)


def wrong(path: Path, expected: str) -> bool:
    diagnosis = read(path)
    if expected == "healthy":
        return has_error(diagnosis.findings)
    if expected == "echo-only":
        return diagnosis.outcome is not LogOutcome.ONLY_ECHOES
    return [finding.rule for finding in diagnosis.findings if finding.rule != "log-undecided"][:1] != [expected]


@each("expected", sorted({path.name.split(".")[0] for path in LOGS}))
def test_real_logs_are_explained(expected: str) -> None:
    logs = [path for path in LOGS if path.name.split(".")[0] == expected]

    assert [path.name for path in logs if wrong(path, expected)] == []
