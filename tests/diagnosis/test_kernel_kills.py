"""The kernel's own record of a kill for memory, wherever it stands beside the launcher's words, is what is told."""

from __future__ import annotations

from tests.diagnosis.reading import diagnose
from tests.each import each

STEPS = [f"{{'loss': 1.{number}, 'grad_norm': 0.5}}" for number in range(6)]
KILLED = (
    "[2024-04-11 05:10:10,712] [ERROR] [launch.py:325:sigkill_handler] ['/v/bin/python', '-u', 'train.py', '--local_rank=3'] "
    "exits with return code = -9"
)
RAISED = [
    "Traceback (most recent call last):",
    '  File "/w/net.py", line 70, in forward',
    "    return a @ b",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x4)",
]
PREFIXES = ("[177.37] ", "[Thu Apr 11 05:10:07 2024] ", "Apr 11 05:10:07 node7 kernel: ")


def record(task: str, constraint: str) -> str:
    """The line by which newer kernels record a kill."""
    return (
        f"oom-kill:constraint=CONSTRAINT_{constraint},nodemask=(null),cpuset=38e6,mems_allowed=0-7,oom_memcg=/docker/38,"
        f"task_memcg=/docker/38,task={task},pid=202779,uid=1000"
    )


OF_A_LIMIT = [
    record("python", "MEMCG"),
    record("pt_main_thread", "MEMCG"),
    record("ray::Worker", "MEMCG"),
    "Memory cgroup out of memory: Killed process 202779 (python3.11) total-vm:1097GB, anon-rss:1kB",
    "Memory cgroup out of memory: Kill process 202779 (python) score 1000 or sacrifice child",
]
OF_THE_HOST = [
    record("python", "NONE"),
    record("pt_data_worker", "CPUSET"),
    "Out of memory: Killed process 202779 (pt_main_thread) total-vm:1kB",
    "Out of memory: Kill process 202779 (python) score 900 or sacrifice child",
]


@each("prefix", PREFIXES)
@each("line", OF_A_LIMIT)
def test_a_limit_of_a_container_is_told_from_the_host(prefix: str, line: str) -> None:
    for log in ([*STEPS, KILLED, prefix + line], [*STEPS, prefix + line, KILLED]):
        first = diagnose(log).findings[0]
        assert first.rule == "host-ram-oom"
        assert "memory limit of its container" in first.title
        assert "pid 202779" in first.title
        assert "does not say why" not in first.title


@each("prefix", PREFIXES)
@each("line", OF_THE_HOST)
def test_a_host_that_is_full_is_told(prefix: str, line: str) -> None:
    first = diagnose([*STEPS, KILLED, prefix + line]).findings[0]

    assert first.rule == "host-ram-oom"
    assert "the host's memory ran out" in first.title
    assert "pid 202779" in first.title


@each("task", ["cc1plus", "cicc", "ptxas"])
@each("constraint", ["MEMCG", "NONE"])
def test_a_compiler_is_known_as_one(task: str, constraint: str) -> None:
    assert diagnose([f"[1.2] {record(task, constraint)}"]).findings[0].rule == "compiler-oom-killed"


@each("task", ["java", "chrome"])
def test_a_kill_of_another_program_is_not_told_for_an_exception(task: str) -> None:
    assert diagnose([*STEPS, *RAISED, f"[1.2] {record(task, 'NONE')}"]).findings[0].rule == "shapes-differ"


def test_a_kill_before_a_training_that_went_well_is_no_error() -> None:
    findings = diagnose([f"[1.2] {record('python', 'MEMCG')}", *STEPS, "{'train_runtime': 3.0}"]).findings

    assert [finding.severity.value for finding in findings] == ["note"]


@each(
    ("line", "rule"),
    [
        ("RuntimeError: DataLoader worker (pid 412) is killed by signal: Killed. ", "host-ram-oom"),
        (KILLED, ""),
        ("run.sh: line 3: 12729 Killed                  python train.py", ""),
        ("srun: error: node7: task 3: Killed", ""),
        ("c++: fatal error: Killed signal terminated program cc1plus", "compiler-oom-killed"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "compiler-oom-killed"),
    ],
)
def test_a_signal_alone_is_not_called_a_lack_of_memory(line: str, rule: str) -> None:
    first = diagnose([*STEPS, line]).findings[0]

    assert first.rule == rule or not rule
    assert "memory" not in first.title
    assert "SIGKILL" in first.title
    assert first.fix is not None
    assert "memory" in first.fix.text
    assert "user" in first.fix.text


def test_a_compiler_that_the_kernel_killed_is() -> None:
    first = diagnose(["[1/2] c++ -MMD -c x.cpp -o x.o", record("cc1plus", "NONE")]).findings[0]

    assert (first.rule, first.title) == ("compiler-oom-killed", "the kernel killed cc1plus because memory ran out")
