"""Rules of memory: the GPU's, what NCCL and cuBLAS ask of it, and pinned host memory."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

FULL = r"(?:^|[\s.])(?:torch\.(?:cuda\.)?OutOfMemoryError|OutOfMemoryError|RuntimeError): (?:CUDA|HIP|XPU|NPU) out of memory\."
"""How torch's allocator begins."""

WANTED = r" Tried to allocate (?P<wanted>[\d.]{1,12} [KMG]iB)"
ANY_FULL = FULL + rf"(?:{WANTED})?"

SAVING = r"_save_checkpoint|save_16bit_model|_zero3_consolidated_16bit_state_dict|save_checkpoint|get_state_dict|deepspeed_save"
GATHERING = r"_allgather_params|_all_gather_dtype|all_gather_coalesced|fetch_sub_module|_gather_params|in all_gather\b"
UPDATING = (
    r"zero[/\\]stage\w{1,20}\.py.{1,10}line \d{1,6}, in (?:step|_optimizer_step|initialize_optimizer_states"
    r"|unscale_and_clip_grads|_create_fp32_partitions|_create_fp16_partitions\w{0,60}|__init__)"
)
PLACING = r"_configure_distributed_model|in _to_device|module\.py.{1,10}line \d{1,6}, in _apply"
IN_BACKWARD = r"torch[/\\]autograd[/\\]__init__\.py|in backward\b"

TO_VLLM = (
    r"in _?(?:move|sync|broadcast|update)_\w{0,30}(?:to_vllm|vllm|rollout|weights)\b|vllm[/\\](?:device_allocator|worker|v1)"
    r"|rollout_mixin"
)
"""Places in which weights go from the training to vLLM."""

BUCKET = r"self\.reduce_bucket_size"

