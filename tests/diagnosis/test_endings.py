"""A log whose last word is success bears no error about what was survived before; an exit code of zero alone hides none."""

import textwrap

import pytest

from dsdoctor.core.finding import has_error
from tests.diagnosis.endings import STOPPED, ill, steps, well, wrong
from tests.diagnosis.reading import diagnose
from tests.each import each


def test_what_was_survived_is_no_error_in_a_sample() -> None:
    assert list(wrong(iter([*well()][::9]), failed=False)) == []


def test_a_zero_of_a_pipe_hides_no_failure_in_a_sample() -> None:
    assert list(wrong(iter([*ill()][::5]), failed=True)) == []


@each("width", [40, 56, 80])
def test_nor_hides_it_one_whose_words_a_terminal_cut(width: int) -> None:
    words = (
        "ValueError: the sample number 4711 of the data set in part seven has a target that is not among the classes"
    )
    log = [*steps(1, 9), "Traceback (most recent call last):", '  File "/w/t.py", line 7, in f', "    run()"]

    assert has_error(diagnose([*log, *textwrap.wrap(words, width), "exit code: 0"]).findings)


def test_a_job_that_was_stopped_again_is_told_so() -> None:
    log = [*STOPPED["preempted"], *steps(1, 9), *STOPPED["preempted"]]

    assert diagnose(log).findings[0].rule == "job-preempted"
    assert not has_error(diagnose([*log, *steps(9, 20)]).findings)


@pytest.mark.slow
def test_what_was_survived_is_no_error() -> None:
    assert list(wrong(well(), failed=False)) == []


@pytest.mark.slow
def test_a_zero_of_a_pipe_hides_no_failure() -> None:
    assert list(wrong(ill(), failed=True)) == []
