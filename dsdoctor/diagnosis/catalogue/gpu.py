"""Rules of the GPU itself: its driver, its errors (Xid, ECC), faults inside kernels, and which GPU a rank takes."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

DRIVER_TOO_OLD = Rule(
    id="driver-too-old",
    stage=Stage.RUN,
    title="the NVIDIA driver is too old for the CUDA release that torch was built with{cuda_hint}",
    fix="update the driver, or install a torch that was built for a CUDA release of this driver",
    steps=(step("nvidia-smi"), step("python -m dsdoctor check")),
    manual="""The NVIDIA driver is too old for the CUDA release that torch was built with.

A driver runs its own release and older ones, and other minors of its own major (minor-version compatibility).
`nvidia-smi` shows at the top right which CUDA release it runs. In a container the driver is the host's.

Why it matters: With an older major torch cannot use the GPU. A newer toolkit does not help an old driver.""",
    signatures=(
        Signature(
            words="old+driver",
            pattern=r"The NVIDIA driver on your system is too old(?: \(found version (?P<driver>\d{1,6})\))?",
            unless=r"UserWarning",
            sample="RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please "
            "update your GPU driver",
        ),
        Signature(
            words="insufficient+driver",
            pattern=r"CUDA driver version is insufficient for CUDA runtime version",
            sample="RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        ),
        Signature(
            words="old+driver",
            pattern=r"UserWarning: CUDA initialization: The NVIDIA driver on your system is too old(?: \(found version "
            r"(?P<driver>\d{1,6})\))?",
            tier=Tier.PROBE,
            sample="/venv/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: The NVIDIA driver on "
            "your system is too old (found version 11040).",
        ),
        Signature(
            words="compatibility+forward",
            pattern=r"forward compatibility was attempted on non supported HW",
            title="a CUDA compatibility library is loaded that this GPU or driver cannot use, or the driver was "
            "just updated",
            fix="take the compat folder off LD_LIBRARY_PATH (forward compatibility is for data-center GPUs "
            "only); after an update of the driver, reboot",
            sample="RuntimeError: CUDA error: forward compatibility was attempted on non supported HW",
        ),
    ),
)

DRIVER_SILENT = Rule(
    id="driver-silent",
    stage=Stage.RUN,
    title="the NVIDIA driver does not answer",
    fix="see what the driver itself says; after an update of it, reboot or reload its module; in a container, "
    "restart that",
    steps=(step("nvidia-smi"), step("cat /proc/driver/nvidia/version")),
    manual="""There is an NVIDIA driver, and it does not answer.

After an update the library and the loaded kernel module are of two versions until a reboot. A container that was
started before keeps the old library.

Why it matters: No program can use the GPUs until it answers.""",
    signatures=(
        Signature(
            words="nvml+mismatch mismatch+driver",
            pattern=r"Failed to initialize NVML: Driver/library version mismatch",
            title="the NVIDIA driver was updated: its library and the loaded kernel module are of two versions",
            fix="reboot, or unload and load the nvidia modules; restart containers that ran before",
            sample="Failed to initialize NVML: Driver/library version mismatch",
        ),
        Signature(
            words="couldn+nvidia+failed",
            pattern=r"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver",
            tier=Tier.PROBE,
            sample="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
            "the latest NVIDIA driver is installed and running.",
        ),
        Signature(
            words="nvml+unknown",
            pattern=r"Failed to initialize NVML: Unknown Error",
            title="the container lost its GPUs (NVML: Unknown Error), as after a daemon-reload of systemd on the host",
            fix="restart the container; name the devices when it starts (--device /dev/nvidia0 ...), or use the "
            "cgroupfs driver",
            steps=(step("nvidia-smi"),),
            sample="Failed to initialize NVML: Unknown Error",
        ),
    ),
)

DRIVER_MISSING = Rule(
    id="driver-missing",
    stage=Stage.RUN,
    title="no NVIDIA driver is seen here",
    fix="run where a GPU is, not on a login node; a container needs --gpus all and NVIDIA's container toolkit, "
    "Slurm --gres=gpu:N",
    steps=(step("nvidia-smi"), step("docker run --gpus all ..."), instead("srun --gres=gpu:1 nvidia-smi")),
    explained_by=("cuda-not-initialized", "driver-too-old", "driver-silent"),
    manual="""torch was built for CUDA, and there is no NVIDIA driver where it runs.

