"""A line of another rule that somebody only says, in a warning or in what the program bore, is not taken for the cause."""

import pytest

from tests.diagnosis.mixtures import alarms, count, wrong

FEW = 24
"""A kill, an Xid and a compiler's fatal error mean something whoever says them: 8 to 20 of 1,600 runs, by the sample."""

LEAST = 0.002
"""A warning of an illegal access to a GPU's memory is taken for the cause of an unknown exception just behind it: 4 of 8,586."""


def test_what_is_only_said_is_not_the_cause_in_a_sample() -> None:
    assert list(wrong(every=400)) == []


@pytest.mark.slow
def test_what_is_only_said_is_not_the_cause() -> None:
    found = list(wrong(every=9))

    assert len(found) <= LEAST * count(every=9), found


def test_a_run_that_is_well_has_no_alarm_for_what_is_said_in_a_sample() -> None:
    assert list(alarms(every=150)) == []


@pytest.mark.slow
def test_a_run_that_is_well_has_no_alarm_for_what_is_said() -> None:
    assert len(list(alarms(every=12))) <= FEW
