"""What a log of a run says: which rank, in which step, by which signal; and that nothing gets a tick that was not understood."""

from __future__ import annotations

import gzip
from pathlib import Path

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome
from tests.cli.runner import run
from tests.diagnosis.reading import diagnose
from tests.each import each

STEPS = [f"step {number}/900 loss 1.{number}" for number in range(1, 813)]
RAISED = [
    "Traceback (most recent call last):",
    '  File "/w/train.py", line 7, in main',
    "    run(batch)",
    "KeyError: 'labels'",
]
LOST = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1883"


def title(diagnosis: Diagnosis) -> str:
    return next((one.title for one in diagnosis.findings if one.severity is not Severity.NOTE), "")


def rule(diagnosis: Diagnosis) -> str:
    return next((one.rule for one in diagnosis.findings if one.severity is not Severity.NOTE), "")


@each(
    ("line", "words"),
    [
        (
            "['python', '-u', 'train.py', '--local_rank=1'] exits with return code = -11",
            "rank 1: died after step 812 by SIGSEGV",
        ),
        ("srun: error: node1: task 3: Segmentation fault (core dumped)", "rank 3: died after step 812 by SIGSEGV"),
        ("exitcode  : -6 (pid: 5)  (SIGABRT)", "died after step 812 by SIGABRT"),
        ("train.sh: line 4: 812 Killed                  python train.py", "killed after step 812 by SIGKILL"),
        ("Segmentation fault (core dumped)", "died after step 812 by SIGSEGV"),
        ("command terminated with exit code 137", "killed after step 812 by SIGKILL"),
        ("Process exited with exit code 143", "ended after step 812 by SIGTERM"),
        ("pod train-worker-3 phase=Failed exit_code=247", "killed after step 812 by SIGKILL"),
        ("Getötet", "killed after step 812 by SIGKILL"),
        ("run.sh : ligne 3 :  4711 Processus arrêté      python train.py", "killed after step 812 by SIGKILL"),
        ("Terminado (killed)", "killed after step 812 by SIGKILL"),
        ("run.sh: 行 3:  4711 已杀死               python train.py", "killed after step 812 by SIGKILL"),
        ("強制終了", "killed after step 812 by SIGKILL"),
        ("Speicherzugriffsfehler (Speicherabzug geschrieben)", "died after step 812 by SIGSEGV"),
    ],
)
def test_a_signal_is_named_with_the_rank_and_the_step(line: str, words: str) -> None:
    diagnosis = diagnose([*STEPS, line])

    assert title(diagnosis).startswith(words)
    assert "; the log does not say " in title(diagnosis)


def test_the_first_failure_that_torchrun_names_is_the_one_of_the_verdict() -> None:
    log = [
        *STEPS[:9],
        LOST,
        "Failures:",
        "[1]:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -15 (pid: 8)  (SIGTERM)",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-22_10:40:17",
        "  host      : localhost",
        "  rank      : 5 (local_rank: 1)",
        "  exitcode  : -11 (pid: 9)  (SIGSEGV)",
        "  error_file: /tmp/e/1/error.json",
    ]

    diagnosis = diagnose(log)

    assert title(diagnosis).startswith("rank 5: died after step 9 by SIGSEGV")
    assert (
        "torchrun names it as the root cause, the first process that failed (pid 9 on localhost, 2026-11-22_10:40:17)"
        in diagnosis.findings[0].evidence
    )
    assert "its traceback is in /tmp/e/1/error.json" in diagnosis.findings[0].evidence


def test_a_rank_that_left_without_a_word_is_no_failed_build() -> None:
    diagnosis = diagnose([*STEPS, "srun: error: node1: task 2: Exited with exit code 1"])

    assert (diagnosis.outcome, rule(diagnosis)) == (LogOutcome.ONLY_ECHOES, "ended-without-words")
    assert "--tee" in str(diagnosis.findings[0].fix)


def test_the_same_failure_on_every_rank_is_said_of_all() -> None:
    log = [f"[rank{rank}]: {line}" for rank in range(4) for line in RAISED]

    assert title(diagnose(log)).startswith("all ranks: ")


def test_nothing_is_said_of_ranks_where_nothing_is_known() -> None:
    assert "rank" not in title(diagnose(RAISED))


def test_mixed_tracebacks_keep_their_own_frames() -> None:
    one = [f"[rank0]: {line}" for line in [*RAISED[:-1], LOST]]
    other = [f"[rank1]: {line}".replace("train.py", "data.py") for line in RAISED]
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]

    diagnosis = diagnose(mixed)

    assert title(diagnosis).startswith("rank 1: ")
    assert "KeyError: 'labels', at /w/data.py:7 main" in title(diagnosis)


