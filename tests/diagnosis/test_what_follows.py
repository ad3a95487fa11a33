"""What only follows from a warning before it is not told as the cause: a CUDA that cannot begin, a certificate out of date."""

from __future__ import annotations

import pytest

from dsdoctor.core.finding import has_error
from tests.diagnosis.reading import NO_RULE, diagnose
from tests.each import each

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


@each("end", ENDS)
@each("warning", WARNINGS)
def test_a_cuda_that_cannot_begin_is_the_cause(warning: str, end: str) -> None:
    rule, word = WARNINGS[warning]
    for log in ([warning, CPU, *TRACEBACK, end], [warning, "  return f() > 0", CPU, *TRACEBACK, end, end]):
        first = diagnose(log).findings[0]
        assert (first.rule, word in first.title) == (rule, True)


@each("warning", WARNINGS)
def test_it_is_none_of_another_failure(warning: str) -> None:
    log = [warning, CPU, *TRACEBACK, "KeyError: 'labels'"]

    assert diagnose(log).findings[0].rule in NO_RULE
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


OF_ITSELF = NOT_REACHED[2:]
FOLLOWS = ((TRIES[0], NOT_REACHED[0]), (TRIES[1], NOT_REACHED[1]), *((TRIES[0], end) for end in OF_ITSELF))
PROBLEMS = ("is not yet valid", "has expired")


@each("problem", PROBLEMS)
@each(("tried", "end"), FOLLOWS)
def test_a_certificate_whose_time_is_not_now_is_the_cause(tried: str, end: str, problem: str) -> None:
    verify = VERIFY.format(problem)
    lines = [tried.format(host="huggingface.co", verify=verify), *TRACEBACK, end.format(verify=verify)]
    first = diagnose(lines).findings[0]

    assert first.rule == CERTIFICATE
    assert problem in first.title
    assert first.fix
    assert "clock" in first.fix.text
    for host in ("hub.example", "huggingface.co"):
        again = [TRIES[0].format(host=host, verify=verify), "Retrying in 2s [Retry 1/5]."]
        assert diagnose([*again, *TRACEBACK, "KeyError: 'labels'"]).findings[0].rule in NO_RULE
    own = verify.replace(f"certificate {problem}", "self-signed certificate")
    other = diagnose([lines[0].replace(verify, own), *TRACEBACK, end.format(verify=own)]).findings[0]
    assert other.rule != first.rule


CERTIFICATE = "certificate-out-of-date"
TRACKER = (
    "wandb: WARNING Retrying (Retry(total=2, connect=None)) after connection broken by 'SSLError(SSLCertVerificationError(1, "
    "'{verify}'))': /graphql"
)
OFFLINE = (
    "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/api/models/a: offline mode is enabled. "
    "To disable it, please unset the `HF_HUB_OFFLINE` environment variable."
)
THERE = "ERROR: Could not find a version that satisfies the requirement torch==9.9 (from versions: 2.0.0, 2.1.0)"
OTHERS = (NOT_REACHED[0], NOT_REACHED[1].replace("deepspeed", "torch"), OFFLINE, THERE)
WARNED = {
    "tracker": [TRACKER],
    "another hub": [TRIES[0].replace("{host}", "a.example")],
    "pip": [TRIES[1], "Successfully installed deepspeed-1"],
    "pip, in the end": [TRIES[1].replace("total=0", "total=4"), "Successfully installed a-1"],
    "curl": ["curl: (60) SSL certificate problem: certificate {problem}"],
}
STEPS_OF = (
    [f"step {number}/900 loss 1.{number}" for number in range(9)],
    [f"{{'loss': 1.{number}}}" for number in range(9)],
)


OTHER_SERVERS = [(warned, end) for warned in WARNED for end in (OTHERS if warned != "pip" else (NOT_REACHED[0], THERE))]


@each(("warned", "end"), OTHER_SERVERS[::4])
def test_the_certificate_of_another_server_is_none_in_a_sample(warned: str, end: str) -> None:
    told_without_the_certificate(warned, end, PROBLEMS[0])


@pytest.mark.slow
@each("problem", PROBLEMS)
@each(("warned", "end"), OTHER_SERVERS)
def test_the_certificate_of_another_server_is_none(warned: str, end: str, problem: str) -> None:
    told_without_the_certificate(warned, end, problem)


def told_without_the_certificate(warned: str, end: str, problem: str) -> None:
    """What is told is what is told without the certificate."""
    verify = VERIFY.format(problem)
    said = [line.format(verify=verify, problem=problem) for line in WARNED[warned]]
    right = diagnose([*TRACEBACK, end]).findings[0].rule
    for between in ([], ["loading"] * 9, *STEPS_OF):
        if between in STEPS_OF or warned != "curl":
            assert diagnose([*said, *between, *TRACEBACK, end]).findings[0].rule == right
    for steps in STEPS_OF:
        own = TRIES[0].format(host="huggingface.co", verify=verify)
        assert diagnose([own, *steps, *TRACEBACK, NOT_REACHED[0]]).findings[0].rule == "hf-hub-unreachable"
        assert diagnose([own, *TRACEBACK, OFFLINE]).findings[0].rule == "hf-hub-unreachable"


@each("problem", PROBLEMS)
@each("steps", STEPS_OF)
@each(
    "line",
    [
        *OF_ITSELF,
        "requests.exceptions.SSLError: (Caused by SSLError('certificate {problem}'))",
        "curl: (60) SSL certificate problem: certificate {problem}",
    ],
)
def test_a_training_that_ran_did_not_need_the_server(line: str, steps: list[str], problem: str) -> None:
    said = line.format(verify=VERIFY.format(problem), problem=problem)
    for log in (
        [said, *steps],
        [*([] if line.startswith("curl") else TRACEBACK), said, *steps[:5]],
        [*steps, said, *steps],
        [said, *steps, *["saving"] * 80],
    ):
        assert not has_error(diagnose(log).findings)
    assert diagnose(["loading", said]).findings[0].rule == CERTIFICATE


@each(
    "error",
    ["100: no CUDA-capable device is detected", "34: CUDA driver is a stub library", "101: invalid device ordinal"],
)
@each("end", ENDS)
def test_a_node_without_a_gpu_is_told_as_before(error: str, end: str) -> None:
    said = f"{COUNT}{error} (Triggered internally at CUDAFunctions.cpp:109.)"
    for log in ([said, CPU, *TRACEBACK, end], [said, *TRACEBACK, end]):
        assert diagnose(log).findings[0].rule == diagnose(log[1:]).findings[0].rule


def test_what_the_hub_was_asked_again_for_is_told_with_its_reason() -> None:
    own = TRIES[0].format(host="huggingface.co", verify="[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    first = diagnose([own, "Retrying in 2s [Retry 1/5].", *TRACEBACK, NOT_REACHED[0]]).findings[0]

    assert first.rule == "hf-hub-unreachable"
    assert "certificate" in first.title
