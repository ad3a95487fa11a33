"""Real logs: the first finding is what the file is named after."""

from pathlib import Path

import pytest

from dsdoctor.diagnosis.clean import raw_lines
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.nouns import Diagnosis, Outcome
from dsdoctor.finding import has_error

LOGS = sorted(path for path in (Path(__file__).parent / "logs").glob("*.log") if path.stat().st_size)


def read(path: Path) -> Diagnosis:
    with path.open("rb") as stream:
        return diagnose(raw_lines(stream), name=path.name)


@pytest.mark.parametrize("path", LOGS, ids=[path.stem for path in LOGS])
def test_a_real_log_is_explained(path: Path) -> None:
    diagnosis = read(path)
    expected = path.name.split(".")[0]

    if expected == "healthy":
        assert not has_error(diagnosis.findings)
    elif expected == "echo-only":
        assert diagnosis.outcome is Outcome.ONLY_ECHOES
    else:
        assert diagnosis.findings[0].rule == expected
