"""A log that a scheduler passed on line by line, each with a level, has the same cause; a traceback that was borne stays borne."""

from __future__ import annotations

from tests.diagnosis.mixtures import BANNER, FAILURES, STEPS, TORCHRUN, first_error
from tests.diagnosis.reading import NO_RULE, diagnose
from tests.each import each

HEADS = (
    "[2026-11-22, 10:00:07 UTC] {subprocess.py:93} INFO - ",
    "2026-11-22 10:00:07,123 - INFO - ",
    "INFO:runner:",
    "[INFO] ",
    "WARNING: ",
)
BORNE = [
    "[2026-11-22 10:00:07,123] [WARNING] [metrics.py:12:send] it goes on without: Traceback (most recent call last):",
    '  File "/w/metrics.py", line 12, in send',
    "    connection.request()",
    "ConnectionRefusedError: [Errno 111] Connection refused",
]


@each("head", HEADS)
@each("failure", FAILURES)
def test_a_log_that_was_passed_on_has_the_same_cause(head: str, failure: str) -> None:
    log = [line.removeprefix("[rank2]: ") for line in (*BANNER, *STEPS, *FAILURES[failure], *TORCHRUN)]
    plain, passed_on = diagnose(log).findings[0], diagnose([head + line for line in log]).findings[0]

    assert passed_on.rule == plain.rule
    assert passed_on.title == plain.title.removeprefix("rank 2: ")


def test_what_a_logger_reports_is_borne_where_it_passes_nothing_on() -> None:
    assert first_error([*BANNER, *STEPS, *BORNE, *STEPS]) == ""
    assert first_error([*BANNER, *STEPS, *BORNE, *FAILURES["unknown"], *TORCHRUN]) in NO_RULE


@each(
    "head",
    [
        "(head, rank=0, pid=4773) ",
        "(Worker pid=7, ip=10.0.0.2) ERROR 08-15 03:10:44 ",
        "ERROR 08-15 03:10:44 [core.py:86] ",
    ],
)
def test_a_traceback_behind_the_label_of_a_job_is_read(head: str) -> None:
    place = '  File "/v/site-packages/alpha/index.py", line 29, in load'
    log = ["Traceback (most recent call last):", place, "    assert sizes == ends", "AssertionError"]
    first = diagnose([*(head + line for line in log), "ERROR: Job 12 failed with return code list: [1]"]).findings[0]

    assert first.rule == "assertion-without-words"