def test_the_innermost_place_of_the_users_own_code_is_named() -> None:
    log = [
        *RAISED[:3],
        '  File "/v/lib/python3.11/site-packages/x/y.py", line 9, in deep',
        "    return table[key]",
        RAISED[-1],
    ]

    diagnosis = diagnose(log)

    assert "at /w/train.py:7 main" in title(diagnosis)
    assert "raised in /v/lib/python3.11/site-packages/x/y.py:9 deep" in diagnosis.findings[0].evidence
    assert "/w/train.py:7" in str(diagnosis.findings[0].fix)


def test_of_a_chain_the_exception_that_was_raised_on_purpose_is_told() -> None:
    first = [
        "Traceback (most recent call last):",
        '  File "/v/site-packages/a.py", line 1, in f',
        "    int(x)",
        "ValueError: bad literal",
    ]
    second = [
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "/v/site-packages/a.py", line 3, in g',
        '    raise RuntimeError(f"no such table {x}")',
        "RuntimeError: no such table 7",
    ]

    assert "no such table 7" in title(diagnose([*first, "", *second]))


def test_an_exception_after_which_the_training_went_on_is_none() -> None:
    assert diagnose([*STEPS[:5], *RAISED, *STEPS[5:12]]).outcome is LogOutcome.HEALTHY


def test_an_exception_within_a_warning_is_none() -> None:
    log = [*STEPS[:5], f"2026-11-22 10:54:33,560 WARNING skipped: {RAISED[0]}", *RAISED[1:], STEPS[5]]

    assert diagnose(log).outcome is LogOutcome.HEALTHY


@each(
    ("line", "words"),
    [
        (
            "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
            "3 of 4 processes came",
        ),
        ("RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 6000 ms", "rank 2, which did not come"),
        (
            "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//ready",
            "the key /default_pg/0//ready",
        ),
    ],
)
def test_the_rank_that_did_not_come_is_named(line: str, words: str) -> None:
    assert words in str(diagnose([line]).findings[0])


@each(
    "log",
    [
        ["python: a.cpp:3: void f(int): Assertion `n > 0' failed."],
        ["terminate called after throwing an instance of 'std::out_of_range'", "  what():  tile 9"],
        ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 5426 got signal: 15"],
        ["[1122.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."],
        ["1 validation error for DeepSpeedZeroConfig", "overlap_com", "  Extra inputs are not permitted"],
        ["pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig"],
        ["Fatal Python error: Segmentation fault"],
        [
            "usage: train.py [-h]",
            "train.py: error: unrecognized arguments: --local_rank=0",
            "exits with return code = 2",
        ],
        [
            "/v/bin/python: can't open file '/w/trian.py': [Errno 2] No such file or directory",
            "exits with return code = 2",
        ],
        ["double free or corruption (!prev)"],
        [*STEPS[:3], *[f"step {number} loss nan" for number in range(4, 9)]],
        [f"{{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.{number}}}" for number in range(9)],
        RAISED[:2],
        [" 16%|#         | 118/703 [08:15<40:57,  4.20s/it]"],
        ["{", '  "version": "1",', '  "pip_version": "25.0",', '  "install": [', "    {"],
    ],
)
def test_there_is_no_tick_for_what_was_not_understood(log: list[str]) -> None:
    diagnosis = diagnose(log)

    assert diagnosis.outcome is not LogOutcome.HEALTHY
    assert title(diagnosis)


def test_a_loss_that_is_a_number_again_is_no_failure() -> None:
    nans = [f"step {number} loss nan" for number in range(4, 9)]

    assert diagnose([*STEPS[:3], *nans, *STEPS[9:20]]).outcome is LogOutcome.HEALTHY


def test_the_step_from_which_the_loss_is_nan_is_named() -> None:
    log = [*STEPS[:5], *[f"step {number}/900 loss nan" for number in range(6, 12)]]

    assert title(diagnose(log)).startswith("the loss is nan from step 6 to the end")


@each("data", [bytes(range(256)) * 9, b"\x7fELF\x02\x01", b"PK\x03\x04" + b"x" * 99, b"\x89PNG\r\n"])
def test_bytes_that_are_no_text_are_no_log(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(data)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(data))

    assert run("diagnose", str(tmp_path / "a.log")).returncode == 2
    assert run("diagnose", str(tmp_path / "a.log.gz")).returncode == 2


def test_of_several_logs_the_one_with_a_failure_of_its_own_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("\n".join([*RAISED[:-1], LOST]))
    (tmp_path / "rank1.log").write_text("\n".join(RAISED))

    done = run("diagnose", str(tmp_path / "rank0.log"), str(tmp_path / "rank1.log"))

    assert [line for line in done.stdout.splitlines() if line.startswith("✗") and line.endswith("]")] == [
        "✗ KeyError: 'labels', at /w/train.py:7 main: the key does not exist where the script looks it up  [key-missing]"
    ]


def test_the_number_of_steps_to_come_is_no_step() -> None:
    log = ["  Total optimization steps = 703", "Map: 100%|###| 703/703 [00:01<00:00, 17.0 examples/s]", *RAISED]

    assert "step" not in title(diagnose(log))


