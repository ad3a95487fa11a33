"""A signal from outside is told by what sends it, a process that broke off at its exit by what it had ended before."""

from __future__ import annotations

from dsdoctor.core.finding import has_error
from tests.diagnosis.reading import diagnose
from tests.each import each

STEPS = [f"{{'loss': 1.{number}, 'grad_norm': 0.5}}" for number in range(6)]
ELASTIC = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 84933 got signal: {}"
DEATH = "W0920 09:10:41.194000 84933 torch/distributed/elastic/agent/server/api.py:719] Received {} death signal, shutting down"
MAIN = "[2024-01-01 00:00:00,000] [INFO] [launch.py:319:sigkill_handler] Main process received SIG{}, exiting"
SAID = [
    (ELASTIC.format(1), "SIGHUP", "tmux"),
    (DEATH.format(1), "SIGHUP", "tmux"),
    (MAIN.format("HUP"), "SIGHUP", "tmux"),
    (ELASTIC.format(2), "SIGINT", "dsdoctor.run"),
    (DEATH.format(2), "SIGINT", "dsdoctor.run"),
    (MAIN.format("INT"), "SIGINT", "dsdoctor.run"),
    (ELASTIC.format(15), "SIGTERM", "sacct"),
    (DEATH.format(15), "SIGTERM", "sacct"),
    (MAIN.format("TERM"), "SIGTERM", "sacct"),
]


@each(("line", "name", "command"), SAID)
@each("label", ["", "node-1: "])
def test_each_signal_is_told_by_what_sends_it(line: str, name: str, command: str, label: str) -> None:
    first = diagnose([label + told for told in (*STEPS, line)]).findings[0]

    assert first.rule == "ended-from-outside"
    assert name in first.title
    assert first.fix
    assert command in first.fix.steps[0].line


ENDED = [*STEPS, "{'train_runtime': 3.0, 'train_loss': 0.1}"]
EXITS = [
    "[rank0]:[W911 16:19:24.09 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before "
    "program exit, which can leak resources.",
    "[INFO:swift] End time of running main: 2025-09-11 16:19:22.473503",
    "wandb: Synced 5 W&B file(s), 0 media file(s)",
]
RAISED = [
    "Traceback (most recent call last):",
    '  File "/w/t.py", line 7, in f',
    "    g()",
    "ValueError: no such part 4711",
]


def exited(code: int) -> str:
    """How torchrun says that a process ended."""
    return (
        f"E0911 16:21:58 325 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: 0 "
        "(pid: 470) of binary: /v/bin/python"
    )


@each("code", [-6, -11])
@each("words", EXITS)
def test_a_training_that_had_ended_is_no_failure_of_its_exit(code: int, words: str) -> None:
    findings = diagnose([*ENDED, words, exited(code)]).findings

    assert findings[0].severity.value == "warning"
    assert "the training finished" in findings[0].title


@each("code", [-6, -11, -9, -7, 1])
@each("log", [ENDED, [*STEPS, EXITS[0]], [*ENDED, *RAISED, EXITS[0]], [*STEPS]])
def test_nor_is_anything_else_taken_for_that(code: int, log: list[str]) -> None:
    assert has_error(diagnose([*log, exited(code)]).findings)


@each("code", [-9, -7, 1])
def test_nor_a_signal_that_destructors_do_not_send(code: int) -> None:
    assert has_error(diagnose([*ENDED, EXITS[0], exited(code)]).findings)


WATCHDOG = (
    "[rank5]:[E602 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41236, "
    "OpType=ALLREDUCE, NumelIn=16384000, NumelOut=131072000, Timeout(ms)=600000) ran for 600056 milliseconds before timing out."
)


@each(
    ("log", "told"),
    [
        (["{'loss': 3.55}", "{'loss': 0.0, 'grad_norm': 1.41}"], True),
        (["iteration 20/ 100 | lm loss: 3.55E+00 |", "iteration 24/ 100 | lm loss: 0.0E+00 | grad norm: 0.0"], True),
        (["loss: 2.9", "loss: 0"], True),
        (["{'loss': 3.55}", "{'loss': 0.0}", "{'loss': 2.1}"], False),
        (["{'loss': 0.0, 'reward': 0.4}"], False),
        (["{'loss': 0.4, 'reward': 0.4}", "{'loss': 0.0, 'reward': 0.4}"], False),
        (["{'loss': 0.0001}", "{'loss': 0.0}"], False),
        (["{'loss': 3.55}", "{'loss': 0.05}"], False),
    ],
)
def test_a_loss_of_zero_before_a_wait_is_told(log: list[str], told: bool) -> None:
    first = diagnose([*log, WATCHDOG]).findings[0]

    assert first.rule == "nccl-collective-timeout"
    assert any("learning may have broken down" in line for line in first.evidence) is told
