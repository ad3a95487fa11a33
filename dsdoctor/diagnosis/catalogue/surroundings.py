"""Rules of what surrounds a run: the script and its arguments, folders, data workers, the job's time limit and preemption."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

LAUNCH_LOCAL_RANK_ARGUMENT = Rule(
    id="launch-local-rank-argument",
    stage=Stage.LAUNCH,
    title="the launcher passes {argument}, and the script's argument parser does not know it",
    fix="add it to the parser: parser.add_argument('--local_rank', '--local-rank', type=int, default=-1), or "
    "deepspeed.add_config_arguments; or start with torchrun or `deepspeed --no_local_rank`, which pass none",
    steps=(step("torchrun --nproc_per_node 2 SCRIPT.py"), instead("deepspeed --no_local_rank SCRIPT.py")),
    manual="""The launcher hands each rank its local rank as an argument, and the script refuses it.

deepspeed passes --local_rank=N; torch.distributed.launch of torch 2 passes --local-rank=N, with a hyphen. torchrun
passes none and sets LOCAL_RANK only. A script can read os.environ["LOCAL_RANK"] with all of them.

Why it matters: Every rank ends with status 2 before it begins.""",
    signatures=(
        Signature(
            words="unrecognized+local_rank unrecognized+local",
            pattern=r"error: unrecognized arguments: .{0,200}?(?P<argument>--local[-_]rank)\b",
            sample="train.py: error: unrecognized arguments: --local_rank=0",
        ),
        Signature(
            words="hfargumentparser+local hfargumentparser+local_rank",
            pattern=r"Some specified arguments are not used by the HfArgumentParser: "
            r".{0,200}?(?P<argument>--local[-_]rank)\b",
            sample="ValueError: Some specified arguments are not used by the HfArgumentParser: ['--local-rank=0']",
        ),
    ),
)

LAUNCH_SCRIPT_MISSING = Rule(
    id="launch-script-missing",
    stage=Stage.LAUNCH,
    title="the training script {script} is not there",
    fix="give its path from the folder in which the ranks start, or an absolute one; on several nodes it must be "
    "on each of them",
    steps=(step("ls -l {script}"),),
    manual="""Python was told to run a file that does not exist in that folder.

Why it matters: Every rank ends with status 2 before it begins.""",
    signatures=(
        Signature(
            words="directory+open+file",
            pattern=r"can't open file '(?P<script>[^']{1,200})': \[Errno 2\] No such file or directory",
            sample="/opt/conda/bin/python: can't open file '/workspace/pretrain.py': [Errno 2] No such file or "
            "directory",
        ),
    ),
)

FOLDER_READ_ONLY = Rule(
    id="folder-read-only",
    stage=Stage.RUN,
    title="{path|a folder} is on a read-only file system",
    fix="write to another folder: a volume that is mounted writable, or the node's own disk",
    steps=(step("findmnt -T {path|.}"),),
    manual="""A file was to be written where nothing can be written.

A volume that was mounted read-only, a container's root, or a disk that the kernel made read-only after an error
(dmesg).

Why it matters: The checkpoint is not saved; the rank ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="errno+30",
            pattern=r"^OSError: \[Errno 30\] Read-only file system(?:: '(?P<path>[^']{1,200})')?",
            sample="OSError: [Errno 30] Read-only file system: 'fixed/ckpt'",
        ),
    ),
)

TOO_MANY_OPEN_FILES = Rule(
    id="nofile-low",
    stage=Stage.RUN,
    title="this process may open no more files",
    fix="raise the limit before the start, or share tensors of the data loaders by name: "
    "torch.multiprocessing.set_sharing_strategy('file_system')",
    steps=(step("ulimit -n 65536"), step("ulimit -Hn")),
    manual="""The limit of open files is reached.

Data loaders pass each tensor by a file descriptor, NCCL and gloo open sockets for each peer, async_io files.

Why it matters: A worker or a rank ends in the middle of the training.""",
    signatures=(
        Signature(
            words="errno+24 received+ancdata files+open",
            pattern=r"^(?:OS|Runtime)Error: (?:\[Errno 24\] Too many open files|received 0 items of ancdata|Too "
            r"many open files)",
            sample="OSError: [Errno 24] Too many open files",
        ),
        Signature(
            words="shared+files",
            pattern=r"shared memory (?:object|segment).{0,80}Too many open files",
            title="this process may open no more files: each tensor that a data loader passes on takes one",
            sample="RuntimeError: unable to open shared memory object </torch_412_3> in read-write mode: Too many open "
            "files (24)",
        ),
    ),
)

