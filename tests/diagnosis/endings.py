"""Runs that ended well after something went wrong in them: what was survived x where it stands x what proves the success.

``python -m tests.diagnosis.endings`` prints the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dsdoctor.core.finding import has_error
from tests.diagnosis.reading import diagnose

Lines = list[str]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/w/data/stream.py", line 71, in _get',
    "    resp = self._sess.get(url, timeout=15)",
    '  File "/v/lib/python3.11/site-packages/requests/adapters.py", line 713, in send',
    "    raise ReadTimeout(e, request=request)",
]
SLURM = "slurmstepd: error: *** JOB 338117 ON g032 CANCELLED AT 2026-11-22T21:40:11 DUE TO PREEMPTION ***"
RETRIED: dict[str, Lines] = {
    "read timeout": [
        *TRACEBACK,
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='s3.internal', port=443): Read timed out. (read timeout=15)",
        "WARNING:stream:shard 00412.tar failed (attempt 1/5), retrying in 2.0s",
        "INFO:stream:shard 00412.tar ok after 2 attempts",
    ],
    "hub error": [
        *TRACEBACK,
        "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://hub.internal/api/models/a/b",
        "tried again in 8 s: ok",
    ],
    "sample": [*TRACEBACK[:3], "KeyError: 'image'", "sample 4711 is skipped"],
    "memory": [
        *TRACEBACK[:3],
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.15 GiB of "
        "which 1.20 GiB is free.",
        "batch 17 is skipped",
    ],
    "no traceback": ["OSError: [Errno 5] Input/output error: '/data/part-3.bin'", "read again: ok"],
    "thread": ["Exception in thread Thread-7 (_send):", *TRACEBACK[:3], "BrokenPipeError: [Errno 32] Broken pipe"],
    "complaint": ["ERROR: tracker did not answer, going on without", "sync: error: quota of the tracker"],
}
"""What went wrong, and was borne."""

STOPPED: dict[str, Lines] = {
    "preempted": [SLURM, "======== requeued: SLURM_RESTART_COUNT=1, node g033 ========"],
    "interrupted": ["Main process received SIGTERM, exiting", "+ srun --export=ALL torchrun train.py --resume"],
}
"""What ended a run that was started again."""

AT_THE_END: dict[str, Lines] = {
    "ignored, without a traceback": [
        "Exception ignored in: <function TemporaryDirectory.__del__ at 0x7f11>",
        "OSError: [Errno 39] Directory not empty: '/tmp/tmpx1'",
    ],
    "ignored": [
        "Exception ignored in: <function Pool.__del__ at 0x7f12>",
        *TRACEBACK[:3],
        "ResourceWarning: unclosed running multiprocessing pool",
    ],
    "flush": ["Exception ignored on flushing sys.stdout:", "BrokenPipeError: [Errno 32] Broken pipe"],
    "slurm": ["slurmstepd: error: Unable to unlink domain socket: No such file or directory"],
}
"""What goes wrong when the work is done."""

TRAINER = "{'train_runtime': 4364.1, 'train_loss': 0.55, 'epoch': 1.0}"
WORDS: dict[str, Lines] = {
    "trainer": [TRAINER],
    "metrics": [
        "***** train metrics *****",
        "  train_loss               =     0.55",
        "  train_runtime            = 1:12:44.10",
    ],
    "words": ["Training complete."],
    "finished": ["Finished Training"],
    "lightning": ["`Trainer.fit` stopped: `max_epochs=3` reached."],
    "torchrun": [
        "I0707 09:21:55.003000 411 torch/distributed/elastic/agent/server/api.py:864] [default] worker group successfully "
        "finished. Waiting 300 seconds for other agents to finish.",
        "I0707 09:21:55.004000 411 torch/distributed/elastic/agent/server/api.py:917] Local worker group finished "
        "(WorkerState.SUCCEEDED). Waiting 300 seconds for other agents to finish",
    ],
    "deepspeed": ["[2026-11-22 10:00:00,100] [INFO] [launch.py:351:main] Process 2297 exits successfully."],
    "ray": ["Job 'raysubmit_k2' succeeded"],
}
"""The program's own last words, or its launcher's."""

CODES: dict[str, Lines] = {
    "accelerate": ["accelerate launch exited with 0"],
    "runner": ["deepspeed train.py exited with code 0"],
    "slurm": ["Job 338117 COMPLETED (exit 0:0)"],
    "sacct": ["State: COMPLETED (exit code 0)"],
    "scontrol": ["JobId=338117 JobState=COMPLETED ExitCode=0:0"],
    "echo": ["exit code: 0"],
    "status": ["exit status 0"],
    "container": ["command terminated with exit code 0"],
}
"""An exit code of whatever started the training."""


def steps(first: int, last: int) -> Lines:
    """Losses of steps, as the Trainer prints them."""
    return [
        f"{{'loss': 1.{number:04d}, 'grad_norm': 1.25, 'learning_rate': 1e-05, 'epoch': 0.{number:02d}}}"
        for number in range(first, last)
    ]


def well() -> Iterator[tuple[str, str, str, Lines]]:
    """What was survived, where, the ending, the log: of runs that ended well."""
    endings = {**WORDS, **{f"words, {name}": [*WORDS["words"], *code] for name, code in CODES.items()}}
    for name, said in {**RETRIED, **STOPPED}.items():
        for place, log in (("first", [*said, *steps(1, 9)]), ("amid", [*steps(1, 5), *said, *steps(5, 9)])):
            for ending, last in {**endings, **CODES}.items():
                yield name, place, ending, [*log, *last]
    for name, said in RETRIED.items():
        for ending, last in endings.items():
            yield name, "before the last words", ending, [*steps(1, 9), *said, *last]
    for name, said in AT_THE_END.items():
        for words, last in WORDS.items():
            for code, exited in CODES.items():
                yield name, "after the last words", f"{words}, {code}", [*steps(1, 9), *last, *said, *exited]


LAST_WORDS: dict[str, Lines] = {
    "unknown": [*TRACEBACK[:3], "ZeroDivisionError: float division by zero"],
    "key": [*TRACEBACK[:3], "KeyError: 'labels'"],
    "memory": RETRIED["memory"][:-1],
    "arguments": ["usage: train.py [-h]", "train.py: error: unrecognized arguments: --lrr"],
}
KILLED: dict[str, Lines] = {
    "torchrun": ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "  exitcode  : 1 (pid: 41235)"],
    "deepspeed": [
        "[2026-11-22 10:00:00,100] [ERROR] [launch.py:325:sigkill_handler] ['python', 'x.py'] exits with return code = 1"
    ],
    "shell": ["run.sh: line 3: 412 Killed                  python train.py"],
}


def ill() -> Iterator[tuple[str, str, str, Lines]]:
    """Runs that failed, though an exit code of zero stands behind: a pipe's, or that of a script that goes on."""
    for name, said in LAST_WORDS.items():
        for code, exited in CODES.items():
            yield name, "nothing after it", code, [*steps(1, 9), *said, *exited]
            for launcher, last in KILLED.items():
                yield name, launcher, code, [*steps(1, 9), *said, *last, *exited]
        for words, last in WORDS.items():
            yield name, "after the last words", words, [*steps(1, 9), *last, *said, *KILLED["torchrun"]]
    for launcher, last in KILLED.items():
        for code, exited in CODES.items():
            yield "killed", launcher, code, [*steps(1, 9), *last, *exited]


def wrong(cases: Iterator[tuple[str, str, str, Lines]], *, failed: bool) -> Iterator[tuple[str, str, str, str]]:
    """The cases that are told otherwise, with what was told."""
    for name, place, ending, log in cases:
        found = diagnose(log).findings
        if has_error(found) is not failed:
            yield name, place, ending, found[0].title if found else "healthy"


def main() -> None:
    """Print the counts."""
    for title, cases, failed in (("ended well", well, False), ("failed", ill, True)):
        found = list(wrong(cases(), failed=failed))
        print(f"{title}: {len(found)} of {sum(1 for _ in cases())} told wrongly")
        for case, times in Counter((one[0], one[1]) for one in found).items():
            print(f"{times:>5} {case} {next(one[2:] for one in found if one[:2] == case)}")


if __name__ == "__main__":
    main()
