"""Rules of a run: memory, fp16, processors, and imports that newer versions removed."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.kernel_kills import COMPILERS, KERNEL_KILLS
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

NO_MODULE_OF_TORCH = r"No module named '(?P<name>torch\.[\w.]+)'"
NO_NAME_OF_TORCH = r"cannot import name '(?P<name2>\w+)' from '(?:partially initialized module )?torch(?:\.[\w.]+)?'"
"""What Python says of a part of torch that the installed one does not have."""

DEEPSPEED_TOO_OLD_FOR_TORCH = Rule(
    id="deepspeed-too-old-for-torch",
    stage=Stage.LOAD,
    title="this DeepSpeed imports {name|something} from torch, and this torch no longer has it",
    fix="upgrade DeepSpeed to a release that knows this torch",
    steps=(step("python -m pip install -U deepspeed"), instead("python -m dsdoctor prebuild --source newest")),
    manual="""This DeepSpeed imports something from torch that this torch no longer has.

Releases of DeepSpeed import internals of torch: torch._six went with torch 2.0, `log` of the elastic agent with
2.6. The alternative is to pin torch to the release that this DeepSpeed was written for.

Why it matters: An older DeepSpeed on a newer torch fails at import.""",
    signatures=(
        Signature(
            words="modulenotfounderror importerror+named import+torch",
            pattern=f"{NO_MODULE_OF_TORCH}|{NO_NAME_OF_TORCH}",
            after=r"[/\\]deepspeed[/\\]|op_builder",
            sample='  File "/v/deepspeed/runtime/zero/stage3.py", line 12\n'
            "ModuleNotFoundError: No module named 'torch._six'",
        ),
        Signature(
            words="modulenotfounderror importerror+named import+torch",
            pattern=f"{NO_MODULE_OF_TORCH}|{NO_NAME_OF_TORCH}",
            not_after=r"(?:site|dist)-packages[/\\](?!torch[/\\])|[/\\]deepspeed[/\\]|op_builder",
            sample="ImportError: cannot import name 'log' from 'torch.distributed.elastic.agent.server.api' "
            "(/venv/lib/python3.11/site-packages/"
            "torch/distributed/elastic/agent/server/api.py)",
        ),
        Signature(
            words="attribute+torch",
            pattern=r"AttributeError: module 'torch(?:\.[\w.]+)?' has no attribute '(?P<name>\w+)'",
            after=r"deepspeed|op_builder",
            not_after=r"_configure_(?:basic_)?optimizer|_configure_lr_scheduler|_scheduler_from_config|_initialize_params",
            tier=Tier.GENERIC,
            sample='  File "/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line 20, in <module>\n'
            "AttributeError: module 'torch.distributed' has no attribute '_all_gather_base'",
        ),
        Signature(
            words="_set_master_addr_port",
            pattern=r"TypeError: (?:\w{1,40}\.)?(?P<name>_set_master_addr_port)\(\) takes \d positional arguments but \d",
            title="DeepSpeed's elastic agent is older than this torch, which gives its {name} one more argument (torch 2.0 and "
            "later do)",
            fix="upgrade DeepSpeed: pull request 4985 (January 2024) mends it; or train without --elastic_training",
            sample="TypeError: _set_master_addr_port() takes 3 positional arguments but 4 were given",
        ),
        Signature(
            words="bufsize",
            pattern=r"cannot import name '(?P<name>BUFSIZE)' from 'numpy'",
            title="this DeepSpeed imports {name} from numpy, and numpy 2 no longer has it",
            steps=(step("python -m pip install -U deepspeed"), instead("python -m pip install 'numpy<2'")),
            sample="ImportError: cannot import name 'BUFSIZE' from 'numpy' "
            "(/venv/lib/python3.9/site-packages/numpy/__init__.py)",
        ),
    ),
)

KILLED = (
    "a process was killed (SIGKILL): most often the host's memory ran out, else somebody or the scheduler killed it; this "
    "line does not say why"
)

HOST_RAM_OOM = Rule(
    id="host-ram-oom",
    stage=Stage.RUN,
    title="a rank was killed: the host's memory ran out",
    fix="use less host memory: fewer ranks or loader workers, no pinned memory, offload to NVMe, or a machine or "
    "container with more",
    steps=(
        step("dmesg -T | grep -i -E 'killed process|out of memory'"),
        step("ulimit -v; free -g; cat /sys/fs/cgroup/memory.max"),
    ),
    manual="""A process was killed because the host's memory ran out.