In a container the driver's library comes from the host, and only when the GPUs are asked for. Under Slurm a job without
--gres or --gpus may see none.

Why it matters: The GPU cannot be used; code that asks for it fails.""",
    signatures=(
        Signature(
            words="found+nvidia+driver",
            pattern=r"Error: Found no NVIDIA driver on your system",
            not_after=r"compute_capability_args|op_builder|cpp_extension",
            sample="RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
            "GPU and installed a driver",
        ),
        Signature(
            words="cuda+gpus+available",
            pattern=r"Error: No CUDA GPUs are available",
            not_after=r"compute_capability_args|op_builder|cpp_extension",
            tier=Tier.GENERIC,
            title="no CUDA GPU is available to this process",
            fix="see whether CUDA_VISIBLE_DEVICES is empty or names GPUs that are not here, and whether the job "
            "or container asked for GPUs",
            steps=(step("nvidia-smi"), step("echo $CUDA_VISIBLE_DEVICES")),
            sample="RuntimeError: No CUDA GPUs are available",
        ),
        Signature(
            words="select+device+driver",
            pattern=r"could not select device driver \"{0,2}'{0,2} with capabilities: \[\[gpu\]\]",
            title="docker has no NVIDIA runtime: the NVIDIA container toolkit is not installed on the host",
            fix="install nvidia-container-toolkit on the host and restart docker",
            steps=(step("sudo apt install nvidia-container-toolkit"), step("sudo systemctl restart docker")),
            sample='docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        ),
    ),
)

TORCH_WITHOUT_CUDA = Rule(
    id="torch-without-cuda",
    stage=Stage.RUN,
    title="this torch was built without CUDA, and the script asks for a GPU",
    fix="install a torch with CUDA; see that no later pip install replaced it by the CPU build",
    steps=(
        step("python -m dsdoctor check"),
        step("python -m pip install torch --index-url https://download.pytorch.org/whl/cu128"),
    ),
    manual="""torch is a build for the CPU, and something asks it for CUDA.

On Windows, and from some indexes, pip installs the CPU build by default.

Why it matters: The GPUs cannot be used, and DeepSpeed chooses the CPU accelerator.""",
    signatures=(
        Signature(
            words="compiled+cuda+enabled",
            pattern=r"AssertionError: Torch not compiled with CUDA enabled",
            sample="AssertionError: Torch not compiled with CUDA enabled",
        ),
    ),
)

GPU_ORDINAL_INVALID = Rule(
    id="gpu-ordinal-invalid",
    stage=Stage.RUN,
    title="a rank asks for a GPU that is not there: more ranks on this node than visible GPUs",
    fix="start as many ranks as there are GPUs (--num_gpus, --nproc_per_node), and use LOCAL_RANK, not RANK, to "
    "choose the GPU",
    steps=(step("nvidia-smi -L"), step("echo $CUDA_VISIBLE_DEVICES")),
    manual="""The number of the GPU that a rank chose is higher than the last visible one.

The number counts from 0 among the visible GPUs: with CUDA_VISIBLE_DEVICES=2,3 they are 0 and 1. On the second node RANK is
8 and higher, LOCAL_RANK begins at 0.

Why it matters: The rank ends at its first use of the GPU.""",
    signatures=(
        Signature(
            words="invalid+ordinal",
            pattern=r"CUDA error: invalid device ordinal|hipErrorInvalidDevice",
            sample="RuntimeError: CUDA error: invalid device ordinal",
        ),
    ),
)

GPU_BUSY = Rule(
    id="gpu-busy",
    stage=Stage.RUN,
    title="the GPU is in exclusive mode and another process has it, or it does not work",
    fix="end the other process, or set the compute mode to default; if none is there, the GPU needs a reset by "
    "its administrator",
    steps=(step("nvidia-smi"), step("nvidia-smi --query-gpu=compute_mode --format=csv")),
    manual="""CUDA found the GPU, and could not make a context on it.

In the mode EXCLUSIVE_PROCESS only one process may use a GPU; two ranks on one GPU, or a leftover process, then fail. A GPU
that has failed (Xid) shows the same.

