"""The line that gives the reason is the cause, not the later one that only reports it: of NCCL, pods, installs, other processes."""

from __future__ import annotations

from tests.diagnosis.reading import diagnose
from tests.each import each

NCCL = "n1:412:980 [0] "
FAILED_CALL = [
    "Traceback (most recent call last):",
    '  File "/w/train.py", line 8, in <module>',
    "    dist.barrier()",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, internal error, NCCL version 2.27.7",
    "ncclInternalError: Internal check failed.",
    "Last error:",
]

LATER = {
    "nccl's warning before a system error": (
        [
            f"{NCCL}init.cc:9 NCCL WARN NET/IB : odd option 7 refused by the provider",
            "Test NCCL failure: unhandled system error",
        ],
        1,
        "odd option 7",
    ),
    "what stands below last error": ([*FAILED_CALL, "odd handle of the fabric is stale"], 7, "odd handle"),
    "a cuda failure below last error": ([*FAILED_CALL, "Cuda failure 802 'system not yet initialized'"], 7, "NVSwitch"),
    "an AMD GPU": (
        [
            "Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x7f00. Reason: Unknown.",
            "exitcode  : -6 (pid: 9)",
        ],
        1,
        "AMD GPU",
    ),
    "a pod that was refused": (
        ["status:", "  phase: Failed", "  reason: OutOfmemory", "waiting for placement group to be ready: 0/2 workers"],
        3,
        "OutOfmemory",
    ),
    "an image that cannot be pulled": (["trainer-0   0/1   ImagePullBackOff   0   4m"], 1, "ImagePullBackOff"),
    "an install that failed before": (
        [
            "ERROR: ResolutionImpossible: for help visit x",
            "$ accelerate launch t.py",
            "bash: accelerate: command not found",
        ],
        1,
        "contradict",
    ),
    "a second attempt": (
        [
            "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 7",
            "Traceback (most recent call last):",
            '  File "/w/verl/verl/a.py", line 8, in init',
            "ValueError: actor name 'pool:0' already exists.",
        ],
        1,
        "died",
    ),
    "an empty address": (
        [
            "[INFO] [runner.py:417:main] Using IP address of  for node a-0",
            "a-0: launch.py: error: the following arguments are required: x",
        ],
        1,
        "master address",
    ),
    "no rights in /dev/shm": (
        [f"{NCCL}shm.h:27 NCCL WARN Call to shm_open failed : Permission denied"],
        1,
        "Permission",
    ),
    "a quota": (
        [
            "Traceback (most recent call last):",
            '  File "/w/t.py", line 3, in save_checkpoint',
            "OSError: [Errno 122] Disk quota exceeded",
        ],
        3,
        "quota",
    ),
    "a disk that Ray fills": (["ray.exceptions.OutOfDiskError: Local disk is full"], 1, "disk"),
    "an exception of a rank within that of all": (
        [
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "/v/site-packages/torch/distributed/checkpoint/utils.py", line 240, in reduce_scatter',
            "[rank0]:     raise result",
            "[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1])",
            "[rank0]: Traceback (most recent call last): (RANK 0)",
            '[rank0]:   File "/v/site-packages/torch/distributed/checkpoint/x.py", line 4, in plan',
            "[rank0]:     raise ValueError(",
            "[rank0]: ValueError: shard odd_7 is too short",
        ],
        8,
        "odd_7",
    ),
}


@each("name", LATER)
def test_the_line_with_the_reason_is_the_cause(name: str) -> None:
    log, line, words = LATER[name]
    first = diagnose(log).findings[0]

    assert first.evidence[0].startswith(f"line {line}: ") and words in first.title, first


PREFIXES = (
    "(raylet) ",
    "(raylet, ip=10.0.0.7) ",
    "(Worker[rank=1] pid=53) ",
    "I 09-12 22:49:49 recovery.py:501] ",
    "(Server pid=52) ERROR 10-09 23:26:30 [serving.py:208] ",
    "ERROR 10-09 23:26:30 [core.py:700] ",
)


@each("prefix", PREFIXES)
def test_a_traceback_behind_a_prefix_is_joined_with_its_exception(prefix: str) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/w/a.py", line 7, in run',
        "    raise odd.Broken(",
        "odd.BrokenError: shard 7",
    ]
    first = diagnose([*(prefix + line for line in lines), "the job has failed"]).findings[0]

    assert "shard 7" in first.title and any("/w/a.py:7" in one for one in first.evidence), first


def test_a_traceback_that_lines_follow_is_not_cut_off() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/w/a.py", line 7, in run',
        *(f"odd line {n}" for n in range(9)),
    ]

    assert all(finding.rule != "log-cut-off" for finding in diagnose(log).findings)


MEMORY = (
    "Memory on the node (IP: 10.0.0.2, ID: c1) where the task (actor ID: 3a1, name=WorkerDict.__init__, pid=5012, "
    "memory used=45.20GB) was running was 243.11GB / 250.00GB (0.95), which exceeds the memory usage threshold of 0.95."
)
GLOO = "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: "
CUDNN = "Could not load library libcudnn_cnn_train.so.8. Error: "
VARIANTS = {
    "who holds the most": (
        [MEMORY, "PID\tMEM(GB)\tCOMMAND", "14\t176.97\tpython reward.py --x"],
        "reward.py held the most: 176.97GB",
    ),
    "nobody's table": ([MEMORY], "which held 45.20GB"),
    "interfaces to leave out": ([f"{GLOO}^lo"], "leave out (^lo)"),
    "an interface that isn't there": ([f"{GLOO}eth7"], "cannot reach each other"),
    "a library of another release": (
        [f"{CUDNN}/usr/local/cuda/lib/libcudnn_cnn_train.so.8: undefined symbol: _Z1x"],
        "from /usr/local/cuda/lib",
    ),
    "a library that isn't there": (
        [f"{CUDNN}libnvrtc.so: cannot open shared object file: No such file or directory"],
        "was not found",
    ),
}
"""Which of a family's members it is, another line or the rest of the same one tells."""


@each("case", tuple(VARIANTS))
def test_what_else_the_log_shows_tells_in_which_case_of_its_rule_a_line_is(case: str) -> None:
    lines, words = VARIANTS[case]

    assert words in diagnose(lines).findings[0].title


def test_the_reason_below_a_line_that_begins_with_a_cross_is_evidence_up_to_the_help() -> None:
    block = [
        "  × Failed to download and build `x==2.8`",
        "  ╰─▶ Extra requirement `torch` is",
        "      not static",
        "  help: y",
    ]
    first = diagnose([*block, "error: Process completed with exit code 1."]).findings[0]

    assert "its reason: Extra requirement `torch` is not static" in first.evidence
    assert not any("its reason" in one for one in diagnose([MEMORY, "  ╰─▶ no reason of it"]).findings[0].evidence)


def test_rounds_of_boosting_and_a_named_image_are_progress_and_an_end() -> None:
    assert diagnose(["[430]\tvalid-error:0.114\tvalid-logloss:0.248"]).outcome.value == "healthy"
    assert diagnose(["#11 naming to registry.local/train:1.4 done"]).outcome.value == "healthy"
    assert diagnose(["[430]\tvalid", "#11 naming to"]).outcome.value == "undecided"
