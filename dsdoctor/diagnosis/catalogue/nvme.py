"""Rules of offloading to NVMe: its folder, its swap buffers, the files that async_io writes."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

SWAPPING = (
    r"_configure_aio|_configure_tensor_swapping|_configure_swapping|swap_tensor[/\\]|nvme_swap_folder|self\.swap_folder"
)
"""Frames and lines in which DeepSpeed makes its swap folder."""

NVME_PATH_MISSING = Rule(
    id="nvme-path-missing",
    stage=Stage.RUN,
    title="offload to nvme is on, and nvme_path is not set",
    fix='set "nvme_path" to a folder on a local NVMe disk in each offload block whose device is nvme',
    manual="""offload_optimizer or offload_param has the device nvme, and no folder to write to.

Each of the two blocks needs an nvme_path of its own; the aio block stands on the top level of the configuration.

Why it matters: deepspeed.initialize stops, with a TypeError that does not name the key.""",
    signatures=(
        Signature(
            words="typeerror+pathlike",
            pattern=r"^TypeError: (?:expected str, bytes or os\.PathLike object, not NoneType|join\(\) argument "
            r"must be .{1,60}NoneType)",
            after=r"nvme_path|nvme_swap_folder|_configure_tensor_swapping|_configure_aio",
            sample="    nvme_swap_folder = os.path.join(offload_optimizer_config.nvme_path, 'zero_stage_3')\n"
            "TypeError: expected str, bytes or os.PathLike object, not NoneType",
        ),
        Signature(
            words="nvme_path+deepspeed offload_param+deepspeed",
            pattern=r"\"nvme_path\" in DeepSpeed Config cannot be None|\"offload_param\" must be defined in "
            r"DeepSpeed Config if remote "
            r"device is nvme",
            sample='AssertionError: "nvme_path" in DeepSpeed Config cannot be None if remote device is '
            "OffloadDeviceEnum.nvme",
        ),
    ),
)

NVME_PATH_UNUSABLE = Rule(
    id="nvme-path-unusable",
    stage=Stage.RUN,
    title="nvme_path cannot be used: {problem|the folder cannot be made or written}{path_hint}",
    fix="give nvme_path a folder on a local disk that every rank may write to, on every node",
    steps=(step("ls -ld {path|NVME_PATH}"), step("df -hT {path|NVME_PATH}")),
    manual="""DeepSpeed could not make or write its swap folder below nvme_path.

The disk is not mounted on this node, belongs to another user, is read-only, or the path is misspelt.

Why it matters: deepspeed.initialize stops on the nodes where it is so.""",
    signatures=(
        Signature(
            words="filenotfounderror permissionerror oserror notadirectoryerror fileexistserror",
            pattern=r"^(?:FileNotFound|Permission|OS|NotADirectory|FileExists)Error: \[Errno (?!28\b|122\b)\d{1,3}\] "
            r"(?P<problem>[\w -]{1,40}): '(?P<path>[^']{1,200})'",
            after=SWAPPING,
            sample="    os.makedirs(self.swap_folder, exist_ok=True)\n"
            "FileNotFoundError: [Errno 2] No such file or directory: '/proc/nvme0'",
        ),
        Signature(
            words="deepspeed_aio+failed",
            pattern=r"deepspeed_aio: {1,6}(?:open|fstat) for (?:read|write) {1,4}failed on (?P<path>\S{1,200}) "
            r"error = (?P<code>\d{1,4})",
            title="async_io cannot open its swap file {path} (error {code})",
            fix="error 22: the file system does not take direct writes (tmpfs, overlay, many network file "
            "systems), use ext4 or xfs on a "
            "local disk; 28: the disk is full; 2 and 13: the folder is missing or belongs to another user; 24: "
            "too many open files",
            sample="deepspeed_aio:   open for write  failed on "
            "/mnt/nvme/zero_stage_3/optimizer/rank0/0.tensor.swp error = 22",
        ),
    ),
)

NVME_SWAP_BUFFERS = Rule(
    id="nvme-swap-buffers",
    stage=Stage.RUN,
    title="the swap buffers for NVMe are too few or too small for this model",
    fix="raise buffer_count in offload_param (5 by default) and in offload_optimizer (4: one for each state and "
    "the gradient), and buffer_size in offload_param to at least the elements of the largest parameter's part "
    "(1e8 by default)",
    manual="""Parameters and states are read from the NVMe into a fixed number of buffers of a fixed size.

A block that needs many parameters at once, or prefetching (stage3_prefetch_bucket_size, max_live_parameters), needs more
buffers; a large embedding needs larger ones. All of them are pinned host memory.

