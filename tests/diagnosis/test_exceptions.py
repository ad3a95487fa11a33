"""An exception that no rule knows is told with its own words, the user's place, rank and step, however it is printed."""

import pytest

from tests.diagnosis.exceptions import wrong


@pytest.mark.slow
def test_its_words_place_rank_and_step_are_told() -> None:
    assert wrong() == []
