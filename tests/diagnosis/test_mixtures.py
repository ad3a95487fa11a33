"""A line of another rule that somebody only says, in a warning or in what the program bore, is not taken for the cause."""

import pytest

from tests.diagnosis.mixtures import wrong


def test_what_is_only_said_is_not_the_cause_in_a_sample() -> None:
    assert list(wrong(every=400)) == []


@pytest.mark.slow
def test_what_is_only_said_is_not_the_cause() -> None:
    assert list(wrong(every=9)) == []
