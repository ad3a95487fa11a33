"""Rules of tensors on the wrong device, and of what processes do to CUDA before they use it."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

TO_ENGINE = (
    "move each batch to the engine's device (batch.to(engine.device), or .to(model.device)), and make new tensors with "
    "device=x.device; call torch.cuda.set_device(local_rank) first, and with DeepSpeed load the model without device_map and "
    ".cuda(0); with CPU offload a part of the model stays on the CPU: make no tensor of it by hand"
)

NOT_OF_THE_SCRIPT = (
    r"zero_to_fp32|in unscale_and_clip_grads|deepspeed[/\\]runtime[/\\]zero[/\\](?!linear)|deepspeed[/\\]ops"
)
"""Where DeepSpeed itself brings the tensors together: nothing that the script moves would help. linear.py runs its layers."""

TENSORS_ON_SEVERAL_DEVICES = Rule(
    id="tensors-on-several-devices",
    stage=Stage.RUN,
    title="tensors on several devices meet: {one|one} and {other|another}",
    fix=TO_ENGINE,
    explained_by=("known-regression", "zero-to-fp32-failed", "optimizer-offload-client"),
    manual="""One operation got tensors of the CPU and of a GPU, or of two GPUs.

A batch, a mask, a table that the script makes itself, or a buffer that was never moved; a model that device_map="auto"
has spread over the GPUs; a rank that did not call set_device and works on GPU 0. With offload_param the weights are on
the CPU outside of a module's forward.

Why it matters: The operation fails, on this rank first.""",
    signatures=(
        Signature(
            words="tensors+device+two tensors+device+got",
            pattern=r"^RuntimeError: Expected all tensors to be on the same device, but (?:found at least two "
            r"devices, |got \w{1,40} is on )(?P<one>(?!meta)[a-z]{3,12}(?::\d{1,3})?)(?: and |, different from other "
            r"tensors on )(?P<other>(?!meta)[a-z]{3,12}(?::\d{1,3})?)",
            not_after=NOT_OF_THE_SCRIPT,
            tier=Tier.GENERIC,
            sample="RuntimeError: Expected all tensors to be on the same device, but found at least two devices, "
            "cuda:0 and cpu! (when checking argument for argument index in method wrapper_CUDA__index_select)",
        ),
        Signature(
            words="expected+tensor+argument+device expected+cpu+tensor",
            pattern=r"^RuntimeError: (?:Expected tensor for argument #\d \S{1,30} to be on the same device|Tensor "
            r"for argument (?:#\d )?\S{1,40} is on (?P<one>CPU), but expected (?:it|them) to be on "
            r"(?P<other>GPU))",
            title="an operation got tensors of the CPU and of a GPU",
            sample="RuntimeError: Tensor for argument weight is on CPU, but expected it to be on GPU (while checking "
            "arguments for embedding)",
        ),
        Signature(
            words="expected+cuda+device+cpu",
            pattern=r"^ValueError: Expected a cuda device(?: with a specified index or an integer)?, but got: "
            r"?(?P<one>\w{1,12}(?::\d{1,3})?)",
            title="a function of CUDA was given the device {one}",
            fix="give it the GPU of this rank: torch.device('cuda', LOCAL_RANK); with offload_param a parameter's "
            "own device is the CPU, so take engine.device instead of parameter.device",
            sample="ValueError: Expected a cuda device, but got: cpu",
        ),
        Signature(
            words="tensors+cuda+dense backend+device+cpu backend+tensor+type",
            pattern=r"^(?:RuntimeError|ValueError): (?:Tensors must be CUDA and dense|No backend type associated "
            r"with device type (?P<one>cpu)|ProcessGroupNCCL only supports|.{0,60}NCCL.{0,30}does not "
            r"support CPU tensors)",
            title="a collective of NCCL was given a tensor of the CPU",
            fix="move the tensor to the GPU before the collective (tensor.to(engine.device)); for tensors of the CPU "
            "make the group with 'cpu:gloo,cuda:nccl'. Where a checkpoint engine or a store gathers objects, "
            "newer releases do so by themselves",
            sample="RuntimeError: No backend type associated with device type cpu",
        ),
        Signature(
            words="triton+accessed",
            pattern=r"^ValueError: Pointer argument \(at \d{1,3}\) cannot be accessed from Triton \((?P<one>cpu) "
            r"tensor\?\)",
            title="a Triton kernel was given a tensor of the CPU",
            fix="move the tensor to the GPU; where another GPU than GPU 0 is used, call "
            "torch.cuda.set_device(LOCAL_RANK) first",
            sample="ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)",
        ),
    ),
)

CUDA_AFTER_FORK = Rule(
    id="cuda-after-fork",
    stage=Stage.RUN,
    title="CUDA is used in a forked child process after the parent has used it",
    fix="do not touch CUDA (no .cuda(), no torch.cuda calls) before processes are forked: datasets.map(num_proc) first, and "
    "let the dataset give tensors of the CPU; or start them by spawn: DataLoader(multiprocessing_context='spawn'), "
    "torch.multiprocessing.set_start_method('spawn', force=True)",
    manual="""A process that was made by fork has a copy of its parent's CUDA context, which does not work.

