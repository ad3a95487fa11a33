"""Lines of one form that come thousands of times are not searched anew, and what differs among them is still found."""

import pytest

from dsdoctor.diagnosis.scan import SAME_EFFECT_TIMES, Effect, Repeats
from tests.diagnosis.reading import diagnose

LONG = [
    f"x.h:{number}:1: fatal error: cusparse_{number}.h: No such file or directory"
    for number in range(1000, 1000 + SAME_EFFECT_TIMES + 200)
]


@pytest.mark.slow
def test_all_lines_of_a_form_are_counted_and_a_line_of_another_form_behind_them_is_read() -> None:
    last = "[rank7]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = {finding.rule: finding for finding in diagnose([*LONG, last]).findings}

    assert found["cuda-header-missing"].evidence[1] == f"and on {len(LONG) - 1} more lines"
    assert "gpu-oom" in found


def test_short_numbers_tell_lines_apart() -> None:
    repeats = Repeats()
    for number in range(1000, 1000 + SAME_EFFECT_TIMES):
        repeats.keep(b"worker %d ends with code 0" % number, Effect(hits=[4]))

    assert repeats.recall(b"worker 9999 ends with code 0") == Effect(hits=[4])
    assert repeats.recall(b"worker 9999 ends with code 7") is None


def test_lines_of_one_form_that_lead_to_different_things_are_all_searched() -> None:
    repeats = Repeats()
    for number in range(1000, 1000 + 2 * SAME_EFFECT_TIMES):
        repeats.keep(b"code %d" % number, Effect(hits=[number % 2]))

    assert repeats.recall(b"code 99999") is None
