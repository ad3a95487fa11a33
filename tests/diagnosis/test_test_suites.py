"""The last words of a test suite: they answer for what its tests printed, and for nothing else that is in the log."""

from __future__ import annotations

import pytest

from dsdoctor.core.finding import has_error
from tests.diagnosis.mixtures import BANNER, FAILURES, STEPS, TORCHRUN, alone
from tests.diagnosis.reading import diagnose
from tests.each import each

BEGAN = ["=================== test session starts ===================", "collected 14 items", "tests/test_a.py ...."]
PASSES = ["===== PASSES =====", "___ test_a ___", "----- Captured stderr call -----"]
RAN = ["-" * 70, "Ran 14 tests in 21.370s", ""]
WELL = (
    ["============ 12 passed, 1 skipped, 1 xfailed, 1 warning in 21.37s =============="],
    ["14 passed, 3 subtests passed in 75.02s (0:01:15)"],
)
UNITTEST = ([*RAN, "OK"], ["OK", *RAN, "OK"], [*RAN, "OK (skipped=2, expected failures=1)"])
ILL = (
    ["================== 1 failed, 12 passed, 1 skipped in 21.37s ==================="],
    ["12 passed, 1 error in 21.37s"],
    ["==== 12 passed in 21.37s ====", "==== 2 errors in 0.37s ===="],
    [*RAN, "FAILED (failures=1, errors=2)"],
)
SUMMARIES = (*WELL, *UNITTEST, *ILL)
LAUNCHER = "[2024-10-11 10:00:01,101] [ERROR] [launch.py:325:sigkill_handler] ['python'] exits with return code = 1"
ENDS = ([], [LAUNCHER], TORCHRUN)
DEEPSPEED = [
    f"[2024-10-11 10:00:01,101] [INFO] [logging.py:128:log_dist] [Rank 0] step={number}, skipped=0, lr=[1e-05]"
    for number in range(12)
]
TRAININGS = (STEPS, [f"{{'loss': 1.{number}, 'epoch': 0.1}}" for number in range(12)], DEEPSPEED)


@each("failure", FAILURES)
@each("last", [*WELL, *ILL])
def test_a_suite_is_well_if_no_test_failed(failure: str, last: list[str]) -> None:
    log = [*BEGAN, *PASSES, *FAILURES[failure], *last]

    assert has_error(diagnose(log).findings) is (last in ILL)
    assert has_error(diagnose([*BEGAN, *last]).findings) is (last in ILL)


DEAD = [(failure, last, end) for failure in FAILURES for last in SUMMARIES for end in ENDS]


@each(("failure", "last", "end"), DEAD[::17])
def test_a_summary_does_not_answer_for_another_failure_in_a_sample(
    failure: str, last: list[str], end: list[str]
) -> None:
    told_as_without_the_summary(failure, last, end)


@pytest.mark.slow
def test_a_summary_does_not_answer_for_another_failure() -> None:
    for failure, last, end in DEAD:
        told_as_without_the_summary(failure, last, end)


def told_as_without_the_summary(failure: str, last: list[str], end: list[str]) -> None:
    """What died before pytest began, or after steps of a training, or where nothing says that pytest began, is told."""
    dead = [*FAILURES[failure], *end]
    right = diagnose([*BANNER, *STEPS, *dead]).findings[0].rule
    for log in (
        [*BANNER, *STEPS, *dead, *last],
        [*BANNER, *STEPS, *dead, *BEGAN, *last],
        [*BEGAN, *BANNER, *STEPS, *dead, *last],
        [*BEGAN, *PASSES, *STEPS, *dead, *last],
        [*BANNER, *alone([*STEPS, *dead]), *last],
    ):
        assert diagnose(log).findings[0].rule == right
    for log in ([*dead, *last], [*dead, *BEGAN, *last], [*BEGAN, *FAILURES[failure], *(end or [LAUNCHER]), *last]):
        assert has_error(diagnose(log).findings)


@each("training", TRAININGS)
@each("last", SUMMARIES)
def test_a_training_that_runs_code_is_well(last: list[str], training: list[str]) -> None:
    """Tests that fail are part of it, wherever in the log they are summed up."""
    for log in (
        [*last, *training],
        [*training, *last],
        [*training, *last, *training],
        [line for step in training[:9] for line in (step, *last)],
        [*BANNER, *training[:3], *BEGAN, *last, *training],
    ):
        assert not has_error(diagnose(log).findings)
    assert not has_error(diagnose([*RAN, "FAILED (failures=1)", *(["the next program"] * 100)]).findings)


def test_what_fails_after_a_suite_is_told() -> None:
    assert has_error(diagnose([*BEGAN, *WELL[0], *FAILURES["unknown"]]).findings)
    assert not has_error(diagnose(["tests/test_a.py ....", *WELL[1]]).findings)
    assert not has_error(diagnose(["FAILED (failures=1)"]).findings)
