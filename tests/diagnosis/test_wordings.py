"""Wordings that tools print in the field (``wordings.txt``): the cause comes first."""

from pathlib import Path

import pytest

from dsdoctor.diagnosis.diagnose import diagnose

TEXT = (Path(__file__).parent / "wordings.txt").read_text(encoding="utf-8")
BLOCKS = [block.partition("\n") for block in TEXT.split("\n== ")[1:]]
CASES = [(rule, log.split("\n")) for rule, _, log in BLOCKS]


@pytest.mark.parametrize("rule", sorted({rule for rule, _ in CASES}))
def test_the_cause_comes_first(rule: str) -> None:
    for log in [log for name, log in CASES if name == rule]:
        assert diagnose(log).findings[0].rule == rule, log