DATA_WORKER_FAILED = Rule(
    id="data-worker-failed",
    stage=Stage.RUN,
    title="the data set raised {error} in a DataLoader worker: {words}",
    fix="look at the data set's own frame in the first traceback; num_workers=0 runs it in the rank itself, with "
    "a debugger",
    manual="""A worker process of a DataLoader ended with an exception of the data set or of the collate function.

torch passes it on: the traceback of the worker stands inside of the rank's own.

Why it matters: The rank ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="keyerror valueerror indexerror typeerror runtimeerror attributeerror oserror "
            "filenotfounderror assertionerror "
            "unicodedecodeerror zerodivisionerror importerror modulenotfounderror",
            pattern=r"^(?P<error>(?:Key|Value|Index|Type|Runtime|Attribute|OS|FileNotFound|Assertion"
            r"|UnicodeDecode|ZeroDivision|Import"
            r"|ModuleNotFound)Error): (?P<words>(?!Caught )(?!.{0,200}(?:gloo|NCCL|CUDA)).{1,160})",
            after=r"Error: Caught \w{1,40} in DataLoader worker process",
            sample="KeyError: Caught KeyError in DataLoader worker process 0.\nKeyError: 'labels'",
        ),
        Signature(
            words="dataloader+caught",
            pattern=r"^(?:[\w.]{1,80}\.)?\w{1,60}: Caught (?P<error>\w{1,60}) in DataLoader\b",
            tier=Tier.GENERIC,
            title="the data set raised {error} in a DataLoader worker",
            sample="PIL.UnidentifiedImageError: Caught UnidentifiedImageError in DataLoader worker process 2.",
        ),
    ),
)

DATA_WORKER_GONE = Rule(
    id="data-worker-gone",
    stage=Stage.RUN,
    title="a worker of the DataLoader ended without a word (exited unexpectedly): most often the host's memory or "
    "/dev/shm ran out, else native "
    "code in the data set crashed",
    fix="look into the kernel's log; use fewer workers (num_workers), or none to see the data set's own error; give a "
    "container more shared memory "
    "(--shm-size)",
    steps=(
        step("dmesg -T | grep -i -E 'killed process|out of memory|segfault'"),
        step("df -h /dev/shm"),
        step("free -g"),
    ),
    explained_by=("host-ram-oom", "nccl-shm-too-small", "data-worker-failed"),
    manual="""A process of the DataLoader is gone, and torch does not know why.

A worker that raises an exception passes it on; one that is killed, or crashes in native code (a decoder, a
tokenizer), cannot.

Why it matters: The rank ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="dataloader+exited dataloader+killed+segmentation dataloader+killed+aborted",
            pattern=r"DataLoader worker \(pid\(?s?\)? ?[\d, ]{1,80}\) (?:exited unexpectedly(?: with exit code "
            r"(?P<code>\d{1,3}))?|is killed by "
            r"signal: (?:Segmentation fault|Aborted|Terminated))",
            tier=Tier.GENERIC,
            sample="RuntimeError: DataLoader worker (pid(s) 25) exited unexpectedly",
        ),
    ),
)

JOB_TIME_LIMIT = Rule(
    id="job-time-limit",
    stage=Stage.RUN,
    title="the job was ended by the scheduler: its time limit was reached",
    fix="ask for more time, or save in time and resume: `#SBATCH --signal=B:USR1@300` sends a signal 5 minutes "
    "before the end",
    steps=(step("sacct -j $SLURM_JOB_ID --format=JobID,State,Elapsed,Timelimit"),),
    manual="""The scheduler ended all ranks because the job's time was over.

Nothing in the run itself failed. What the ranks print after it (signals, broken connections) only follows.

Why it matters: Everything since the last checkpoint is lost.""",
    signatures=(
        Signature(
            words="limit+due+time timelimit+due walltime+exceeded term_runlimit",
            pattern=r"CANCELLED AT \S{1,40} DUE TO TIME ?LIMIT|due to time limit|walltime \d{1,12} exceeded "
            r"limit|^TERM_RUNLIMIT",
            not_after=r"as PyTorch extensions root|Detected CUDA files, patching ldflags",
            sample="slurmstepd: error: *** JOB 4711 ON node1 CANCELLED AT 2025-03-01T12:00:00 DUE TO TIME LIMIT ***",
        ),
        Signature(
            words="deadlineexceeded deadline+longer",
            pattern=r"reason: DeadlineExceeded|Job was active longer than specified deadline",
            title="the job was ended by Kubernetes: activeDeadlineSeconds was reached",
            fix="raise activeDeadlineSeconds, or save in time and resume",
            steps=(step("kubectl describe job NAME"),),
            sample="Warning  DeadlineExceeded  job-controller  Job was active longer than specified deadline",
        ),
    ),
)

