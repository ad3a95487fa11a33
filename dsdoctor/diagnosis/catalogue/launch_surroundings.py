"""Rules of what a launch finds around it: variables of Slurm, an address of the master, NUMA rights, a device's number."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

NOT_UNDER_SLURM = Rule(
    id="not-under-slurm",
    stage=Stage.LAUNCH,
    title="the script takes its ranks from Slurm, and {variable} is not set: it was not started by srun",
    fix="start it with srun inside of a job; without Slurm switch the script to torchrun or deepspeed (Lightning: "
    "leave "
    "out SLURMEnvironment; mmengine: --launcher pytorch; accelerate and DeepSpeed need no variable of Slurm)",
    steps=(step("srun --ntasks-per-node 1 SCRIPT.sh"), instead("torchrun --nproc_per_node 1 SCRIPT.py")),
    manual="""Slurm gives each task that srun starts its own SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID.

A script that was started by hand, by sbatch without srun, or in a container that drops the variables does not have
them.

Why it matters: No rank knows its number, so nothing starts.""",
    signatures=(
        Signature(
            words="keyerror",
            pattern=r"^KeyError: b?['\"](?P<variable>SLURM_[A-Z_]{2,40})['\"]",
            sample="KeyError: 'SLURM_PROCID'",
        ),
    ),
)

MASTER_ADDRESS_EMPTY = Rule(
    id="master-address-empty",
    stage=Stage.LAUNCH,
    title="the launcher found no IP address of the first node, and passes an empty --master_addr on",
    fix="give --master_addr the address of the first node yourself: `hostname -I` gives none there (a container or "
    "pod, another Linux than Debian's)",
    steps=(step("hostname -I"), step("deepspeed --hostfile HOSTFILE --master_addr ADDRESS SCRIPT.py")),
    manual="""deepspeed asks the first host `hostname -I` over ssh and takes the first word as the master's address.

Where that prints nothing, --master_addr= is passed on empty; the launcher on the nodes then takes the next word for
its value and misses arguments.

Why it matters: No rank is started at all.""",
    signatures=(
        Signature(
            words="launch+following+arguments launch+argument+master_addr",
            pattern=r"launch(?:\.py)?: error: (?:the following arguments are required: training_script|argument "
            r"--master_addr: expected)",
            sample="usage: launch.py [-h] [--node_rank NODE_RANK]\nlaunch.py: error: the following arguments are "
            "required: training_script, training_script_args",
        ),
    ),
)

NUMA_RIGHT_MISSING = Rule(
    id="numa-right-missing",
    stage=Stage.LAUNCH,
    title="the container may not bind memory to NUMA nodes ({call}: Operation not permitted)",
    fix="start the container with --cap-add SYS_NICE (or --privileged); or drop numactl: deepspeed without "
    "--bind_cores_to_rank",
    steps=(
        step("docker run --cap-add SYS_NICE --gpus all --ipc=host IMAGE"),
        instead("deepspeed SCRIPT.py", note="without --bind_cores_to_rank"),
    ),
    manual="""numactl asks the kernel for memory of one NUMA node, and the container has no right to that (SYS_NICE).

Docker's default profile of seccomp refuses set_mempolicy and mbind.

Why it matters: numactl ends before it starts the rank.""",
    signatures=(
        Signature(
            words="membind+permitted",
            pattern=r"^setting (?P<call>membind|interleave mask|preferred node): Operation not permitted",
            sample="set_mempolicy: Operation not permitted\nsetting membind: Operation not permitted",
        ),
    ),
)

DEVICE_NUMBER_NEGATIVE = Rule(
    id="device-number-negative",
    stage=Stage.RUN,
    title="the rank's GPU number is -1: the script did not get its local rank",
    fix="start it with a launcher (deepspeed, torchrun, accelerate launch) and set args.local_rank from the variable "
    "LOCAL_RANK; the default of --local_rank (-1) is no GPU",
    steps=(step("torchrun --nproc_per_node 1 SCRIPT.py"), instead("export LOCAL_RANK=0")),
    manual="""torch.cuda.set_device was called with -1, the default of --local_rank in many scripts.

torchrun and newer launchers set the variable LOCAL_RANK and pass no --local_rank; Azure ML and others set neither.

Why it matters: The process has no GPU and ends.""",
    signatures=(
        Signature(
            words="device+index+negative",
            pattern=r"RuntimeError: Device index must not be negative",
            sample="RuntimeError: Device index must not be negative",
        ),
    ),
)

SLOTS_NOT_NUMBERS = Rule(
    id="slots-not-numbers",
    stage=Stage.LAUNCH,
    title="--include, --exclude or CUDA_VISIBLE_DEVICES does not list numbers of GPUs: {what|''} is none",
    fix="write --include=localhost:0,1 (numbers only, no blank and no comma at the end), and see that "
    "CUDA_VISIBLE_DEVICES is not empty and holds numbers, not UUIDs: deepspeed makes --include of it",
    steps=(step("echo $CUDA_VISIBLE_DEVICES"), step("unset CUDA_VISIBLE_DEVICES")),
    manual="""deepspeed reads --include and --exclude as HOST:NUMBER,NUMBER@HOST:NUMBER.

Without a hostfile it makes --include of CUDA_VISIBLE_DEVICES. An empty one, UUIDs of GPUs or of MIG parts are no
numbers.

Why it matters: No rank is started at all.""",
    signatures=(
        Signature(
            words="invalid+literal",
            pattern=r"^ValueError: invalid literal for int\(\) with base 10: ['\"](?P<what>[^'\"]{0,60})['\"]",
            after=r"parse_resource_filter|parse_inclusion_exclusion|SLOT_SEP",
            tier=Tier.GENERIC,
            sample='  File "/venv/lib/python3.9/site-packages/deepspeed/launcher/runner.py", line 258, in '
            "parse_resource_filter\nValueError: invalid literal for int() with base 10: ''",
        ),
    ),
)

TORCHRUN_WITHOUT_GPU = Rule(
    id="torchrun-without-gpu",
    stage=Stage.LAUNCH,
    title="torchrun was told to start one process per GPU (--nproc-per-node gpu), and torch sees no GPU here",
    fix="see why torch has no GPU (a build for CPUs, no driver in the container, an empty CUDA_VISIBLE_DEVICES), or give "
    "a number",
    steps=(step("nvidia-smi"), step("python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'")),
    manual="""torchrun --nproc-per-node gpu asks torch for the number of GPUs, and torch.cuda.is_available() is False.

Why it matters: No rank is started at all.""",
    signatures=(
        Signature(
            words="valueerror+cuda+available",
            pattern=r"^ValueError: Cuda is not available\.",
            sample="ValueError: Cuda is not available.",
        ),
    ),
)

RULES = (
    NOT_UNDER_SLURM,
    MASTER_ADDRESS_EMPTY,
    NUMA_RIGHT_MISSING,
    DEVICE_NUMBER_NEGATIVE,
    SLOTS_NOT_NUMBERS,
    TORCHRUN_WITHOUT_GPU,
)
