"""Rules of accelerators that are not NVIDIA's: a ROCm torch without code for the GPU, a Gaudi that another process holds."""

from dsdoctor.core.fix import step
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

RULES = (HIP_CODE_MISSING, HPU_ALREADY_ACQUIRED)