JOB_PREEMPTED = Rule(
    id="job-preempted",
    stage=Stage.RUN,
    title="the scheduler took the node away (preemption, or a cancelled job): nothing in the run itself failed",
    fix="let the job be queued again (`#SBATCH --requeue`) and resume from the last checkpoint; save when the "
    "signal comes",
    steps=(step("sacct -j $SLURM_JOB_ID --format=JobID,State,ExitCode"), instead("kubectl describe pod NAME")),
    manual="""The job was ended from outside, for another job, for maintenance, or by somebody.

What the ranks print after it (signals, broken connections) only follows.

Why it matters: Everything since the last checkpoint is lost.""",
    explained_by=("pod-evicted", "host-ram-oom"),
    signatures=(
        Signature(
            words="node+failure",
            pattern=r"CANCELLED AT \S{1,40} DUE TO NODE FAILURE|srun: error: Node failure on (?P<node>\S{1,80})",
            title="a node of the job failed (Slurm: NODE FAILURE): its hardware, its system, or its link to the controller",
            fix="start the job again without that node (`#SBATCH --requeue`, `--exclude`), and have it looked at",
            steps=(step("scontrol show node NODE"), step("sacct -j $SLURM_JOB_ID --format=JobID,State,NodeList")),
            sample="slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2025-02-02T04:02:11 DUE TO NODE FAILURE ***",
        ),
        Signature(
            words="preemption+due due+node",
            pattern=r"CANCELLED AT \S{1,40} DUE TO (?:PREEMPTION|JOB REQUEUE|SIGNAL Terminated)",
            sample="slurmstepd: error: *** JOB 4711 ON node1 CANCELLED AT 2025-03-01T12:00:00 DUE TO PREEMPTION ***",
        ),
        Signature(
            words="cancelled",
            pattern=r"^(?:slurmstepd|srun): error: \*{3} (?:JOB|STEP) \S{1,40} ON \S{1,120} CANCELLED AT "
            r"\S{1,40}(?: \*{3})?$",
            not_after=r"srun: Terminating (?:StepId|job step)",
            tier=Tier.GENERIC,
            title="the job or the step was cancelled: by its user, by the scheduler, or by srun after another "
            "task failed",
            sample="slurmstepd: error: *** STEP 4711.0 ON node1 CANCELLED AT 2025-03-01T12:00:00 ***",
        ),
        Signature(
            words="preempted rejected nodeshutdown shutdown+node",
            pattern=r"\b[Rr]eason: {1,20}(?:Preempted|NodeShutdown)\b|Pod was (?:preempted|rejected: "
            r"(?!The node had condition))|Preempted by \S{1,80} on node|Pod was terminated in response to imminent node shutdown",
            sample="Warning  Preempted  default-scheduler  Preempted by team-b/train-7 on node gpu-4",
        ),
    ),
)

DEEPSPEED_NOT_INITIALIZED = Rule(
    id="deepspeed-not-initialized",
    stage=Stage.RUN,
    title="DeepSpeed's communication is used before it was initialized",
    fix="call deepspeed.init_distributed() (or deepspeed.initialize) before it, in a script that a launcher started",
    steps=(step("deepspeed --num_gpus 1 SCRIPT.py"),),
    manual="""A part of DeepSpeed asked for its rank, and no process group of DeepSpeed exists.

deepspeed.initialize makes it, and deepspeed.init_distributed does so earlier. torch.distributed alone is not enough.

Why it matters: The call fails in every process that makes it.""",
    signatures=(
        Signature(
            words="deepspeed+backend+set",
            pattern=r"AssertionError: DeepSpeed backend not set, please initialize it using init_process_group\(\)",
            tier=Tier.GENERIC,
            sample="AssertionError: DeepSpeed backend not set, please initialize it using init_process_group()",
        ),
        Signature(
            words="dist+initialized+assertionerror backend+initialized+dist_init_required scattered+initializing",
            pattern=r"^AssertionError: (?:dist is not initialized$|Distributed backend is not initialized\. Please set "
            r"dist_init_required|Parameters cannot be scattered without initializing deepspeed\.comm)",
            tier=Tier.GENERIC,
            sample="AssertionError: Distributed backend is not initialized. Please set dist_init_required to True or "
            "initialize before calling deepspeed.initialize()",
        ),
        Signature(
            words="group+initialized+parallel",
            pattern=r"^AssertionError: (?P<group>(?:intra_layer_model|model|data|expert|expert data|tensor) parallel) "
            r"group is not initialized$",
            after=r"deepspeed[/\\]utils[/\\]groups\.py",
            tier=Tier.GENERIC,
            title="the process group for {group} work is asked for before it was made",
            fix="call deepspeed.initialize first: it makes the groups of experts and of tensor parallelism; with a "
            "Megatron-like mpu make that one's groups before",
            sample='  File "/venv/deepspeed/utils/groups.py", line 687, in _get_expert_parallel_group\n'
            "AssertionError: expert parallel group is not initialized",
        ),
    ),
)

RULES = (
    DEEPSPEED_NOT_INITIALIZED,
    LAUNCH_LOCAL_RANK_ARGUMENT,
    LAUNCH_SCRIPT_MISSING,
    FOLDER_READ_ONLY,
    TOO_MANY_OPEN_FILES,
    DATA_WORKER_FAILED,
    DATA_WORKER_GONE,
    JOB_TIME_LIMIT,
    JOB_PREEMPTED,
)
