"""Wordings that tools print in the field (``wordings.txt``): the cause comes first, and as an error."""

from pathlib import Path

import pytest

from dsdoctor.core.finding import Severity
from tests.diagnosis.reading import diagnose
from tests.each import each

TEXT = (Path(__file__).parent / "wordings.txt").read_text(encoding="utf-8")
BLOCKS = [block.partition("\n") for block in TEXT.split("\n== ")[1:]]
CASES = [(rule, log.split("\n")) for rule, _, log in BLOCKS]


def first(log: list[str]) -> str | None:
    """The rule of the first error."""
    return next((finding.rule for finding in diagnose(log).findings if finding.severity is Severity.ERROR), None)


@each("rule", sorted({rule for rule, _ in CASES}))
@pytest.mark.slow
def test_the_cause_comes_first(rule: str) -> None:
    logs = [log for name, log in CASES if name == rule]

    assert [(first(log), log) for log in logs if first(log) != rule] == []
