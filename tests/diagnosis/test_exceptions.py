"""An exception that no rule knows is told with its own words, the user's place, rank and step, however it is printed."""

import pytest

from tests.diagnosis.exceptions import wrong
from tests.diagnosis.reading import diagnose


@pytest.mark.slow
def test_its_words_place_rank_and_step_are_told() -> None:
    assert wrong() == []


def test_an_assertion_without_words_is_told_with_its_condition() -> None:
    frames = ["Traceback (most recent call last):", '  File "/v/site-packages/x/muon.py", line 9, in step']
    told = diagnose([*frames, "    assert len(G.shape) == 2", "AssertionError"]).findings[0]

    assert "it asserts len(G.shape) == 2" in told.evidence
