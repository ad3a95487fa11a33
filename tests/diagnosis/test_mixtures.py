"""A line of another rule that somebody only says, in a warning or in what the program bore, is not taken for the cause."""

import pytest

from tests.diagnosis.mixtures import alarms, wrong

ALARMING = {"compiler-oom-killed", "ssh-unreachable", "checkpoint-other-model", "gpu-hardware-error"}
"""Whose lines mean something whoever says them: a kill, an Xid of the driver, weights of shape [0]."""


def test_what_is_only_said_is_not_the_cause_in_a_sample() -> None:
    assert list(wrong(every=400)) == []


@pytest.mark.slow
def test_what_is_only_said_is_not_the_cause() -> None:
    assert list(wrong(every=9)) == []


def test_a_run_that_is_well_has_no_alarm_for_what_is_said_in_a_sample() -> None:
    assert list(alarms(every=150)) == []


@pytest.mark.slow
def test_a_run_that_is_well_has_no_alarm_for_what_is_said() -> None:
    assert {rule for _, _, rule, _ in alarms(every=12)} <= ALARMING