GPU_OOM = Rule(
    id="gpu-oom",
    stage=Stage.RUN,
    title="the GPU's memory is full{wanted_hint}",
    fix="halve train_micro_batch_size_per_gpu and double gradient_accumulation_steps, and turn on activation "
    "checkpointing; then a higher ZeRO stage, then offload_optimizer and offload_param; see first that nothing "
    "else is on the GPU",
    steps=(
        step("nvidia-smi"),
        step("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", note="against fragmentation"),
    ),
    manual="""The GPU has no memory left for what torch asked of it.

Weights, gradients and optimizer states need about 16 to 18 bytes for each parameter with Adam in mixed precision;
ZeRO 1, 2 and 3 divide more and more of them by the number of ranks. The rest are activations, which grow with micro
batch and sequence length. The message tells fragmentation: much "reserved but unallocated" memory, more than what was
asked for. What helps first depends on where it happened.

Why it matters: The rank ends; the others report a broken connection or a timeout.""",
    signatures=(
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=FULL
            + r" Tried to allocate (?:(?P<wanted>[\d.]{1,12} [KM]iB)\..{0,700}? and (?P<loose>[\d.]{1,12} GiB)"
            r"|(?P<wanted2>\d\.\d{1,4} GiB)\..{0,700}? and (?P<loose2>\d\d[\d.]{0,9} GiB)) is reserved by PyTorch but unallocated",
            title="the GPU's memory is fragmented: {wanted} were not to be had in one piece, while {loose} are "
            "reserved and unused",
            fix="let the allocator use segments that can grow; less variation in sequence lengths helps too. If "
            "it stays, the micro batch is too large",
            steps=(
                step("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", note="torch 2.9: PYTORCH_ALLOC_CONF"),
            ),
            sample="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total "
            "capacity of 79.15 GiB of which 111.25 MiB is free. Including non-PyTorch memory, this process has "
            "79.03 GiB memory in use. Of the allocated memory 66.10 GiB is allocated by PyTorch, and 11.40 GiB "
            "is reserved by PyTorch but unallocated.",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=FULL
            + r" Tried to allocate (?P<wanted>[\d.]{1,12} [KMG]iB)\..{0,200}? Process \d{1,9} has (?P<other>\d\d"
            r"[\d.]{0,9} GiB) memory in use\..{0,300}?this process has (?P<own>\d\.\d{1,4} GiB|[\d.]{1,12} "
            r"[KM]iB) memory in use",
            title="the GPU's memory is full, and another process holds {other} of it (this one only {own})",
            fix="end the other process; if it is a rank of the same job, give each rank its own GPU: "
            "torch.cuda.set_device(LOCAL_RANK) before anything touches the GPU",
            steps=(step("nvidia-smi"),),
            sample="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
            "capacity of 79.15 GiB of which 1.25 GiB is free. Process 4711 has 70.10 GiB memory in use. "
            "Including non-PyTorch memory, this process has 7.60 GiB memory in use.",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=ANY_FULL,
            after=SAVING,
            title="the GPU's memory is full while the model is saved{wanted_hint}: under ZeRO-3 saving gathers "
            "the whole weights",
            fix="save without gathering (stage3_gather_16bit_weights_on_model_save: false) and convert with "
            "zero_to_fp32.py later; or leave more room: a smaller micro batch, offload_param",
            steps=(step("python zero_to_fp32.py CHECKPOINT OUTPUT"),),
            sample='  File "/venv/transformers/trainer.py", line 3000, in _save_checkpoint\n'
            "RuntimeError: CUDA out of memory. Tried to allocate 1.20 GiB (GPU 0; 15.78 GiB total capacity)",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=ANY_FULL,
            after=TO_VLLM,
            title="the GPU's memory is full where the training's weights go to vLLM, which shares the GPU{wanted_hint}",
            fix="leave vLLM less (vllm_gpu_memory_utilization) and let it sleep while the training works "
            "(vllm_enable_sleep_mode, sleep_level); under ZeRO-3 gather the weights in parts, not the whole model at once "
            "(ms-swift: move_model_batches; older and newer releases differ), or give vLLM GPUs of its own",
            steps=(step("nvidia-smi"),),
            sample='  File "/venv/swift/trainers/rlhf_trainer/rollout_mixin.py", line 561, in _move_model_to_vllm\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.45 GiB. GPU 1 has a total capacity of 79.11 GiB",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=ANY_FULL,
            after=GATHERING,
            title="the GPU's memory is full where ZeRO-3 gathers a module's parameters{wanted_hint}",
            fix="lower stage3_max_live_parameters, stage3_prefetch_bucket_size and stage3_max_reuse_distance; "
            "then a smaller micro batch, activation checkpointing, offload_param",
            steps=(step("nvidia-smi"),),
            sample='  File "/venv/deepspeed/runtime/zero/partition_parameters.py", line 1300, in _allgather_params\n'
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 31.75 GiB "
            "total capacity)",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=ANY_FULL,
            after=UPDATING,
            not_after=BUCKET,
            title="the GPU's memory is full where the optimizer's states or ZeRO's buffers are made{wanted_hint}",
            fix="take a higher ZeRO stage or more ranks, or offload_optimizer to the CPU; smaller "
            "reduce_bucket_size and allgather_bucket_size; a smaller batch does not help here",
            steps=(step("nvidia-smi"),),
            sample='  File "/venv/deepspeed/runtime/zero/stage_1_and_2.py", line 700, in initialize_optimizer_states\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 GiB. GPU 0 has a total "
            "capacity of 79.15 GiB",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=ANY_FULL,
            after=PLACING,
            not_after=IN_BACKWARD,
            title="the GPU's memory is full while the whole model is moved to it{wanted_hint}",
            fix="use ZeRO-3 and make the model under deepspeed.zero.Init (Hugging Face: make the "
            "TrainingArguments before the model), so that no rank holds all of it",
            steps=(step("nvidia-smi"),),
            sample='  File "/venv/deepspeed/runtime/engine.py", line 1100, in _configure_distributed_model\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
            "capacity of 23.60 GiB",
        ),
        Signature(
            words="tried+memory outofmemoryerror",
            pattern=ANY_FULL,
            not_after=BUCKET,
            sample="torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 "
            "GiB total capacity; 21.56 GiB already allocated; 1.40 GiB free; 21.70 GiB reserved in total by "
            "PyTorch)",
        ),
        Signature(
            words="nvml_success",
            pattern=r"RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at .{1,120}CUDACachingAllocator",
            title="the GPU's memory is full, and torch's allocator could not even ask for the figures (NVML)",
            sample="RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
            '"../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug to PyTorch.',
        ),
        Signature(
            words="error+memory",
            pattern=r"Error: (?:CUDA|HIP) error: out of memory",
            not_after=r"pin_memory|cudaHostAlloc|pinned",
            unless="cudaHostAlloc",
            tier=Tier.GENERIC,
            title="the GPU has no memory left outside of torch's own allocator: another process holds it, or "
            "ranks share a GPU",
            fix="see who is on the GPU, and that each rank uses its own: torch.cuda.set_device(LOCAL_RANK) comes first",
            steps=(step("nvidia-smi"),),
            sample="RuntimeError: CUDA error: out of memory",
        ),
    ),
)

