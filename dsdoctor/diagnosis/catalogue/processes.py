"""Rules of processes beside the ranks: workers that are forked or spawned, actors of Ray, loggers such as wandb."""

from dsdoctor.core.fix import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

START_METHOD_WRONG = Rule(
    id="process-start-method",
    stage=Stage.RUN,
    title="a process was started in a way that does not go together with what its parent has done already",
    fix="do not touch CUDA (no .cuda(), no torch.cuda calls) before the processes are forked; or set the start method "
    "to "
    "spawn: torch.multiprocessing.set_start_method('spawn', force=True), multiprocessing_context='spawn' in the "
    "DataLoader",
    manual="""Python starts worker processes by fork (a copy of the parent) or by spawn (a new Python that imports
the script).

A forked process cannot use CUDA if its parent has. A spawned one imports the main script, which needs `if __name__ ==
"__main__":`, and is sent its work by pickle, which refuses lambdas, local functions, open files and process groups.

Why it matters: The workers do not start, or end at once.""",
    signatures=(
        Signature(
            words="initialize+cuda+forked",
            pattern=r"Cannot re-initialize CUDA in forked subprocess",
            title="a forked process uses CUDA, which its parent has used before",
            sample="RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must "
            "use the 'spawn' start method",
        ),
        Signature(
            words="finished+bootstrapping",
            pattern=r"process has finished its bootstrapping phase",
            title="the main script starts processes when it is imported: on Windows and with spawn each of them "
            "imports it again",
            fix="put what the script does under if __name__ == '__main__': (a DataLoader's workers need it as well), "
            "or set "
            "num_workers to 0",
            sample="current process has finished its bootstrapping phase.",
        ),
        Signature(
            words="pickle+cannot pickle+can pickle+object picklingerror",
            pattern=r"(?:TypeError: (?:cannot|can't) pickle|AttributeError: Can't (?:pickle|get) local "
            r"object|PicklingError: Can't "
            r"pickle) (?P<what>.{1,120})",
            title="{what} cannot be pickled, so it can be neither sent to another process nor saved",
            fix="keep it out of what is sent or saved: of the data set, the collate function (no lambda, no local "
            "function), the "
            "arguments of a spawned process, the client_state of save_checkpoint and the hyperparameters of "
            "Lightning; a model "
            "that holds a process group cannot be copied by deepcopy",
            sample="TypeError: cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object",
        ),
    ),
)