Why it matters: The forward or the step stops.""",
    signatures=(
        Signature(
            words="swapping+buffers swap+buffer allocate+buffers elements+buffer swapper+buffers "
            "initializing+buffers num_elems+buffer",
            pattern=r"Error: (?:Not enough buffers \d{1,6} for swapping \d{1,6}|No (?:swap )?buffers? "
            r"(?:available )?to (?:allocate|swap) "
            r"|More elements \d{1,15} than buffer size|num_elems \d{1,15} ?> ?buffer \d{1,15}|numel of fp16 "
            r"buffers \d{1,15} is too small"
            r"|PipelinedOptimizerSwapper ran out of swap buffers)",
            sample="AssertionError: Not enough buffers 0 for swapping 1",
        ),
    ),
)

NVME_SWAPPED_TWICE = Rule(
    id="nvme-swapped-twice",
    stage=Stage.RUN,
    title="a parameter is read from the NVMe twice{param_hint}: the same layers run twice in a step (activation "
    "checkpointing)",
    fix="use DeepSpeed's activation checkpointing, or use_reentrant=False, or offload the parameters to the CPU "
    "instead of nvme",
    manual="""The swapper for parameters found one that it has in memory already.

Checkpointing of activations runs the layers once more in the backward pass. With offload_param on NVMe, Hugging Face's way
of doing so has not always gone together with the swapper.

Why it matters: The step stops, and training with it.""",
    signatures=(
        Signature(
            words="assigned+swap already+inflight flight+available",
            pattern=r"Error: (?:param (?P<param>\d{1,9}) (?:has already been assigned a swap buffer|already "
            r"assigned swap buffer id"
            r"|is already available or inflight)|Some params are already available or in flight)",
            sample="AssertionError: param 3 has already been assigned a swap buffer",
        ),
    ),
)

AIO_FAILED = Rule(
    id="aio-failed",
    stage=Stage.RUN,
    title="DeepSpeed's asynchronous I/O on the NVMe failed: its own check {what} does not hold",
    fix="see that nvme_path lies on a local disk with space, whose file system takes O_DIRECT (ext4, xfs; not overlay, tmpfs or "
    "a network's), and that the kernel grants requests (fs.aio-max-nr, in a container too); then try a smaller queue_depth "
    "and block_size in the block aio, or offload to the CPU",
    steps=(step("df -hT NVME_PATH"), step("sysctl fs.aio-nr fs.aio-max-nr"), step("ds_nvme_tune --nvme_dir NVME_PATH")),
    manual="""The op async_io checks what the kernel answers to its requests by assertions in C++, which end the process.

A request was not accepted, came back short or not at all: the file system does not take O_DIRECT, the disk is full or broken,
or the kernel has no room for more requests.

Why it matters: The process ends without a Python traceback, in the middle of a step.""",
    signatures=(
        Signature(
            words="assertion+n_completes assertion+submit_ret assertion+read_bytes assertion+reg_ret assertion+fd "
            "assertion+_remaining_bytes assertion+n_iocbs assertion+n_pending_iocbs assertion+_num_pending_ops assertion+_aio_ctxt "
            "assertion+file_offset assertion+result",
            pattern=r"deepspeed_(?:py_)?(?:aio|io|cpu_op)\w{0,20}\.cpp:\d{1,5}: .{0,400}Assertion"
            r" [`'](?P<what>[^`']{1,120})' failed",
            unless=r"nbytes\(\)",
            sample="python: /venv/deepspeed/ops/csrc/aio/common/deepspeed_aio_common.cpp:125: int _do_io_complete(long "
            "long int, long "
            "long int, std::unique_ptr<aio_context>&): Assertion `n_completes >= min_completes' failed.",
        ),
    ),
)

NVME_FILE_SHORT = Rule(
    id="nvme-file-short",
    stage=Stage.RUN,
    title="a swap file on the NVMe is not as long as its buffer{sizes_hint}: not everything was written",
    fix="see that the disk has space and the file system takes O_DIRECT (ext4, xfs; not tmpfs, overlay or many "
    "network file systems); set block_size in the aio block to a divisor of the buffer; remove old swap files",
    steps=(step("df -hT NVME_PATH"), step("ds_nvme_tune --nvme_dir NVME_PATH"), step("ls -l NVME_PATH")),
    manual="""async_io read back a file that is shorter than what it had written.

The disk was full, the file system does not take asynchronous direct writes, the block size does not fit, or the file is
left from an older run with other sizes.

Why it matters: The process ends in an assertion of C++ (SIGABRT), without a traceback.""",
    signatures=(
        Signature(
            words="nbytes+buffer",
            pattern=r"buffer nbytes != file bytes (?P<sizes>\d{1,18} != \d{1,18})|Assertion "
            r"`.{0,60}buffer\.nbytes\(\)\)? == num_file_bytes'",
            sample="/nvme/zero_stage_3/fp16params/rank24/0_param.tensor.swp: buffer nbytes != file bytes "
            "28824000 != 28311552",
        ),
    ),
)

RULES = (NVME_PATH_MISSING, NVME_PATH_UNUSABLE, NVME_SWAP_BUFFERS, NVME_SWAPPED_TWICE, AIO_FAILED, NVME_FILE_SHORT)