PINNED_MEMORY_FAILED = Rule(
    id="pinned-memory-failed",
    stage=Stage.RUN,
    title="pinned host memory could not be had: the host has too little, or its locked memory is limited",
    fix='set "pin_memory": false in offload_optimizer and offload_param, or allow more: ulimit -l unlimited '
    "(docker: --ulimit "
    "memlock=-1), more host memory, fewer ranks a node",
    steps=(step("ulimit -l"), step("free -g")),
    manual="""Memory of the host that the GPU can read directly could not be allocated.

Offloading with pin_memory pins the whole optimizer state or the parameters. Pinned memory cannot be swapped; WSL2,
containers and `ulimit -l` limit it. CUDA reports the failure as its own "out of memory".

Why it matters: It looks as if the GPU were full, and it is not.""",
    signatures=(
        Signature(
            words="error+memory resource+allocated invalid+error",
            pattern=r"Error: (?:CUDA|HIP) error: (?:out of memory|OS call failed|resource already "
            r"mapped|invalid argument)",
            after=r"pin_memory|cudaHostAlloc|pinned",
            sample='  File "/venv/deepspeed/accelerator/cuda_accelerator.py", line 303, in pin_memory\n'
            "RuntimeError: CUDA error: out of memory",
        ),
        Signature(
            words="cudahostalloc cudahostregister",
            pattern=r"\bcudaHost(?:Alloc|Register)\b.{0,80}(?:fail|out of memory|error)",
            sample="RuntimeError: cudaHostAlloc failed: out of memory",
        ),
        Signature(
            words="pin_memory+ds_pin_memory_backend ds_pin_memory_backend",
            pattern=r"DS_PIN_MEMORY_BACKEND=native requires the pin_memory op",
            title="DS_PIN_MEMORY_BACKEND=native needs the op pin_memory, which could not be built or loaded",
            fix="unset DS_PIN_MEMORY_BACKEND, or build the op",
            steps=(step("unset DS_PIN_MEMORY_BACKEND"),),
            sample="RuntimeError: DS_PIN_MEMORY_BACKEND=native requires the pin_memory op, which failed to build/load.",
        ),
    ),
)