RAY_WORKER_DIED = Rule(
    id="ray-worker-died",
    stage=Stage.RUN,
    title="a worker process of Ray died without a word of its own: most often the host's memory ran out, else it "
    "crashed",
    fix="read the worker's own log under /tmp/ray/session_latest/logs (the .err file with the pid of the actor), and "
    "the kernel's "
    "log for `Killed process`; give Ray less: fewer workers, a smaller batch, less gpu_memory_utilization of vLLM",
    steps=(
        step("grep -l -i -E 'error|killed|signal' /tmp/ray/session_latest/logs/*.err"),
        step("dmesg -T | grep -i -E 'killed process|out of memory'"),
        step("df -h /dev/shm"),
    ),
    manual="""Ray lost the connection to a process of its own (an actor), and says only what the reasons may be.

SIGKILL by the kernel or by Ray's own memory monitor, `ray stop`, or a crash (SIGSEGV) in NCCL, vLLM or a compiled op.
OpenRLHF, verl and others run each rank as such an actor.

Why it matters: What the driver prints only follows; the cause is in the worker's own log.""",
    signatures=(
        Signature(
            words="actor+died actor+dead worker+died",
            pattern=r"(?:ActorDiedError|RayActorError): The actor died (?:unexpectedly )?before finishing this "
            r"task|The actor is "
            r"dead because its worker process has died|WorkerCrashedError: The worker died unexpectedly",
            tier=Tier.GENERIC,
            sample="ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        ),
        Signature(
            words="task+killed+memory ray+outofmemoryerror",
            pattern=r"ray\.exceptions\.OutOfMemoryError: |Task was killed due to the node running low on memory",
            title="Ray's memory monitor killed a worker: the host's memory ran low",
            fix="use less host memory (fewer workers, no CPU offload, smaller data), or a node with more; "
            "RAY_memory_usage_threshold moves the limit",
            sample="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        ),
    ),
)

LOGGER_REFUSED = Rule(
    id="logger-refused",
    stage=Stage.RUN,
    title="{name|the experiment logger} cannot be used: it is not logged in, or its service cannot be reached",
    fix="log in on the machine where the ranks run (WANDB_API_KEY), or switch it off: report_to none, "
    "WANDB_MODE=offline",
    steps=(step("export WANDB_MODE=offline"), instead("wandb login")),
    manual="""The script reports to a service such as Weights & Biases, and that failed.

transformers reports to every such package that is installed, unless report_to says otherwise. Ranks that a launcher
started have no terminal to ask for a key.

Why it matters: One rank ends for the sake of a plot, and the others wait for it.""",
    signatures=(
        Signature(
            words="wandb+usageerror wandb+commerror wandb+authenticationerror wandb+api_key wandb+errors",
            pattern=r"^(?P<name>wandb)\.(?:errors\.)?(?:[\w.]{1,40}\.)?(?:UsageError|CommError|AuthenticationError|Err"
            r"or): |"
            r"(?P<name2>wandb): ERROR (?:api_key not configured|Error while calling W&B API)",
            sample="wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
        ),
        Signature(
            words="api+key+characters api+wandb+error",
            pattern=r"ValueError: API key must (?:be|have) (?:at least )?40\+? characters|(?:HTTPError|ConnectionError"
            r"|Con"
            r"nectTimeout|SSLError): .{0,160}api\.wandb\.ai",
            title="wandb does not take the key that it was given, or its service (api.wandb.ai) cannot be reached",
            sample="ValueError: API key must be 40 characters long, yours was 2",
        ),
        Signature(
            words="requires+installed+tensorboardcallback requires+installed+wandbcallback requires+callback "
            "requires+tensorboard",
            pattern=r"RuntimeError: (?P<name>(?:TensorBoard|Wandb|CometML?|MLflow|ClearML|SwanLab|Neptune|DVCLive|Azur"
            r"eML"
            r"|CodeCarbon|Trackio)\w{0,20}?)(?:Callback)? requires .{1,80} to be installed",
            title="report_to names {name}, and its package is not installed",
            fix="install it (tensorboard, wandb, ...), or give --report_to none",
            steps=(step("python -m pip install tensorboard"),),
            sample="RuntimeError: TensorBoardCallback requires tensorboard to be installed. Either update your "
            "PyTorch version "
            "to 1.9 or install tensorboardX.",
        ),
    ),
)

USER_WITHOUT_NAME = Rule(
    id="user-without-name",
    stage=Stage.RUN,
    title="this user has a number and no name here (uid {uid|of the container} is not in /etc/passwd)",
    fix="give it a name: a line in the container's /etc/passwd, or the variables USER and LOGNAME; torch asks for it "
    "for the name of "
    "a cache folder, which TORCHINDUCTOR_CACHE_DIR sets as well",
    steps=(step("export USER=user LOGNAME=user HOME=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor"),),
    manual="""The process runs under a user's number that the container does not know, as Kubernetes and OpenShift do.

Python's getpass.getuser() and pwd then fail, and torch and Triton call them.

Why it matters: Importing or compiling stops, although nothing is wrong with it.""",
    signatures=(
        Signature(
            words="getpwuid username+environment",
            pattern=r"KeyError: 'getpwuid\(\): uid not found: (?P<uid>\d{1,12})'|OSError: No username set in the "
            r"environment",
            sample="KeyError: 'getpwuid(): uid not found: 1000950000'",
        ),
    ),
)

RULES = (START_METHOD_WRONG, RAY_WORKER_DIED, LOGGER_REFUSED, USER_WITHOUT_NAME)
