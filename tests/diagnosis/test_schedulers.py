"""A scheduler clears up behind a rank that failed: the rank's own end is the cause, wherever the log is cut behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsdoctor.core.finding import Severity
from tests.diagnosis.reading import NO_RULE, diagnose, without_general
from tests.each import each

Lines = list[str]
STEPS = [f"iter {number} | loss 2.{number} | lr 3.0e-04 | 413 ms" for number in range(100, 140, 10)]
FRAMES = [
    "Traceback (most recent call last):",
    '  File "/w/train.py", line 412, in <module>',
    "    main()",
    '  File "/w/train.py", line 377, in main',
    "    engine.step()",
]
FAILED: dict[str, tuple[Lines, str]] = {
    "unknown": ([*FRAMES, "TypeError: int() argument must be a string, not 'NoneType'"], "unexplained-failure"),
    "labelled": (
        [f"[rank0]: {line}" for line in [*FRAMES, "KeyError: 'image_grid'"]],
        "unexplained-failure",
    ),
    "of the script": (
        [*FRAMES[:4], "    raise ValueError('no shard is left')", "ValueError: no shard is left"],
        "script-raised",
    ),
    "memory": (
        [
            *FRAMES,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of "
            "79.15 GiB of which 1.20 GiB is free.",
        ],
        "gpu-oom",
    ),
    "native": (
        [
            "python: ../src/queue.cpp:77: void push(int): Assertion `n > 0' failed.",
            "Fatal Python error: Aborted",
        ],
        "unexplained-failure",
    ),
    "silent": ([], "ended-without-words"),
}
"""How a rank ended by itself, and what is told of it."""

CODE = "srun: error: nid5213: task 0: Exited with exit code 1"
CANCELLED = "slurmstepd: error: *** STEP 1904411.0 ON nid5213 CANCELLED AT 2025-11-11T20:01:20 ***"
LIMIT = "slurmstepd: error: *** JOB 1904411 ON nid5213 CANCELLED AT 2025-11-11T23:01:20 DUE TO TIME LIMIT ***"
OTHERS = ["srun: error: nid5213: tasks 1-3: Terminated", "srun: Force Terminated StepId=1904411.0"]
ENDS: dict[str, Lines] = {
    "srun": [CODE, "srun: Terminating StepId=1904411.0", CANCELLED, *OTHERS],
    "older srun": [CODE, "srun: Terminating job step 1904411.0", CANCELLED, *OTHERS],
    "srun, in another order": [CODE, CANCELLED, "srun: Job step aborted: Waiting up to 32 seconds", *OTHERS],
    "waited for until the time limit": [CODE, LIMIT, *OTHERS],
    "torchrun": [
        CODE,
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        CANCELLED,
        "Sending process 412 closing signal SIGTERM",
    ],
    "killed": [CODE, CANCELLED, "srun: error: nid5213: tasks 1-3: Killed"],
}
CUTS = ("", "[rank3]: Traceback (most rec", "[rank3]: Traceback (most recent call last):", "slurmstepd: error: *** ST")
"""What is left of the line in which the log breaks off."""


def ends() -> Iterator[tuple[str, str, Lines, str]]:
    """What failed, what ended it, the log up to each line behind it, and the rule that is right."""
    for failed, (said, rule) in FAILED.items():
        for end, lines in ENDS.items():
            for last in range(1, len(lines) + 1):
                for cut in CUTS:
                    yield failed, end, [*STEPS, *said, *lines[:last], *([cut] if cut else [])], rule


def wrong(cases: Iterator[tuple[str, str, Lines, str]]) -> list[tuple[str, str, str, list[str]]]:
    """The cases that are told otherwise."""
    found = []
    for failed, end, log, rule in cases:
        told = [without_general(one.rule) for one in diagnose(log).findings if one.severity is not Severity.NOTE]
        if told[:1] != [rule] or "job-preempted" in told:
            found.append((failed, end, log[-1], told))
    return found


def test_what_a_scheduler_cancels_behind_a_failed_rank_is_no_cause_in_a_sample() -> None:
    assert wrong(iter([*ends()][::41])) == []


@pytest.mark.slow
def test_what_a_scheduler_cancels_behind_a_failed_rank_is_no_cause() -> None:
    assert wrong(ends()) == []


AFTER = (
    ["RuntimeError: DataLoader worker (pid 2744711) is killed by signal: Terminated. ", LIMIT],
    ["srun: error: nid5213: tasks 0-3: Killed"],
    ["srun: error: nid5213: tasks 0-3: Terminated"],
    [
        *FRAMES,
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ",
        LIMIT,
        "srun: error: a: tasks 0-3: Killed",
    ],
    ["[rank1]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"],
    ["run.sh: line 3: 12729 Killed                  python train.py"],
)


@each("reason", [" DUE TO TIME LIMIT", " DUE TO PREEMPTION", ""])
def test_what_follows_a_schedulers_end_is_a_note_at_most(reason: str) -> None:
    for after in AFTER:
        end = LIMIT.replace(" DUE TO TIME LIMIT", reason)
        findings = diagnose([*STEPS, end, *(line.replace(LIMIT, end) for line in after)]).findings
        told = [without_general(one.rule) for one in findings if one.severity is not Severity.NOTE]
        assert told == ["job-time-limit" if "LIMIT" in reason else "job-preempted"], (reason, after)
        assert not any("the host's memory ran out" in one.title and "scheduler" not in one.title for one in findings)


def test_an_exception_that_was_borne_does_not_excuse_the_scheduler() -> None:
    borne = [*FRAMES, "ConnectionError: the tracker did not answer"]
    signal = [*FRAMES, "RuntimeError: received signal 10 (SIGUSR1): saving and leaving"]

    assert diagnose([*borne, *STEPS, LIMIT]).findings[0].rule == "job-time-limit"
    assert diagnose([*borne, *STEPS, CANCELLED]).findings[0].rule == "job-preempted"
    assert diagnose([*STEPS, *signal, LIMIT]).findings[0].rule == "job-time-limit"
    assert diagnose([*STEPS, *FRAMES, "TypeError: x", LIMIT]).findings[0].rule in NO_RULE
