"""The last words of a test suite: what its tests print is what they expect, unless one of them failed."""

from __future__ import annotations

import pytest

from dsdoctor.core.finding import has_error
from tests.diagnosis.mixtures import FAILURES
from tests.diagnosis.reading import diagnose

RAN = ["-" * 70, "Ran 14 tests in 21.370s", ""]
WELL = (
    ["============ 12 passed, 1 skipped, 1 xfailed, 1 warning in 21.37s =============="],
    ["14 passed, 3 subtests passed in 75.02s (0:01:15)"],
    [*RAN, "OK"],
    ["OK", *RAN, "OK"],
    [*RAN, "OK (skipped=2, expected failures=1)"],
)
ILL = (
    ["================== 1 failed, 12 passed, 1 skipped in 21.37s ==================="],
    ["12 passed, 1 error in 21.37s"],
    ["==== 12 passed in 21.37s ====", "==== 2 errors in 0.37s ===="],
    [*RAN, "FAILED (failures=1, errors=2)"],
    ["OK"],
)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("last", [*WELL, *ILL])
def test_a_suite_is_well_if_no_test_failed(failure: str, last: list[str]) -> None:
    log = ["===== PASSES =====", "----- Captured stderr call -----", *FAILURES[failure], *last]

    assert has_error(diagnose(log).findings) is (last in ILL)


def test_what_fails_after_a_suite_is_told() -> None:
    assert has_error(diagnose([*WELL[0], *FAILURES["unknown"]]).findings)
    assert not has_error(diagnose(["tests/test_a.py ....", *WELL[1]]).findings)