NCCL_OUT_OF_MEMORY = Rule(
    id="nccl-out-of-memory",
    stage=Stage.RUN,
    title="NCCL got no GPU memory for its buffers: the GPU is full",
    fix="leave NCCL room: it needs some hundred MB to a few GB outside of torch's own. A smaller micro batch; "
    "torch.cuda.set_per_process_memory_fraction(0.95); a smaller NCCL_BUFFSIZE and fewer channels",
    steps=(step("nvidia-smi"), step("export NCCL_BUFFSIZE=2097152 NCCL_MAX_NCHANNELS=8")),
    manual="""NCCL allocates its buffers on the GPU itself, outside of torch's allocator, at the first use of each group.

torch may have reserved everything by then. The message is about CUDA and "out of memory", and no figures of torch are
with it.

Why it matters: It appears as an NCCL error, and is a lack of memory.""",
    signatures=(
        Signature(
            words="failure+cuda calloc+async calloc+cuda",
            pattern=r"Cuda failure (?:2 )?'out of memory'|Failed to CUDA (?:calloc|malloc)(?: async)?",
            sample="node1:412:980 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'",
        ),
    ),
)

CUBLAS_OUT_OF_MEMORY = Rule(
    id="cublas-out-of-memory",
    stage=Stage.RUN,
    title="{library|cuBLAS} could not start on the GPU: nearly always its memory is full",
    fix="free GPU memory as for gpu-oom: a smaller micro batch, or what else is on the GPU. If memory is free, a "
    "failed kernel before it is the cause: CUDA_LAUNCH_BLOCKING=1 shows which",
    steps=(step("nvidia-smi"), step("CUDA_LAUNCH_BLOCKING=1 python SCRIPT.py")),
    explained_by=("gpu-oom", "gpu-index-out-of-range", "gpu-assert"),
    manual="""cuBLAS or cuDNN got no memory for its handle or workspace.

They take memory of their own when they are first used, after torch has taken its share. An earlier failed kernel (an
index out of range) can show here too.

Why it matters: The message names a library, and the library is not at fault.""",
    signatures=(
        Signature(
            words="cublas_status_alloc_failed cudnn_status_alloc_failed",
            pattern=r"\b(?P<library>CUBLAS|CUDNN)_STATUS_ALLOC_FAILED",
            sample="RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        Signature(
            words="cublas_status_not_initialized cudnn_status_not_initialized",
            pattern=r"\b(?P<library>CUBLAS|CUDNN|cuDNN error: CUDNN)_STATUS_NOT_INITIALIZED",
            tier=Tier.GENERIC,
            sample="RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        ),
    ),
)

ZERO_BUCKET_TOO_LARGE = Rule(
    id="zero-bucket-too-large",
    stage=Stage.RUN,
    title="ZeRO's buffer of reduce_bucket_size elements does not fit into memory{bytes_hint}",
    fix="lower reduce_bucket_size in zero_optimization (5e8 is DeepSpeed's default; it is counted in elements, "
    "not bytes)",
    steps=(step("free -g"), instead("nvidia-smi")),
    explained_by=("gpu-oom",),
    manual="""ZeRO allocates a buffer of reduce_bucket_size elements when the engine is made, and there is not enough memory.

The buffer takes reduce_bucket_size x 2 bytes in fp16 and bf16, x 4 in fp32, and twice that with overlap_comm.

Why it matters: The failure comes before the first step, whatever the batch is.""",
    signatures=(
        Signature(
            words="defaultcpuallocator",
            pattern=r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:.{0,80}allocate "
            r"(?P<bytes>\d+ bytes))?",
            after=BUCKET,
            sample="    bucket.buffer = torch.empty(self.reduce_bucket_size,\n"
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 40000000000 bytes. Error code 12 (Cannot allocate memory)",
        ),
        Signature(
            words="tried+memory",
            pattern=r"Error: (?:CUDA|HIP) out of memory\. Tried to allocate (?P<bytes>[\d.]{1,12} [KMG]iB)",
            after=BUCKET,
            sample="    buf_0 = torch.empty(int(self.reduce_bucket_size),\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.73 GiB (GPU 0; 15.78 GiB total "
            "capacity)",
        ),
    ),
)

RULES = (
    GPU_OOM,
    PINNED_MEMORY_FAILED,
    NCCL_OUT_OF_MEMORY,
    CUBLAS_OUT_OF_MEMORY,
    ZERO_BUCKET_TOO_LARGE,
)