Data loader workers that put samples on the GPU, datasets.map with num_proc and a model on the GPU, or vLLM started
from a process that has used CUDA do so.

Why it matters: The child fails, and with it the loader or the run.""",
    signatures=(
        Signature(
            words="initialize+cuda+forked",
            pattern=r"Cannot re-initialize CUDA in forked subprocess",
            sample="RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must use the 'spawn' start method",
        ),
    ),
)

CUDA_STATE_BROKEN = Rule(
    id="cuda-not-initialized",
    stage=Stage.RUN,
    title="CUDA could not be initialized on this node{what_hint}",
    fix="see whether nvidia-smi works in the same place (container, job); reload the driver's modules or reboot "
    "after an update or a suspend; set CUDA_VISIBLE_DEVICES before Python starts, never within it",
    steps=(step("nvidia-smi"), step("sudo dmesg -T | grep -i -E 'nvrm|xid'"), step("python -m dsdoctor check")),
    manual="""The driver is there, and does not give this process a GPU.

On boards with NVSwitch (HGX, DGX) the fabric manager must run, in the driver's own version. After a suspend or an
update of the driver the module nvidia_uvm must be loaded again. A changed CUDA_VISIBLE_DEVICES within the process
confuses torch.

Why it matters: No rank on this node can use a GPU.""",
    signatures=(
        Signature(
            words="system+initialized 802 fabric+manager",
            pattern=r"CUDA (?:error|driver error|failure)? ?(?:802)?:? ?'?system not yet initialized|Error 802: "
            r"system not yet initialized|fabric manager.{0,60}(?:not running|failed|mismatch)",
            title="the NVSwitch fabric is not up (CUDA error 802, system not yet initialized): nvidia-fabricmanager "
            "does not run, or has another version than the driver",
            fix="start nvidia-fabricmanager on the node, in exactly the version of the driver, and see that "
            "nvidia-smi -q says Fabric State: Completed",
            steps=(
                step("sudo systemctl status nvidia-fabricmanager"),
                step("sudo systemctl restart nvidia-fabricmanager"),
                step("nvidia-smi -q"),
            ),
            sample="RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        ),
        Signature(
            words="cuda+unknown+error incorrectly+environment",
            pattern=r"RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
            sample="RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. "
            "changing env variable CUDA_VISIBLE_DEVICES after program start.",
        ),
        Signature(
            words="unexpected+cudagetdevicecount",
            pattern=r"Unexpected error from cudaGetDeviceCount\(\)\..{0,200}?Error (?P<what>\d{1,4}: (?!system not "
            r"yet|out of memory|CUDA driver version)[\w -]{3,60})",
            unless=r"UserWarning",
            sample="RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
            "calling NumCudaDevices() that might have already set an error? Error 304: OS call failed or "
            "operation not supported on this OS",
        ),
        Signature(
            words="userwarning+cuda+initialization",
            pattern=r"UserWarning: CUDA initialization: (?:.{0,240}?Error (?P<what>\d{1,4}: (?!system not yet|out of memory"
            r"|CUDA driver version|no CUDA-capable|CUDA driver is a stub"
            r"|invalid device ordinal)[\w -]{3,60})|CUDA (?P<what2>unknown error))",
            tier=Tier.PROBE,
            sample="/v/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: Unexpected error from "
            "cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices()? Error 304: OS call failed",
        ),
        Signature(
            words="num_gpus+device+assert",
            pattern=r"device >= 0 && device < num_gpus INTERNAL ASSERT FAILED",
            title="the number of visible GPUs changed within the process: CUDA_VISIBLE_DEVICES was set after torch "
            "had looked",
            fix="set CUDA_VISIBLE_DEVICES before Python starts (in the launcher's environment, or as the first line "
            "before import torch); with Ray let the actor keep the GPUs that Ray gave it "
            "(RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)",
            steps=(step("echo $CUDA_VISIBLE_DEVICES"), instead("nvidia-smi -L")),
            sample="RuntimeError: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED at "
            '"../aten/src/ATen/cuda/CUDAContext.cpp":49, please report a bug to PyTorch. device=1, num_gpus=',
        ),
        Signature(
            words="initialization+error",
            pattern=r"(?:RuntimeError|AcceleratorError): CUDA error: initialization error",
            title="CUDA could not be initialized in this process (initialization error)",
            fix="see that no parent process has used CUDA before a fork (start processes by spawn), and that "
            "nvidia-smi works here",
            sample="RuntimeError: CUDA error: initialization error",
        ),
    ),
)

GPU_LIBRARY_FAILED = Rule(
    id="gpu-library-failed",
    stage=Stage.RUN,
    title="a call of {library|cuBLAS} failed on the GPU: {status}",
    fix="see first whether the GPU's memory is full and whether an index was out of range (CUDA_LAUNCH_BLOCKING=1 "
    "shows the true line); then let torch find its own libraries: unset LD_LIBRARY_PATH, and remove a second "
    "cuBLAS or cuDNN from the environment",
    steps=(
        step("CUDA_LAUNCH_BLOCKING=1 python SCRIPT.py"),
        step("unset LD_LIBRARY_PATH"),
        step("python -m pip list"),
        step("nvidia-smi"),
    ),
    explained_by=(
        "gpu-oom",
        "gpu-index-out-of-range",
        "gpu-assert",
        "gpu-illegal-access",
        "gpu-hardware-error",
        "cublas-out-of-memory",
    ),
    manual="""cuBLAS, cuDNN, cuSOLVER or NVRTC refused or failed in a call.

