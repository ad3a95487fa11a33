"""A rule's lines that did not end the run are not told as its cause: the exception that did is, whether a rule knows it or not."""

import pytest

from tests.diagnosis.innocents import UNTOLD, alarms, cases, idle, missed, swapped, wrong

FEW = 0.01
"""This share is told otherwise at most: where another program has the last words before a library fails, nothing decides."""


@pytest.mark.slow
def test_the_end_is_told_and_not_what_was_borne() -> None:
    found = list(wrong(every=300))
    told = [one for one in found if one[0] != UNTOLD]

    assert len(told) <= FEW * sum(1 for _ in cases(every=300)), told
    assert len(found) <= 2 * FEW * sum(1 for _ in cases(every=300)), found


@pytest.mark.slow
def test_what_was_borne_hides_no_known_end_and_alarms_nobody() -> None:
    lost, false = list(missed(every=240)), list(alarms(every=120))

    assert len(lost) <= 2 * FEW * sum(1 for _ in swapped(every=240)), lost
    assert len(false) <= FEW * sum(1 for _ in idle(every=120)), false
