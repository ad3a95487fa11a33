"""An exception that no rule knows is told with its own words, the user's place, rank and step, however it is printed."""

import pytest

from tests.diagnosis.exceptions import cases, wrong


def test_its_words_place_rank_and_step_are_told_in_a_sample() -> None:
    assert wrong(every=17, start=len([*cases()]) % 17) == []


@pytest.mark.slow
def test_its_words_place_rank_and_step_are_told() -> None:
    assert wrong() == []
