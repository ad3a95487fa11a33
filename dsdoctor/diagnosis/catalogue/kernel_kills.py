"""What the kernel's log says of a process that it killed for memory: wordings of host-ram-oom."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Signature, Tier

COMPILERS = (
    r"\((?:cc1plus|cicc|ptxas|cudafe\+\+|nvcc|ld|ninja)\)|\btask=(?:cc1plus|cicc|ptxas|cudafe\+\+|nvcc|ld|ninja),"
)
"""Tasks of a build, which compiler-oom-killed knows."""

OF_A_RUN = r"(?:python|pt_|ray|torchrun|deepspeed|accelerate|train)"
"""How the name of a task begins that may be a rank."""

CONSTRAINT = r"oom-kill:constraint=CONSTRAINT_"
TASK = rf"\b.{{0,400}}?\btask=(?P<task>{OF_A_RUN}[^,]{{0,40}}),pid=(?P<pid>\d{{1,9}})"
LIMIT = (
    "raise that limit (docker --memory, resources.limits.memory of the pod, --mem of Slurm), or use less host memory: load the "
    "model once for the node or divided (zero.Init, low_cpu_mem_usage), fewer ranks or loader workers, less offloading to the CPU"
)

KERNEL_KILLS = (
    Signature(
        words="constraint_memcg memory+cgroup+killed memory+cgroup+kill",
        pattern=rf"{CONSTRAINT}MEMCG{TASK}|[Mm]emory cgroup out of memory: Kill(?:ed)? process (?P<pid2>\d{{1,9}})"
        rf" \((?P<task2>{OF_A_RUN}[^)]{{0,40}})\)",
        title="the kernel killed {task} (pid {pid}): the memory limit of its container or job (its cgroup) was reached, though the "
        "machine may have more",
        fix=LIMIT,
        steps=(
            step("cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.events"),
            step("dmesg -T | grep -i -E 'killed process|oom-kill'"),
        ),
        sample="[17798674.377396] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=38e6,mems_allowed=0-7,"
        "oom_memcg=/docker/38e6,task_memcg=/docker/38e6,task=python,pid=202779,uid=1000",
    ),
    Signature(
        words="constraint_none constraint_cpuset constraint_memory_policy killed+process kill+process",
        pattern=rf"{CONSTRAINT}(?:NONE|CPUSET|MEMORY_POLICY){TASK}|(?<!cgroup )[Oo]ut of memory: Kill(?:ed)? process "
        rf"(?P<pid2>\d{{1,9}}) \((?P<task2>{OF_A_RUN}[^)]{{0,40}})\)",
        title="the kernel killed {task} (pid {pid}): the host's memory ran out",
        sample="[4321.25] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        "task_memcg=/user.slice,task=pt_main_thread,pid=4711,uid=0",
    ),
    Signature(
        words="killed+process kill+process oom+constraint",
        pattern=r"[Oo]ut of memory: Kill(?:ed)? process (?P<pid>\d{1,9})(?: \((?P<task>[^)]{1,40})\))?"
        r"|oom-kill:constraint=CONSTRAINT_\w{1,20}\b(?:.{0,400}?\btask=(?P<task2>[^,]{1,40}),pid=(?P<pid2>\d{1,9}))?",
        unless=rf"{COMPILERS}|\({OF_A_RUN}|\btask={OF_A_RUN}",
        tier=Tier.GENERIC,
        title="the kernel killed {task|a process}{pid_hint} for want of memory; if that is no rank, the ranks lack it "
        "all the same",
        sample="[4321.25] Out of memory: Killed process 4711 (java) total-vm:9kB",
    ),
)
