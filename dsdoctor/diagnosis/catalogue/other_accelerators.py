"""Rules of accelerators that are not NVIDIA's: a ROCm torch without code for the GPU, a Gaudi that another process holds."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

HIP_CODE_MISSING = Rule(
    id="hip-code-missing",
    stage=Stage.RUN,
    title="this ROCm torch, or the op that was called last, has no code for this GPU{gfx_hint}",
    fix="install a torch whose list of architectures has this GPU's gfx name: a newer ROCm release of it, most often. An op "
    "that was built here is built anew with PYTORCH_ROCM_ARCH. HSA_OVERRIDE_GFX_VERSION only helps a close relative of one "
    "in the list (gfx1031 as 10.3.0), never another family",
    steps=(
        step('python -c "import torch; print(torch.version.hip, torch.cuda.get_arch_list())"'),
        step("rocminfo | grep gfx"),
        step("python -m pip install -U torch --index-url https://download.pytorch.org/whl/rocm6.4"),
    ),
    manual="""A kernel was called that was not compiled for this AMD GPU.

A ROCm build of torch has code for the GPUs in torch.cuda.get_arch_list() alone; consumer cards came late, and integrated
ones are mostly not among them. A package with its own kernels (bitsandbytes, flash-attn, an op of DeepSpeed) has a list of
its own. AMD_LOG_LEVEL=1 prints which library has no code.

Why it matters: The first kernel fails, on every rank.""",
    signatures=(
        Signature(
            words="hip+function",
            pattern=r"Error: HIP error: invalid device function",
            sample="RuntimeError: HIP error: invalid device function",
        ),
        Signature(
            words="hiperrornobinaryforgpu bundle+isa",
            pattern=r"hipErrorNoBinaryForGpu"
            r"|Cannot find CO in the bundle \S{1,300} for ISA: amdgcn-amd-amdhsa--(?P<gfx>gfx\w{3,6})",
            tier=Tier.GENERIC,
            sample="hip_fatbin.cpp :276 : Cannot find CO in the bundle /v/torch/lib/libtorch_hip.so for ISA: "
            "amdgcn-amd-amdhsa--gfx1100",
        ),
    ),
)

HPU_ALREADY_ACQUIRED = Rule(
    id="hpu-already-acquired",
    stage=Stage.RUN,
    title="the Gaudi cards cannot be acquired: another process or container holds at least one of them already",
    fix="end the process that holds it (hl-smi names it; a container does not see those of others), or give each job cards of "
    "its own: HABANA_VISIBLE_DEVICES for the container, HABANA_VISIBLE_MODULES within it, and no more ranks than are free",
    steps=(step("hl-smi"), step("docker ps"), step("export HABANA_VISIBLE_MODULES=0,1,2,3")),
    manual="""Only one process at a time can hold a Gaudi card, and this one is held.

A serving container, a notebook or a job that did not end holds it until it ends. Two ranks that take the same module do the
same.

Why it matters: The rank cannot begin, and all others wait for it.""",
    signatures=(
        Signature(
            words="device+acquired",
            pattern=r"synStatus=\d{1,4} \[Device already acquired\]|Device already acquired\]? Device acquire failed",
            sample="RuntimeError: synStatus=20 [Device already acquired] Device acquire failed.",
        ),
    ),
)

HIP_MEMBER_MISSING = Rule(
    id="hip-member-missing",
    stage=Stage.COMPILE,
    title="{op|an op} does not compile for ROCm: its code was translated from CUDA, and this ROCm has no {name} that it calls",
    fix="take a newer ROCm with the torch for it, and the newest DeepSpeed, whose ops have what is missing guarded or replaced; or "
    "do without this op (replace_with_kernel_inject False where it is one of inference)",
    steps=(
        step('python -c "import torch; print(torch.version.hip)"; hipcc --version'),
        step("python -m pip install -U deepspeed"),
    ),
    manual="""hipcc compiles code that torch's hipify translated from CUDA, and a name in it is not in this ROCm's headers.

hipify replaces names; it does not write what HIP lacks. Parts of cooperative groups, half precision and cub came to ROCm
release by release, and DeepSpeed has put guards around some of them.

Why it matters: The op cannot be built with this pair of ROCm and DeepSpeed, whatever the flags.""",
    signatures=(
        Signature(
            words="error+cooperative_groups error+undeclared+identifier error+unknown+name error+member+named",
            pattern=r"(?:\.hip|_hip\.(?:h|cuh|hpp|cpp)|[/\\]hip[/\\]\S{1,160}):\d{1,6}:\d{1,6}: error: "
            r"(?:no (?:member|type|template) named '(?P<name>[\w:]{1,80})' in"
            r"|use of undeclared identifier '(?P<name2>[\w:]{1,80})'|unknown type name "
            r"'(?P<name3>[\w:]{1,80})')"
            r"|error: no (?:member|type) named '(?P<name4>\w{1,80})' in '(?:hip|cooperative_groups)\w{0,40}::",
            tier=Tier.FILE,
            sample="csrc/includes/reduction_utils_hip.h:352:46: error: no member named 'shfl_xor' in "
            "'cooperative_groups::thread_block_tile<64, void>'",
        ),
    ),
)

HCCL_TIMEOUT = Rule(
    id="hccl-timeout",
    stage=Stage.RUN,
    title="a rank waited for another one in a collective of the NPUs (HCCL) until the time was over",
    fix="find the rank that did not come: one that has no error, or whose error is earlier or another one; see what it did then (a "
    "branch of its own, fewer samples, saving, generation). Only if all ranks report it, and one is merely late, give more time: "
    "HCCL_CONNECT_TIMEOUT for connections, HCCL_EXEC_TIMEOUT for collectives. Then the network between the cards",
    steps=(
        step("python -m dsdoctor diagnose rank*.log"),
        step("grep -rn -i -E 'error cqe|timeout' ~/ascend/log/*/plog/ | head"),
        step("py-spy dump --pid PID", note="of the rank that does not come, while the others wait"),
        step("export HCCL_CONNECT_TIMEOUT=600 HCCL_EXEC_TIMEOUT=3600"),
    ),
    explained_by=("host-ram-oom", "gpu-oom", "job-time-limit", "job-preempted", "disk-full"),
    manual="""An NPU's rank waited for another one: EI0006 for its connection, EI0002 for its part in a collective.

All ranks must call the same collectives in the same order. A connection is made at the first collective of a group, so a rank
that comes to it later than HCCL_CONNECT_TIMEOUT (120 seconds) after the first one is missed too.

Why it matters: This is what the ranks print that waited. The cause is in the log of the one that did not come.""",
    signatures=(
        Signature(
            words="ei0006 getting+socket+times communication_error_get_socket",
            pattern=r"\bEI0006\b|Getting socket times out|Communication_Error_Get_Socket",
            tier=Tier.GENERIC,
            title="a rank waited for the connection of another one until the time was over, and that did not come (HCCL, EI0006); "
            "why it did not is not said here",
            sample="EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send "
            "the data in time.",
        ),
        Signature(
            words="ei0002 notify+times hccl+fftsplus+timeout",
            pattern=r"\bEI0002\b|wait execution of the Notify register times out|hccl fftsplus task timeout",
            tier=Tier.GENERIC,
            title="a rank waited in a collective for another one until the time was over, and that did not come (HCCL, EI0002); "
            "why it did not is not said here",
            sample="EI0002: [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out.",
        ),
    ),
)

RULES = (HIP_CODE_MISSING, HPU_ALREADY_ACQUIRED, HIP_MEMBER_MISSING, HCCL_TIMEOUT)
