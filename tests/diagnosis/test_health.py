"""A log is healthy where an end or progress is in it, failed where a line is an error by its form, and else undecided."""

from pathlib import Path

import pytest

from dsdoctor.diagnosis.models import LogVerdict
from tests.diagnosis.reading import diagnose
from tests.diagnosis.without_rules import corpus, pieces
from tests.each import each

HEALTHY, FAILED, UNDECIDED = LogVerdict.HEALTHY, LogVerdict.FAILED, LogVerdict.UNDECIDED
ERRORS = (
    "ray.exceptions.RayTaskError(ActorDiedError): ray::WorkerDict.train() (pid=4711, ip=10.0.0.3)",
    "RayTaskError(ActorDiedError)",
    "FAILED: x.cuda.o",
    "mytool: error: shard 7 is empty",
    "mytool: fatal error: shard 7 is empty",
    "E1122 10:00:09.334000 412 trainer/shards.py:17] shard 7 is empty",
    "F1122 10:00:09.334000 412 shards.cc:17] shard 7 is empty",
    "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD",
    "Could not solve for environment specs",
    "UnsatisfiableError: The following specifications were found to be incompatible with each other:",
    "thread 'main' panicked at src/main.rs:3:5:",
    'Exception in thread "main" java.lang.IllegalStateException: closed',
    "CMake Error at CMakeLists.txt:3 (find_package):",
    "EI0002: The wait execution of the Notify register times out",
    "[rank3]: 2026-11-22 10:00:07,123 CRITICAL shards: shard 7 is empty",
    "shards.problems.HoleInTableError: row 4711 of table 17 is empty",
    "Exception: shard 7 is empty",
    "terminate called after throwing an instance of 'shards::Hole'",
)
FRAGMENTS = (
    [],
    [""],
    ["loading the data"],
    ['  File "/w/train.py", line 88, in main'],
    ['  File "/w/train.py", line 88, in main', "    step(batch)", '  File "/w/train.py", line 61, in step'],
    ["    return self.rows[key]", "           ~~~~~~~~~^^^^^"],
    ["/v/x.py:3: UserWarning: no nvcc", "  warnings.warn(text)"],
)
EVIDENCE = (
    "step 812 loss 1.25",
    "{'loss': 1.25, 'grad_norm': 0.5, 'epoch': 0.1}",
    "100%|###| 703/703 [49:15<00:00,  4.20s/it]",
    "Epoch 3 begins",
    "[7/9] c++ -c a.cpp -o a.o",
    "Successfully installed numpy-2.1.0",
    "deepspeed build time = 178.16 secs",
    "Installed 12 packages in 81ms",
    "Time to load cpu_adam op: 31.2 seconds",
    "{'train_runtime': 123.4, 'train_loss': 1.2}",
    "exit code: 0",
)
NOISE = (
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
    "fatal: not a git repository (or any of the parent directories): .git",
    "E0000 00:00:1732270000.1 412 cuda_dnn.cc:8310] Unable to register cuDNN factory: one has already been registered",
    "[WARNING] metrics: ValueError: no route",
)


@each("line", ERRORS)
def test_a_line_that_is_an_error_by_its_form_is_a_failure_and_is_shown(line: str) -> None:
    for log in ([line], ["step 1 loss 2.5", line, "bye"]):
        diagnosis = diagnose(log)

        assert diagnosis.verdict is FAILED
        assert any(line[-20:] in told for told in diagnosis.findings[0].evidence)


@each("line", ERRORS[:-1])
def test_an_error_before_too_little_progress_is_undecided_and_is_no_check_mark(line: str) -> None:
    assert diagnose([line, "step 1 loss 2.5"]).verdict is not HEALTHY


@each("line", [*ERRORS[:3], *ERRORS[5:9]])
def test_an_error_after_which_the_run_went_on_is_none(line: str) -> None:
    assert diagnose([line, *(f"step {number} loss 1.{number}" for number in range(9))]).verdict is HEALTHY


