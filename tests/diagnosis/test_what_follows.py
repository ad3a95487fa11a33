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


VERIFY = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate {} (_ssl.c:1006)"
TRIES = (
    "'(MaxRetryError(\"HTTPSConnectionPool(host='{host}', port=443): Max retries exceeded with url: /a (Caused by "
    "SSLError(SSLCertVerificationError(1, '{verify}')))\"), '(Request ID: 7)')' thrown while requesting HEAD https://{host}/a",
    "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'SSLError(SSLCertVerificationError(1, "
    "'{verify}'))': /simple/deepspeed/",
)
NOT_REACHED = (
    "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files",
    "ERROR: Could not find a version that satisfies the requirement deepspeed (from versions: none)",
    "requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /a "
    "(Caused by SSLError(SSLCertVerificationError(1, '{verify}')))",
    "urllib.error.URLError: <urlopen error {verify}>",
)


@pytest.mark.parametrize("problem", ["is not yet valid", "has expired"])
@pytest.mark.parametrize("end", NOT_REACHED)
@pytest.mark.parametrize("tried", TRIES)
def test_a_certificate_whose_time_is_not_now_is_the_cause(tried: str, end: str, problem: str) -> None:
    verify = VERIFY.format(problem)
    lines = [tried.format(host="huggingface.co", verify=verify), *TRACEBACK, end.format(verify=verify)]
    first = diagnose(lines).findings[0]

    assert first.rule == "certificate-out-of-date"
    assert problem in first.title
    assert first.fix
    assert "clock" in first.fix.text
    for host in ("hub.example", "huggingface.co"):
        again = [TRIES[0].format(host=host, verify=verify), "Retrying in 2s [Retry 1/5]."]
        assert diagnose([*again, *TRACEBACK, "KeyError: 'labels'"]).findings[0].rule == "unexplained-failure"
    own = verify.replace(f"certificate {problem}", "self-signed certificate")
    other = diagnose([lines[0].replace(verify, own), *TRACEBACK, end.format(verify=own)]).findings[0]
    assert other.rule != first.rule


def test_what_the_hub_was_asked_again_for_is_told_with_its_reason() -> None:
    own = TRIES[0].format(host="huggingface.co", verify="[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    first = diagnose([own, "Retrying in 2s [Retry 1/5].", *TRACEBACK, NOT_REACHED[0]]).findings[0]

    assert first.rule == "hf-hub-unreachable"
    assert "certificate" in first.title