Exit code -9 (137 in a container) is SIGKILL: nearly always from the kernel or the scheduler when memory is short.
CPU offload needs about 16 bytes of host memory for each parameter, and every rank that loads the whole checkpoint
needs it once more. `dmesg` names the process. For a compiler that is killed see compiler-oom-killed.

Why it matters: The killed rank prints nothing, and the other ranks report a broken connection or a timeout
instead.""",
    signatures=(
        Signature(
            words="dataloader+killed",
            pattern=r"DataLoader worker \(pid\(?s?\)? ?[\d, ]{1,40}\) is killed by signal: Killed",
            title="a DataLoader worker was killed: the host's memory ran out",
            fix="use less host memory in the DataLoader: fewer num_workers, a smaller prefetch_factor, data "
            "that is read in pieces "
            "instead of held by each worker; or a machine or container with more memory",
            sample="RuntimeError: DataLoader worker (pid 412) is killed by signal: Killed.",
        ),
        Signature(
            words="return+9 signal+9 exitcode+9 code+9 exit+137 exited+137 status+137 code+137 "
            "exit_code+137 exit_code+247 code+247 sigkill",
            pattern=r"exits with return code = -9\b|[Ss]ignal 9 \((?:SIGKILL|Killed)|exitcode\s*: "
            r"-9\b|[Ee]xit(?:ed with)?(?: "
            r"status| code|code)? ?[:=]? {0,8}(?:137|-9)\b|non-zero code: 137\b|died with <Signals\.SIGKILL"
            r"|[Ee]xit[_ ][Cc]ode[:= ]{1,3}(?:137|247)\b",
            tier=Tier.GENERIC,
            title=KILLED,
            unless=r"command '\S{0,160}(?:gcc|g\+\+|c\+\+|nvcc)|ninja|^dsdoctor: error: ",
            sample="[ERROR] [launch.py:434:sigkill_handler] ['/venv/bin/python', '-u', 'train.py'] exits with "
            "return code = -9",
        ),
        *KERNEL_KILLS,
        Signature(
            words="oom oom_kill oomkilled oom_reaper memory+limit cgroup+killed task+memory "
            "task+killed tasks+killed "
            "tasks+memory term_memlimit resource+memory memory+pressure due+memory+limit dataloader+killed",
            pattern=r"oom[-_]kill(?:er)? event|OOM ?Killed|\binvoked oom-killer\b|oom_reaper: "
            r"reaped|[Ee]xceeded "
            r"(?:job )?memory limit|may have been killed by the cgroup|srun: error: .{1,80}: Out Of Memory$"
            r"|node was low on resource: memory|killed due to memory pressure|DUE TO MEMORY LIMIT|is killed by "
            r"signal: Killed"
            r"|^TERM_MEMLIMIT|\btasks? [\d,-]{1,20}: Out Of Memory",
            unless=COMPILERS,
            sample="slurmstepd: error: Detected 1 oom_kill event in StepId=412.0. Some of the step tasks have "
            "been OOM Killed. oom-kill event",
        ),
        Signature(
            words="killed",
            pattern=r"^Killed$|^srun: error: \S{1,80}: tasks? [\d,-]{1,80}: Killed$"
            r"|\d Killed\s{1,40}(?:\w{1,40}=\S{0,160} ){0,8}(?P<program>\S{0,160}python[\d.]*|deepspeed"
            r"|torchrun|accelerate)\b",
            tier=Tier.GENERIC,
            title=KILLED,
            sample="run.sh: line 3: 12729 Killed                  python train.py",
        ),
        Signature(
            words="defaultcpuallocator",
            pattern=r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:.{0,80}allocate "
            r"(?P<bytes>\d+) bytes)?",
            not_after=r"self\.reduce_bucket_size",
            title="the host's memory was refused: torch asked the CPU for {bytes|more} bytes and did not get them (nothing was "
            "killed, the rank ended by its own error)",
            fix="see whether the host is full, or a limit of the process was met (ulimit -v); then "
            "use less host memory: fewer ranks or loader workers, load the model once (low_cpu_mem_usage, zero.Init), no "
            "pinned memory, offload to NVMe, or a machine or container with more. If so many bytes are not plausible, a "
            "shape or a size in the configuration is wrong",
            sample="RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate "
            "51539607552 bytes. Error code 12 (Cannot allocate memory)",
        ),
        Signature(
            words="memoryerror _arraymemoryerror errno+12 bad_alloc",
            pattern=r"^(?:numpy\S{0,160})?(?<!OutOf)MemoryError\b|OSError: \[Errno 12\] Cannot allocate "
            r"memory|std::bad_alloc",
            tier=Tier.GENERIC,
            title="the host's memory was refused: an allocation on the CPU failed (nothing was killed, the process ended by its "
            "own error)",
            sample="OSError: [Errno 12] Cannot allocate memory",
        ),
    ),
)

FP16_LOSS_SCALE_FLOOR = Rule(
    id="fp16-loss-scale-floor",
    stage=Stage.RUN,
    title="fp16 overflowed on every step until the loss scale reached its floor",
    fix="train in bf16 where the GPU has it, or find the module where the first inf arises",
    steps=(step("python -m dsdoctor.run SCRIPT.py"), step("python -m dsdoctor explain fp16-loss-scale-floor")),
    manual="""fp16 overflowed on every step until the loss scale could not be lowered any further.

