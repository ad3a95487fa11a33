"""Rules of processes that break off: where Python stood at a segmentation fault, Ray's workers, threads, pickled engines."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

FRAME = r"^File \"\S{1,200}[/\\]"
CURRENT = r"Current thread 0x"

CRASHED_IN_NATIVE_CODE = Rule(
    id="crashed-in-native-code",
    stage=Stage.RUN,
    title="the process died in native code, and Python stood in {where}",
    fix="build or install that package again for this torch, CUDA and processor; see that no second copy of its "
    "library is on LD_LIBRARY_PATH",
    steps=(step("python -m dsdoctor check --deep"), step("python -m pip list")),
    manual="""Python's fault handler printed where each thread stood when a signal (SIGSEGV, SIGBUS, SIGABRT) ended the process.

The current thread's innermost frame names the call into native code. An op that was built for another torch,
processor or C++ library does this, a pointer to memory of the GPU where one of the host is expected, or a library
that is there twice.

Why it matters: The traceback names the package whose build has to be mended; the training script is right most often.""",
    signatures=(
        Signature(
            words="cpu_adam cpu_adagrad cpu_lion",
            pattern=FRAME + r"(?P<where>cpu_(?:adam|adagrad|lion))\.py\", line \d{1,6} in ",
            after=CURRENT,
            title="the process died by a segmentation fault in DeepSpeed's CPU optimizer ({where})",
            fix="clear the cache of built ops and build {where} again on this kind of processor, for this torch; use "
            "DeepSpeedCPUAdam only together with offload_optimizer (its parameters must be on the CPU), and "
            "leave the host enough memory",
            steps=(
                step("mv ~/.cache/torch_extensions ~/.cache/torch_extensions.old"),
                step("python -m dsdoctor check --deep"),
                step("free -g"),
            ),
            sample="Current thread 0x00007fb617fff640 (most recent call "
            'first):\n  File "/venv/deepspeed/ops/adam/cpu_adam.py", line 171 in step',
        ),
        Signature(
            words="libtcmalloc libjemalloc tcmalloc jemalloc",
            pattern=r"\[ ?\d{1,3}\] \S{0,200}lib(?P<where>tcmalloc|jemalloc)\w{0,30}\.so",
            after=r"Signal: (?:Segmentation fault|Aborted|Bus error)|Process received signal",
            title="the process died in {where}, an allocator that is preloaded into it",
            fix="start without it: unset LD_PRELOAD (Colab and some images set it to libtcmalloc), or install a newer "
            "gperftools or jemalloc",
            steps=(step("unset LD_PRELOAD"),),
            sample="[b8c4d204706d:21593] *** Process received signal ***\n"
            "[b8c4d204706d:21593] [ 2] /usr/lib/x86_64-linux-gnu/libtcmalloc.so.4(_ZN13TCMallocGuardD1Ev+0x34)"
            "[0x7f91822a2e44]",
        ),
        Signature(
            words="distributed_c10d",
            pattern=FRAME + r"distributed_c10d\.py\", line \d{1,6} in (?P<where>\w{1,40})",
            after=CURRENT,
            title="the process died in native code within a collective ({where}): NCCL or gloo",
            fix="see that torch's own NCCL is used (unset LD_LIBRARY_PATH, LD_PRELOAD; pip list shows one "
            "nvidia-nccl), try another NCCL release, and run with NCCL_DEBUG=INFO; a driver or fabric manager "
            "that does not fit does it, too",
            steps=(step("export NCCL_DEBUG=INFO"), step("python -m pip list"), step("python -m dsdoctor comm")),
            sample="Current thread 0x00007fb617fff640 (most recent call first):\n"
            '  File "/venv/torch/distributed/distributed_c10d.py", line 2501 in all_reduce',
        ),
        Signature(
            words="async_io aio swap_tensor",
            pattern=FRAME
            + r"(?:swap_tensor[/\\]\w{1,60}|\w{0,20}aio\w{0,20})\.py\", line \d{1,6} in (?P<where>\w{1,40})",
            after=CURRENT,
            title="the process died in native code while it read or wrote the NVMe ({where}): DeepSpeed's async_io",
            fix="clear the cache of built ops and build async_io again with this machine's libaio; see that "
            "nvme_path is a local disk with space and direct writes",
            steps=(step("mv ~/.cache/torch_extensions ~/.cache/torch_extensions.old"), step("df -hT NVME_PATH")),
            sample="Current thread 0x00007fb617fff640 (most recent call first):\n"
            '  File "/venv/deepspeed/runtime/swap_tensor/utils.py", line 26 in swap_out_tensors',
        ),
        Signature(
            words="flash_attn bitsandbytes xformers apex transformer_engine deep_ep causal_conv1d mamba_ssm pyarrow "
            "tokenizers sentencepiece",
            pattern=r"^File "
            r"\"\S{1,200}-packages[/\\](?P<where>flash_attn|bitsandbytes|xformers|apex|transformer_engine"
            r"|deep_ep|causal_conv1d|mamba_ssm|pyarrow|tokenizers|sentencepiece)[/\\]\S{1,120}\", line "
            r"\d{1,6} in ",
            after=CURRENT,
            title="the process died in native code of {where}",
            fix="install {where} again for this torch, CUDA and Python (pip --no-cache-dir), or try without it; "
            "DeepSpeed has not to be built anew",
            sample="Current thread 0x00007fb617fff640 (most recent call first):\n  File "
            '"/v/lib/python3.10/site-packages/flash_attn/flash_attn_interface.py", line 90 in '
            "_flash_attn_forward",
        ),
    ),
)

RAY_WORKER_DIED = Rule(
    id="ray-worker-died",
    stage=Stage.RUN,
    title="a worker process of Ray died without an exception: most often the host's memory ran out and the kernel "
    "killed it, else it crashed",
    fix="read that worker's own log under /tmp/ray/session_latest/logs (the .err file with the pid of the actor) and the "
    "kernel's log: a killed process means that host memory ran out (fewer workers, less offloading, a smaller object "
    "store, a smaller batch, less gpu_memory_utilization of vLLM); a segmentation fault means native code",
    steps=(
        step("dmesg -T | grep -i -E 'killed process|out of memory|segfault'"),
        step("grep -l -i -E 'error|signal|fault|killed' /tmp/ray/session_latest/logs/worker-*"),
        step("free -g"),
        step("df -h /dev/shm"),
    ),
    explained_by=("host-ram-oom", "gpu-oom", "nccl-shm-too-small", "crashed-in-native-code"),
    manual="""Ray lost the connection to a process of an actor, and only knows that it is gone.

