"""A line of another rule that somebody only says, in a warning or in what the program bore, is not taken for the cause."""

import pytest

from tests.diagnosis.mixtures import alarms, mixtures, wrong

FEW, LEAST = 8, 0.004
"""A kill means something whoever says it, and a sentence can look like a label: this share of mixtures is told wrongly at most."""


@pytest.mark.slow
def test_what_is_only_said_is_not_the_cause() -> None:
    found = list(wrong(every=100))

    assert len(found) <= LEAST * sum(1 for _ in mixtures(every=100)), found


def test_a_run_that_is_well_has_no_alarm_for_what_is_said_in_a_sample() -> None:
    assert list(alarms(every=5000)) == []


@pytest.mark.slow
def test_a_run_that_is_well_has_no_alarm_for_what_is_said() -> None:
    assert len(list(alarms(every=30))) <= FEW