@each("line", [*ERRORS[:3], *ERRORS[5:9]])
def test_an_error_far_above_the_end_without_progress_is_undecided(line: str) -> None:
    diagnosis = diagnose([line, *(f"table {number} is read" for number in range(80))])

    assert diagnosis.verdict is UNDECIDED
    assert line[-20:] in diagnosis.findings[0].evidence[0]


@each("log", FRAGMENTS)
def test_a_fragment_is_undecided_and_says_what_would_decide_it(log: list[str]) -> None:
    diagnosis = diagnose(log)

    assert diagnosis.verdict is UNDECIDED
    assert diagnosis.findings[0].fix


@each("line", EVIDENCE)
def test_an_end_or_progress_is_healthy_with_any_noise(line: str) -> None:
    assert diagnose([*NOISE, line]).verdict is HEALTHY
    assert diagnose([line, *NOISE]).verdict is HEALTHY


def test_a_process_that_ended_with_a_code_has_the_words_that_are_an_error_by_form() -> None:
    error = "F1122 10:00:09.334000 412 shards.cc:17] shard 7 is empty"
    exited = "exits with return code = 1"

    assert diagnose(["step 1 loss 2.5", exited]).findings[0].rule == "ended-without-words"
    diagnosis = diagnose(["step 1 loss 2.5", error, exited])
    assert (diagnosis.findings[0].rule, error in diagnosis.findings[0].title) == ("unexplained-failure", True)


@pytest.mark.slow
def test_the_logs_of_the_corpora_without_an_error_an_end_or_progress_are_undecided() -> None:
    """Nothing in them shows a failure, and nothing that all went well."""
    undecided = [Path(name).name for name, lines in corpus() if diagnose(lines).verdict is UNDECIDED]

    assert undecided == [
        "128-verl-prime-reward.log",  # trains on rewards that all fail
        "gds-link.written-dl-symbols.log",  # a linker's failed test
        "healthy.import-0.9.5-with-warnings.log",  # only warnings
    ]


@pytest.mark.slow
def test_no_piece_of_a_failed_log_has_a_check_mark_without_an_end_or_progress() -> None:
    from dsdoctor.diagnosis.health import is_error

    wrong = [
        name
        for name, lines in pieces(5000, seed=3)
        if len(lines) == 1
        and is_error(lines[0].decode("utf-8", "replace"), lines[0])
        and diagnose(lines).verdict is HEALTHY
    ]

    assert wrong == []


def test_a_log_of_one_blank_line_is_told_in_the_singular() -> None:
    assert "(1 line," in diagnose([""]).findings[0].title
    assert "(2 lines," in diagnose(["", " "]).findings[0].title


WAITS = [
    f"2026-11-24 10:0{minute}:00 INFO alpha.py:9] Waiting for a slot for {minute}0 seconds" for minute in range(1, 4)
]
SCARCE = "WARNING alpha.py:7] The number of required slots exceeds the number of available ones."


def test_a_log_that_ends_in_waiting_stands_still_and_says_what_warned_of_it() -> None:
    first = diagnose(["started", SCARCE, *WAITS, "$ alpha status", "0.0/1.0 GPU"]).findings[0]

    assert first.rule == "stands-still"
    assert [line.partition(":")[0] for line in first.evidence] == [
        "line 2",
        "line 3",
        "3 such lines, the last one is line 5",
        "line 7",
    ]


@pytest.mark.parametrize(
    "log",
    [
        WAITS,
        [SCARCE, *WAITS[:1]],
        [SCARCE, *WAITS, "the slot is there"],
        [SCARCE, *WAITS, *(f"step {n} loss 2.5" for n in range(9))],
    ],
)
def test_who_waited_once_or_went_on_or_may_get_it_yet_does_not_stand_still(log: list[str]) -> None:
    assert diagnose(log).findings[:1] == () or diagnose(log).findings[0].rule != "stands-still"