def test_what_the_script_itself_refuses_is_the_cause() -> None:
    log = [*RAISED[:2], '    raise ValueError("sample 7 is too long")', "ValueError: sample 7 is too long"]

    diagnosis = diagnose([*STEPS[:4], *[f"[rank1]: {line}" for line in log], f"[rank0]: {LOST}"])

    assert (diagnosis.outcome, rule(diagnosis)) == (LogOutcome.RAISED, "script-raised")
    assert title(diagnosis).startswith(
        "rank 1: the script itself raised ValueError: sample 7 is too long, at /w/train.py:7 main"
    )


def stuck(rank: int, function: str) -> list[str]:
    """A rank that waited in vain."""
    lines = [
        "Traceback (most recent call last):",
        f'  File "/w/train.py", line {50 + rank}, in main',
        f'  File "/v/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line 9, in {function}',
        "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete",
    ]
    return [f"[rank{rank}]: {line}" for line in lines]


def test_ranks_that_took_different_paths_are_told_apart() -> None:
    diagnosis = diagnose([*stuck(0, "save_checkpoint"), *stuck(1, "backward")])

    words = "rank 0 while a checkpoint was saved at /w/train.py:50 main, rank 1 in training at /w/train.py:51 main"
    assert words in title(diagnosis)
    assert "call save_checkpoint on every rank" in str(diagnosis.findings[0].fix)


def test_the_rank_that_did_not_wait_with_the_others_is_named() -> None:
    log = ["[rank2]: step 3", *stuck(0, "backward"), *stuck(1, "backward"), "[rank2]: error: none"]

    assert "rank 2 did not wait with the others" in title(diagnose(log))


def test_another_rank_that_ended_well_too_early_is_said_to_have() -> None:
    log = [f"[rank0]: {line}" for line in [*RAISED[:-1], LOST]]

    diagnosis = diagnose([*log, "Failures:", "  <NO_OTHER_FAILURES>"])

    assert title(diagnosis).startswith(
        "another rank closed its connection (no other rank failed: another one had ended before"
    )


def test_a_complaint_before_further_steps_is_no_failure() -> None:
    assert (
        diagnose([*STEPS[:9], "ERROR tracker: connection refused, will retry", STEPS[9]]).outcome is LogOutcome.HEALTHY
    )


def test_the_traceback_in_torchruns_summary_is_read() -> None:
    log = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-22_10:40:17",
        "  host      : localhost",
        "  rank      : 5 (local_rank: 1)",
        "  exitcode  : 1 (pid: 9)",
        "  error_file: /tmp/e/1/error.json",
        "  traceback : Traceback (most recent call last):",
        '    File "/w/train.py", line 7, in main',
        "      run(batch)",
        "  KeyError: 'labels'",
    ]

    assert title(diagnose(log)).startswith("rank 5: KeyError: 'labels', at /w/train.py:7 main")


@each(
    "line",
    [
        "INFO Killed stale process 12 before start",
        "health Check failed: 0 of 8 nodes",
        "worker 3: exit code 137, started again",
    ],
)
def test_words_of_a_failure_after_which_the_training_goes_on_are_none(line: str) -> None:
    assert diagnose([*STEPS[:9], line, *STEPS[9:20]]).outcome is LogOutcome.HEALTHY


def overflow(first: int, last: int) -> list[str]:
    """Steps that are skipped while the loss scale is halved from 2**first to 2**last."""
    line = "[INFO] [loss_scaler.py:183] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}"
    return [line.format(2**power, 2 ** (power - 1)) for power in range(first, last, -1)]


@each("first", [16, 24, 32])
def test_a_loss_scale_that_sinks_up_to_the_end_is_told(first: int) -> None:
    diagnosis = diagnose([*STEPS[:4], *overflow(first, 2)])

    assert (diagnosis.outcome, rule(diagnosis)) == (LogOutcome.CAUSE, "fp16-loss-scale-floor")
    assert f"{2**first:g} to 8" in title(diagnosis)


@each(
    "log",
    [
        overflow(32, 12),
        [*overflow(16, 2), *["{'loss': 2.1, 'step': 9}"] * 20],
        ["[INFO] [logging.py:96:log_dist] [Rank 0] step=100, skipped=14, lr=[1e-05]"],
        ["[INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=10, lr=[1e-05]"],
    ],
)
def test_a_search_for_the_loss_scale_is_no_failure(log: list[str]) -> None:
    assert [finding.rule for finding in diagnose(log).findings if finding.rule == "fp16-loss-scale-floor"] == []


def test_a_counter_of_skipped_steps_is_read() -> None:
    log = [
        f"[INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped={step - 1}, lr=[1e-05]" for step in (10, 20, 30)
    ]

    assert "29 of 30 steps were skipped" in title(diagnose(log))