Dynamic loss scaling halves the scale at every overflow. A few overflows at the start are normal; one on every
step means that the model itself produces inf or nan: a model trained in bf16, too high a learning rate, or a
broken batch.

Why it matters: Every step was skipped, so the model learns nothing, and DeepSpeed stops.""",
    signatures=(
        Signature(
            words="minimum+loss+scale",
            pattern=r"[Cc]urrent loss scale already at minimum|Minimum loss scale reached",
            sample="Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        ),
        Signature(
            words="reducing+loss+scale",
            pattern=r"Attempted loss scale: (?P<scale>[\d.e-]+), reducing to "
            r"(?:(?P=scale)|0(?:\.\d+)?|\d(?:\.\d+)?e-\d+)\s*$",
            tier=Tier.GENERIC,
            sample="[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1",
        ),
    ),
)

CPU_ISA_ILLEGAL_INSTRUCTION = Rule(
    id="cpu-isa-illegal-instruction",
    stage=Stage.RUN,
    title="illegal instruction: an op was built for a newer processor than this one",
    fix="build the CPU ops on a machine like the oldest one they run on",
    steps=(
        step("python -m dsdoctor prebuild"),
        step("mv ~/.cache/torch_extensions ~/.cache/torch_extensions.old"),
        step("python -m dsdoctor check --deep"),
    ),
    manual="""An op was compiled for a newer processor than the one it runs on.

DeepSpeed compiles its CPU ops with -march=native: they hold the instructions of the build machine (AVX512 and
more). A wheel for all nodes comes from `python -m dsdoctor record node.json` on a node of each kind, then `python
-m dsdoctor build-wheel --node node.json ...`. `python -m dsdoctor check --deep` compares a wheel with this
processor.

Why it matters: The process ends with SIGILL and no traceback, as soon as such an instruction is reached in a
wheel, an image or a shared cache.""",
    signatures=(
        Signature(
            words="illegal+instruction sigill return+4 exitcode+4 exit+132 instruction+ill ungültiger illégale "
            "ilegal 非法指令 不正な命令 недопустимая",
            pattern=r"Illegal instruction|SIGILL\b|exits with return code = -4\b|exitcode\s*: -4\b|exit (?:code"
            r"|status):? 132\b|Ungültiger Maschinenbefehl"
            r"|Instruction illégale|Instrucción ilegal|非法指令|不正な命令|Недопустимая инструкция",
            sample="Illegal instruction (core dumped)",
        ),
    ),
)

RULES = (
    DEEPSPEED_TOO_OLD_FOR_TORCH,
    HOST_RAM_OOM,
    FP16_LOSS_SCALE_FLOOR,
    CPU_ISA_ILLEGAL_INSTRUCTION,
)