Three things do so most often: the GPU's memory is full, an earlier kernel has failed (an index out of range in an
embedding), or another copy of the library than torch's own was loaded (LD_LIBRARY_PATH, nvidia-cublas-cu11 beside
cu12, a toolkit's own). Shapes, types or a GPU that the library's release does not know are the rest.

Why it matters: The message names a library; the fault lies before it.""",
    signatures=(
        Signature(
            words="cublas_status_execution_failed cublas_status_internal_error cublas_status_invalid_value "
            "cublas_status_not_supported cublas_status_arch_mismatch cublas_status_mapping_error "
            "cudnn_status_execution_failed cudnn_status_internal_error cudnn_status_not_supported "
            "cudnn_status_bad_param cudnn_status_mapping_error cudnn_status_arch_mismatch "
            "cudnn_status_version_mismatch cudnn_status_execution_failed_cublas cusolver_status_internal_error "
            "cudnn_status_sublibrary_version_mismatch cudnn_status_sublibrary_loading_failed",
            pattern=r"\b(?P<status>(?P<library>CUBLAS|CUDNN|CUSOLVER)_STATUS_(?!ALLOC_FAILED"
            r"|NOT_INITIALIZED)[A-Z_]{5,60})",
            tier=Tier.GENERIC,
            sample="RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, "
            "opa, opb, m, n, k)`",
        ),
        Signature(
            words="engine+execute+computation cudnn+algorithm",
            pattern=r"RuntimeError: (?P<status>(?:GET|FIND) was unable to find an engine to execute this "
            r"computation|Unable to find a valid cuDNN algorithm)",
            tier=Tier.GENERIC,
            title="cuDNN found no way to run this convolution: nearly always the GPU's memory is full, else cuDNN "
            "does not fit torch or the type is not supported",
            fix="use a smaller micro batch or image; then let torch find its own cuDNN (unset LD_LIBRARY_PATH), and "
            "see that the dtype is one that the GPU has",
            sample="RuntimeError: GET was unable to find an engine to execute this computation",
        ),
        Signature(
            words="nvrtc+architecture nvrtc+error",
            pattern=r"(?P<library>nvrtc): error: (?P<status>(?:invalid value for --gpu-architecture|failed to open "
            r"\S{1,80}).{0,40})",
            title="{library} of this torch does not know the GPU, or its files are missing ({status})",
            fix="install a torch that was built for this GPU, with all of its nvidia packages",
            sample="RuntimeError: nvrtc: error: invalid value for --gpu-architecture (-arch)",
        ),
        Signature(
            words="cuda+driver+error",
            pattern=r"RuntimeError: CUDA driver error: (?P<status>(?!system not yet)[\w ]{3,60})",
            tier=Tier.GENERIC,
            title="the CUDA driver refused a call: {status}",
            fix="run with CUDA_LAUNCH_BLOCKING=1 and see dmesg for an Xid; compare the driver with what torch was "
            "built for",
            steps=(step("nvidia-smi"), step("sudo dmesg -T | grep -i xid")),
            sample="RuntimeError: CUDA driver error: invalid argument",
        ),
    ),
)

TRITON_KERNEL = Rule(
    id="triton-kernel-failed",
    stage=Stage.RUN,
    title="a Triton kernel could not be compiled or run: {what|see the message}",
    fix="take the triton that this torch names (pip install of the same torch again), and see that a C compiler and "
    "Python's headers are there; switch the kernel off where its package has an option (Liger, fla, "
    "torch.compile)",
    steps=(step("python -m pip list"), step("gcc --version")),
    manual="""Triton compiles kernels when they are first used: for that it needs a C compiler, ptxas and a GPU that it knows.

