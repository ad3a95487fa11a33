"""What only follows from a warning before it is not told as the cause: a CUDA that cannot begin, a certificate out of date."""

from __future__ import annotations

import pytest

from tests.diagnosis.reading import diagnose

INIT = "/v/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: "
COUNT = f"{INIT}Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? Error "
WARNINGS = {
    f"{COUNT}802: system not yet initialized (Triggered internally)": ("cuda-not-initialized", "802"),
    f"{COUNT}304: OS call failed or operation not supported (Triggered internally)": ("cuda-not-initialized", "304"),
    f"{INIT}CUDA unknown error - this may be due to an incorrectly set up environment": (
        "cuda-not-initialized",
        "unknown",
    ),
    f"{INIT}The NVIDIA driver on your system is too old (found version 11040).": ("driver-too-old", "driver"),
}
CPU = "[2025-07-17 12:00:41,215] [INFO] [real_accelerator.py:254:get_accelerator] Setting ds_accelerator to cpu (auto detect)"
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/v/deepspeed/launcher/runner.py", line 446, in main',
    "    f()",
]
ENDS = (
    "ValueError: No slot '2' specified on host 'localhost'",
    "RuntimeError: Unable to proceed, no GPU resources available",
    "RuntimeError: No CUDA GPUs are available",
)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("warning", WARNINGS)
def test_a_cuda_that_cannot_begin_is_the_cause(warning: str, end: str) -> None:
    rule, word = WARNINGS[warning]
    for log in ([warning, CPU, *TRACEBACK, end], [warning, "  return f() > 0", CPU, *TRACEBACK, end, end]):
        first = diagnose(log).findings[0]
        assert (first.rule, word in first.title) == (rule, True)


@pytest.mark.parametrize("warning", WARNINGS)
def test_it_is_none_of_another_failure(warning: str) -> None:
    log = [warning, CPU, *TRACEBACK, "KeyError: 'labels'"]

    assert diagnose(log).findings[0].rule == "unexplained-failure"
    assert diagnose([CPU, *TRACEBACK, ENDS[0]]).findings[0].rule == "resource-filter-invalid"
    assert diagnose([warning, *TRACEBACK, ENDS[0]]).findings[0].rule == "resource-filter-invalid"
