"""Runs that are well though their logs show exceptions: of samples, tried code, threads at exit, a way not taken."""

from __future__ import annotations

from dsdoctor.core.finding import has_error
from dsdoctor.diagnosis.models import LogVerdict
from tests.diagnosis.reading import diagnose
from tests.each import each

STEP = "{label}step:{number} - actor/entropy:0.21 - critic/score:0.4"
BAR = "Training Progress:   2%|          | {number}/435 [18:20<12:59:10, 110.88s/it]"


def steps(first: int, last: int, label: str = "") -> list[str]:
    return [line.format(label=label, number=number) for number in range(first, last) for line in (STEP, BAR)]


def traceback(path: str, exception: str, label: str = "", function: str = "check") -> list[str]:
    lines = ["Traceback (most recent call last):", f'  File "{path}", line 5, in {function}', "    run()", exception]
    return [f"{label}{line}" for line in lines]


def again(*trouble: str, label: str) -> list[str]:
    """The trouble of each step, and one step after the last."""
    return [line for number in range(1, 7) for line in (*trouble, STEP.format(label=label, number=number))]


TASK = "(TaskRunner pid=812) "
WORKER = "(RewardWorker pid=913) "
GRADER = traceback("/v/site-packages/latex2sympy2/g.py", "odd.ParseError: cannot read '\\frac'", TASK)
SANDBOX = traceback("/tmp/tmpab12cd/answer.py", "MemoryError", WORKER, "<module>")
LOADER = traceback("/w/data.py", "OSError: image file is truncated", "", "__getitem__")

WELL = {
    "the same process cannot read an answer now and then": [*steps(0, 3, TASK), *again(*GRADER, label=TASK)],
    "code that a model wrote fails in a worker": [*steps(0, 3, TASK), *again(*SANDBOX, label=TASK)],
    "code that a model wrote fails once": [*steps(0, 3, TASK), *SANDBOX, *steps(3, 9, TASK)],
    "broken samples are replaced": again(*LOADER, "another sample is taken", label=""),
    "swift's own records of steps": [
        "{'loss': 1.1, 'epoch': 0.03, 'global_step/max_steps': '10/900'}",
        *LOADER,
        *(f"{{'loss': 1.0, 'epoch': 0.06, 'global_step/max_steps': '{number}0/900'}}" for number in range(2, 7)),
    ],
    "a thread of the loader at the end": [
        *steps(0, 5),
        "Finished training.",
        "Exception in thread Thread-3 (_pin_memory_loop):",
        *traceback("/usr/lib/python3.10/threading.py", "ConnectionResetError: [Errno 104] Connection reset by peer"),
        "$ echo $?",
        "0",
    ],
    "a warning of a fabric, and the program's own status": [
        "$ mpirun -n 2 ./bandwidth",
        "[1668693503.47] [node1:11:0]  ib_log.c:246  UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory",
        "1048576  0.21",
        "$ echo $?",
        "0",
    ],
    "a server that goes down with its client": [
        "$ python embed.py",
        "wrote embeddings.npy",
        "ERROR 01-16 17:16:49 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
        "$ echo $?",
        "0",
    ],
    "a worker of Ray that was meant to end": [
        *steps(0, 5, TASK),
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 10.0.0.7 "
        "Worker port: 10022 Worker PID: 33 Worker exit type: INTENDED_USER_EXIT Worker exit detail: exited by request.",
        "+ echo finished",
        "finished",
    ],
    "a hook at exit": [
        *steps(0, 5),
        "{'train_runtime': 3211.2, 'epoch': 3.0}",
        "Error in atexit._run_exitfuncs:",
        *traceback("/v/site-packages/mlflow/x.py", "BrokenPipeError: [Errno 32] Broken pipe"),
        "exit code: 0",
    ],
    "a download that falls back to a build": [
        "$ pip install odd-kernels",
        "  error: <urlopen error [Errno -3] Temporary failure in name resolution>",
        "  no wheel at hand: building from source",
        "  [1/2] c++ -c a.cpp",
        "Successfully installed odd-kernels-1.0",
    ],
    "a bar at the last line of a steady training": steps(0, 12, TASK),
    "losses under a bar": [
        line
        for number in range(9)
        for line in (f"{{'loss': 0.{number}1, 'epoch': 0.1}}", f" {number}%|#  | {number}/90 [0:10<1:00, 1.2s/it]")
    ],
    "nccl-tests": ["# nThread 1 nGpus 1", " 1048576  262144  float  116.5  60.0  0", "# Out of bounds values : 0 OK"],
    "conda": ["Solving environment: done", "Verifying transaction: done", "Executing transaction: done"],
    "a sample of CUDA": ["Device 0: NVIDIA H100", "Result = PASS"],
}


@each("name", WELL)
def test_what_was_survived_is_no_failure(name: str) -> None:
    told = diagnose(WELL[name])

    assert told.verdict is LogVerdict.HEALTHY, told.findings


ENDED = {
    "the last one ends the process": [*steps(0, 3, TASK), *GRADER],
    "no step follows": [*again(*GRADER, label=TASK), *GRADER],
    "a rank of its own": [*steps(0, 3, "[rank1]: "), *traceback("/w/t.py", "ValueError: odd", "[rank0]: ", "<module>")],
    "a thread within the training": [
        *steps(0, 3),
        "Exception in thread Thread-3 (_pin_memory_loop):",
        *traceback("/w/loader.py", "RuntimeError: no more pages"),
    ],
    "the status of a pipe is that of its last program": [
        "$ python train.py | tee train.log",
        *traceback("/w/train.py", "ValueError: odd", "", "<module>"),
        "$ echo $?",
        "0",
    ],
    "a status that is not 0": [
        "$ mpirun -n 2 ./bandwidth",
        "[1668693503.47] [node1:11:0]  ib_log.c:246  UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory",
        "$ echo $?",
        "1",
    ],
    "a worker of Ray that died": [
        *steps(0, 5, TASK),
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 10.0.0.7 "
        "Worker port: 10022 Worker PID: 33 Worker exit type: SYSTEM_ERROR Worker exit detail: connection error code 2.",
    ],
    "a fallback that fails": ["error: <urlopen error timed out>", "building from source", "error: no compiler"],
}


@each("name", ENDED)
def test_what_nothing_shows_to_be_survived_is_a_failure(name: str) -> None:
    assert has_error(diagnose(ENDED[name]).findings)


def test_a_log_of_a_run_that_goes_on_says_at_which_step_it_ends() -> None:
    assert diagnose(steps(0, 12, TASK)).activity == "the log ends at step 11 of 435"


def test_a_bar_alone_shows_no_progress_of_a_training() -> None:
    loading = [f"Loading checkpoint shards:  {number}%|#  | {number}/9 [00:03<00:06, 3.3s/it]" for number in range(6)]

    assert diagnose(loading).verdict is LogVerdict.UNDECIDED
