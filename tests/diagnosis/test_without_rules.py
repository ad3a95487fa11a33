"""Whatever no rule knows, a verdict comes out: the corpora are read with rules taken away."""

import pytest

from dsdoctor.diagnosis.diagnose import diagnose
from tests.diagnosis.without_rules import SHARES, broken, corpus, pieces, shapes, some_rules
from tests.each import each

SECONDARY = {
    "a crash of a watchdog": "terminate called after throwing an instance of 'c10::DistBackendError'",
    "a peer that is gone": "terminate called after throwing an instance of 'gloo::IoException', connection reset by peer",
    "an exit": "[ERROR] [launch.py:325:sigkill_handler] exits with return code = 1",
    "a suite": "==== 1 failed, 3 passed in 4.21s ====",
}
"""Lines by which alone a failure is known, and which name no exception."""


@each("line", SECONDARY.values(), ids=list(SECONDARY))
def test_a_failure_that_is_known_by_one_line_shows_that_line(line: str) -> None:
    finding = diagnose([line], patterns=some_rules(0, 0)).findings[0]

    assert line[:60] in " ".join([finding.title, *finding.evidence])


@each("share", SHARES)
@pytest.mark.slow
def test_every_log_gives_a_verdict_with_rules_taken_away(share: float) -> None:
    assert list(broken(iter(corpus()), some_rules(share, 7))) == []


@pytest.mark.slow
def test_every_line_of_the_corpora_gives_a_verdict_without_any_rule() -> None:
    assert list(broken(((line.decode("latin-1"), [line]) for line in shapes()), some_rules(0, 0))) == []


@each("seed", range(4))
@pytest.mark.exhaustive
def test_pieces_of_logs_give_verdicts_with_rules_taken_away(seed: int) -> None:
    for share in SHARES:
        assert list(broken(pieces(20_000, seed), some_rules(share, seed))) == []
