"""A log whose last word is success bears no error about what was survived before; an exit code of zero alone hides none."""

import pytest

from tests.diagnosis.endings import ill, well, wrong


def test_what_was_survived_is_no_error_in_a_sample() -> None:
    assert list(wrong(iter([*well()][::9]), failed=False)) == []


def test_a_zero_of_a_pipe_hides_no_failure_in_a_sample() -> None:
    assert list(wrong(iter([*ill()][::5]), failed=True)) == []


@pytest.mark.slow
def test_what_was_survived_is_no_error() -> None:
    assert list(wrong(well(), failed=False)) == []


@pytest.mark.slow
def test_a_zero_of_a_pipe_hides_no_failure() -> None:
    assert list(wrong(ill(), failed=True)) == []