Kernels of other packages (Liger, flash-linear-attention, Unsloth, torch.compile) ask for block sizes that a smaller
GPU does not have the shared memory for.

Why it matters: The first forward or backward with this kernel fails.""",
    signatures=(
        Signature(
            words="outofresources out+resource+shared",
            pattern=r"out of resource: (?P<what>shared memory|threads|registers|tensor memory), Required: "
            r"(?P<need>\d{1,12}), Hardware limit: (?P<limit>\d{1,12})",
            title="a Triton kernel needs more {what} ({need}) than this GPU has ({limit}): it was tuned for a larger "
            "GPU",
            fix="use smaller blocks (num_stages, BLOCK sizes) or a newer release of the package whose kernel it is, "
            "or switch its kernel off on this GPU",
            sample="triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware "
            "limit: 101376. Reducing block sizes or `num_stages` may help.",
        ),
        Signature(
            words="triton+error+cuda triton+error+hip triton+compilationerror",
            pattern=r"(?:RuntimeError: (?P<what>Triton Error \[(?:CUDA|HIP)\]: [\w "
            r",']{3,80})|(?P<what2>(?:triton\.[\w.]{1,60}\.)CompilationError))",
            unless=r"kernel image|illegal|out of memory",
            sample="RuntimeError: Triton Error [CUDA]: invalid argument",
        ),
    ),
)

RULES = (TENSORS_ON_SEVERAL_DEVICES, CUDA_AFTER_FORK, CUDA_STATE_BROKEN, GPU_LIBRARY_FAILED, TRITON_KERNEL)