It names three reasons: killed for memory (by the kernel or by Ray's own monitor), stopped by `ray stop --force`, or
crashed (SIGSEGV) in NCCL, vLLM or a compiled op. OpenRLHF, verl and others run each rank as such an actor. The
worker's own log and the kernel's log decide.

Why it matters: What the driver prints after it (ActorDiedError, RayTaskError) only follows.""",
    signatures=(
        Signature(
            words="worker+system_error worker+died+killed worker+died+unexpectedly actor+died actor+dead actordiederror",
            pattern=r"A worker died or was killed while executing a task by an unexpected system error|Worker exit "
            r"type: SYSTEM_ERROR|(?:ActorDiedError|RayActorError): The actor died (?:unexpectedly )?before finishing "
            r"this task|The actor is dead because its worker|WorkerCrashedError: The worker died unexpectedly",
            tier=Tier.GENERIC,
            sample="(raylet) A worker died or was killed while executing a task by an unexpected system error. To "
            "troubleshoot the problem, check the logs for the dead worker.",
        ),
        Signature(
            words="killed+node+memory task+killed+memory ray+outofmemoryerror",
            pattern=r"ray\.exceptions\.OutOfMemoryError: |Task was killed due to the node running low on memory",
            title="Ray killed a worker because the host's memory ran low",
            fix="use fewer workers on a node (or a node with more memory), less CPU offload, smaller data and a smaller "
            "object store; RAY_memory_usage_threshold moves the limit, and RAY_memory_monitor_refresh_ms=0 switches the "
            "monitor off (then the kernel kills instead)",
            steps=(step("free -g"), step("ray status")),
            sample="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        ),
    ),
)

TOO_MANY_PROCESSES = Rule(
    id="too-many-processes",
    stage=Stage.RUN,
    title="no more threads or processes can be started here: the limit of processes (ulimit -u, or the container's "
    "pids limit) is reached",
    fix="start fewer threads: export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 and fewer loader workers (num_proc, "
    "num_workers); or raise ulimit -u, for a container --pids-limit, for Slurm and systemd TasksMax",
    steps=(
        step("ulimit -u"),
        step("export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1"),
        step("cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids.current"),
    ),
    manual="""The kernel refused a new thread or process to this user or container.

Each rank starts threads for OpenMP, BLAS, NCCL and data loading, and each loader worker does so again: 8 ranks on a
machine with 128 cores can ask for thousands. Old Dockers also refuse with "Operation not permitted" (seccomp).

Why it matters: A rank, or one of its loader workers, ends.""",
    signatures=(
        Signature(
            words="start+thread pthread_create+failed blockingioerror fork+retry libgomp+thread",
            pattern=r"RuntimeError: can't start new thread|OpenBLAS blas_thread_init: pthread_create(?: "
            r"failed|:)|BlockingIOError: \[Errno 11\] Resource temporarily unavailable|fork: retry: "
            r"(?:Resource temporarily|No child processes)|libgomp: Thread creation failed",
            sample="OpenBLAS blas_thread_init: pthread_create failed for thread 50 of 64: Resource temporarily "
            "unavailable",
        ),
    ),
)

ENGINE_NOT_COPYABLE = Rule(
    id="engine-not-copyable",
    stage=Stage.RUN,
    title="an object that holds DeepSpeed's engine or a process group is copied or pickled, and {what|its process groups} "
    "cannot be",
    fix="save with engine.save_checkpoint(folder), or the model's state_dict (engine.module.state_dict()), not the "
    "object itself; keep model, trainer and engine out of its client_state and out of Lightning's hyperparameters; make "
    "a copy (deepcopy) for an EMA before deepspeed.initialize; give loader workers started by spawn none of them",
    manual="""copy.deepcopy, torch.save(model) and workers that are started by spawn pickle an object with all it refers to.

A DeepSpeed engine, its optimizer and its hooks hold process groups, CUDA streams and local functions, which cannot be
pickled.

Why it matters: Saving, an EMA or the first batch fails; the training itself is right.""",
    signatures=(
        Signature(
            words="pickle+processgroup pickle+stream pickle+deepspeedengine pickle+event pickle+process pickle+local "
            "get+local",
            pattern=r"(?:TypeError: (?:cannot|can't) pickle "
            r"'(?P<what>torch\._C\._distributed_c10d\.\w{1,40}|(?:torch\.(?:\w{1,20}\.)?)?(?:Stream|\w{0,20}Event))' "
            r"object|(?:AttributeError|PicklingError): Can't (?:pickle|get) local "
            r"object (?:'|<function )(?P<what2>\w{0,40}(?:DeepSpeed|Zero)[\w.<>]{1,120}))",
            sample="TypeError: cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object",
        ),
    ),
)

RULES = (CRASHED_IN_NATIVE_CODE, RAY_WORKER_DIED, TOO_MANY_PROCESSES, ENGINE_NOT_COPYABLE)