Why it matters: The rank cannot use this GPU.""",
    signatures=(
        Signature(
            words="busy+unavailable",
            pattern=r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy or "
            r"unavailable",
            sample="RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        ),
    ),
)

GPU_HARDWARE_ERROR = Rule(
    id="gpu-hardware-error",
    stage=Stage.RUN,
    title="the GPU itself failed{xid_hint}",
    fix="take the node out of the job and have the GPU reset or replaced; run the training elsewhere from its "
    "last checkpoint",
    steps=(step("sudo dmesg -T | grep -i xid"), step("nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT")),
    manual="""The driver or CUDA reports an error of the hardware.

Xid 48, 63, 64, 94 and 95 are memory errors (ECC, row remapping), 74 is NVLink, 79 means that the GPU has fallen off the
bus, 119 and 120 that its own processor (GSP) does not answer. 13, 31, 43 and 45 come from the program most often and
are no sign of broken hardware by themselves.

Why it matters: No change of the program helps, and the same node will fail again.""",
    signatures=(
        Signature(
            words="nvrm+xid xid",
            pattern=r"\bXid \(PCI:[\w:.]{4,24}\): "
            r"(?P<xid>48|62|63|64|74|79|94|95|119|120|121|136|140|143|145|149|154)\b",
            title="the GPU itself failed: the driver reports Xid {xid}",
            sample="NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        ),
        Signature(
            words="uncorrectable+ecc",
            pattern=r"uncorrectable (?:NVLink|ECC) error|uncorrectable ECC error encountered",
            title="the GPU reports an uncorrectable ECC error: its memory is damaged at that place",
            sample="RuntimeError: CUDA error: uncorrectable ECC error encountered",
        ),
        Signature(
            words="fallen+bus lost+gpu",
            pattern=r"GPU has fallen off the bus|Unable to determine the device handle for GPU.{0,80}(?:Unknown "
            r"Error|GPU is lost)"
            r"|GPU is lost\. +Reboot",
            title="a GPU has fallen off the bus: the node needs a reboot, or the GPU, its power or its slot is faulty",
            sample="Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system "
            "to recover this GPU",
        ),
        Signature(
            words="hardware+stack",
            pattern=r"CUDA error: hardware stack error",
            title="the GPU reports a hardware stack error",
            tier=Tier.GENERIC,
            sample="RuntimeError: CUDA error: hardware stack error",
        ),
    ),
)

GPU_ILLEGAL_ACCESS = Rule(
    id="gpu-illegal-access",
    stage=Stage.RUN,
    title="a GPU kernel accessed memory that is not its own ({problem})",
    fix="find the kernel: CUDA_LAUNCH_BLOCKING=1 gives the right traceback, compute-sanitizer the kernel; "
    "suspect ops that were built for another torch or GPU, custom kernels, and versions that were just changed",
    steps=(
        step("CUDA_LAUNCH_BLOCKING=1 python SCRIPT.py"),
        step("compute-sanitizer python SCRIPT.py"),
        step("python -m dsdoctor check --deep"),
    ),
    explained_by=("gpu-hardware-error", "gpu-index-out-of-range"),
    manual="""A kernel on the GPU read or wrote outside of its memory, or ended in another fault.

The GPU works behind the program, so the traceback shows a later line, often NCCL's. A custom or fused kernel, an op that
was built for another torch or GPU, an index that was not checked, and seldom the hardware (Xid in dmesg) are the reasons.

Why it matters: The process cannot use the GPU any more, and all other ranks wait for it.""",
    signatures=(
        Signature(
            words="illegal+error launch+error misaligned+error instruction+error",
            pattern=r"(?:CUDA|HIP|Cuda) (?:error:|failure '?) ?(?P<problem>an illegal memory access was encountered"
            r"|unspecified launch failure|misaligned address|an illegal instruction was encountered|invalid "
            r"program counter)",
            tier=Tier.GENERIC,
            sample="RuntimeError: CUDA error: an illegal memory access was encountered",
        ),
        Signature(
            words="xid",
            pattern=r"\bXid \(PCI:[\w:.]{4,24}\): (?P<problem>13|31|43|45)\b",
            tier=Tier.GENERIC,
            title="the driver stopped a kernel of this program (Xid {problem})",
            sample="NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 10000000. MMU Fault",
        ),
    ),
)

RULES = (
    DRIVER_TOO_OLD,
    DRIVER_SILENT,
    DRIVER_MISSING,
    TORCH_WITHOUT_CUDA,
    GPU_ORDINAL_INVALID,
    GPU_BUSY,
    GPU_HARDWARE_ERROR,
    GPU_ILLEGAL_ACCESS,
)
