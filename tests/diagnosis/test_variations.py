"""A real log in another form has the same cause: labels of ranks, clocks, narrow terminals, what stands before and behind."""

from __future__ import annotations

import pytest

from tests.diagnosis.variations import VARIATIONS, flips
from tests.each import each

TOLD_APART = {
    ("numerics-nan-losses.log", "follows"),  # nan, and then a rank that is gone: the log does not say which ended it
    ("numerics-nan-losses.log", "behind"),
    ("041.log", "follows"),
    ("041.log", "behind"),
    ("049.log", "behind"),
    ("signal-scheduler-stops-all.log", "behind"),  # another rank was gone before the scheduler stopped the job
    ("012.log", "behind"),
    ("launch-script-missing.log", "headless"),  # the line that says it is cut off
    ("ranks-raises-srun.log", "headless"),
    ("044.log", "narrow"),  # the name of the assertion is cut in two; what is said then is true
    ("105.log", "narrow"),
    ("015.log", "narrow"),
    ("049.log", "narrow"),  # loss and norm of a step are cut in two: nan is told, and no release
    ("healthy-bad-samples-skipped.log", "narrow"),  # a traceback within a warning whose first line is cut in two
}
"""Where another form takes away what the verdict was made of."""


def of_healthy_ones_that_lost_another(name: str, kind: str, before: str) -> bool:
    """A run that is well, and then another rank is gone: that is no healthy log any more."""
    return kind in {"follows", "behind"} and not before


def wrong(corpus: str, part: slice = slice(None)) -> list[tuple[str, str, str, str]]:
    return [
        (name, kind, before, after)
        for name, kind, before, after in flips(corpus, list(VARIATIONS), part)
        if (name, kind) not in TOLD_APART and not of_healthy_ones_that_lost_another(name, kind, before)
    ]


def test_another_form_of_a_real_log_has_the_same_verdict_in_a_sample() -> None:
    assert wrong("real", slice(7, None, 70)) == []


@pytest.mark.slow
@each("corpus", ["real", "blind", "fresh"])
def test_another_form_of_a_log_has_the_same_verdict(corpus: str) -> None:
    assert wrong(corpus) == []
