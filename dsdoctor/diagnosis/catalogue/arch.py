"""Rules of GPU architectures: none to build for, unknown to nvcc or torch, or not built."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

IN_THE_BUILDER = (
    r"compute_capability_args|filter_ccs|op_builder|_get_cuda_arch_flags|TORCH_CUDA_ARCH_LIST|ccs\b|cc\[|arch_list"
)

GPU_ARCH_UNSUPPORTED_BY_NVCC = Rule(
    id="gpu-arch-unsupported-by-nvcc",
    stage=Stage.COMPILE,
    title="nvcc {nvcc|of this toolkit} does not know the architecture {arch}",
    fix="build for the GPUs you have, with a toolkit that knows them: 8.9 and 9.0 need CUDA 11.8, 10.0 and 12.0 "
    "need 12.8, "
    "and CUDA 13 has nothing below 7.5",
    steps=(
        step("python -m dsdoctor build-wheel"),
        instead(
            'export TORCH_CUDA_ARCH_LIST="8.6"',
            note="what nvcc --list-gpu-arch has, of the generation of your GPU: code for 8.6 runs on 8.9 too",
        ),
    ),
    manual="""nvcc is too old or too new for an architecture that it was asked to compile for.

8.6 needs CUDA 11.1; 8.9 and 9.0 need 11.8; 10.0 and 12.0 need 12.8. CUDA 12 dropped 3.5 and 3.7, CUDA 13
everything below 7.5. `python -m dsdoctor plan` shows the architectures that torch and nvcc share.

Why it matters: nvcc stops, and no CUDA op is compiled.""",
    explained_by=("arch-list-empty", "arch-parse-bug", "triton-cannot-compile"),
    signatures=(
        Signature(
            words="unsupported+gpu",
            pattern=r"[Uu]nsupported gpu architecture '?(?P<arch>(?:compute|sm)_\d+\w?)'?",
            unless=r"_1[0-3]?\.?'",
            tier=Tier.FILE,
            sample="nvcc fatal   : Unsupported gpu architecture 'compute_90'",
        ),
        Signature(
            words="value+gpu",
            pattern=r"Value '(?P<arch>(?:sm|compute)_\w{1,8})' is not defined for option 'gpu-(?:name|architecture)'",
            unless=r"_1[0-3]?\.?'",
            tier=Tier.FILE,
            sample="ptxas fatal   : Value 'sm_86' is not defined for option 'gpu-name'",
        ),
        Signature(
            words="unsupported+gpu unknown+gpu",
            pattern=r"(?:unsupported|unknown) CUDA gpu architecture:? '?(?P<arch>(?:sm|compute)_\d+\w?)",
            tier=Tier.FILE,
            title="this clang does not know the architecture {arch}",
            fix="let nvcc compile CUDA, take a newer clang, or build for the GPUs it knows",
            sample="clang: error: unsupported CUDA gpu architecture: sm_120",
        ),
        Signature(
            words="target+compiled",
            pattern=r"Program with \.target '(?P<known>sm_\w{1,6})' cannot be compiled to architecture "
            r"'(?P<arch>sm_\w{1,6})'",
            tier=Tier.FILE,
            title="the code was written for {known}, and is to be compiled for {arch}",
            fix="name one generation of GPUs in TORCH_CUDA_ARCH_LIST; entries such as 9.0a fit that generation alone",
            sample="ptxas fatal   : Program with .target 'sm_90a' cannot be compiled to architecture 'sm_86'",
        ),
        Signature(
            words="ptxas",
            pattern=r"ptxas .{0,120}Unsupported \.version (?P<arch>[\d.]+); current version is '?(?P<known>[\d.]+)",
            tier=Tier.FILE,
            title="ptxas knows PTX up to {known}, and nvcc wrote {arch}: they are of two toolkits",
            fix="use nvcc and ptxas of one toolkit",
            steps=(step('eval "$(python -m dsdoctor env)"'),),
            sample="ptxas /tmp/tmpxft_1.ptx, line 9; fatal   : Unsupported .version 8.4; current version is '8.2'",
        ),
    ),
)

ARCH_LIST_EMPTY = Rule(
    id="arch-list-empty",
    stage=Stage.COMPILE,
    title="no GPU is visible and TORCH_CUDA_ARCH_LIST is not set: there is no architecture to build for",
    fix="name the architectures of the GPUs it will run on",
    steps=(
        step('TORCH_CUDA_ARCH_LIST="8.0;9.0" DS_ACCELERATOR=cuda python -m dsdoctor build-wheel'),
        instead('export TORCH_CUDA_ARCH_LIST="8.0;9.0"'),
    ),
    manual="""No GPU is visible and TORCH_CUDA_ARCH_LIST is not set, so nothing says which GPUs to build for.

torch and DeepSpeed ask the visible GPUs. In a docker build, on a login node, with a broken driver or with
CUDA_VISIBLE_DEVICES="" there is none. dsdoctor builds for all architectures that torch and nvcc share.

Why it matters: torch stops with an IndexError, or DeepSpeed takes 6.0;6.1;7.0, which CUDA 13's nvcc refuses.""",
    signatures=(
        Signature(
            words="indexerror",
            pattern=r"IndexError: list index out of range",
            after=r"_get_cuda_arch_flags|arch_list\[-1\]|compute_capability_args|ccs\[-1\]|cpp_extension\.py"
            r"|op_builder",
            not_after=r"cc\[1\]",
            sample="    arch_list[-1] += '+PTX'\nIndexError: list index out of range",
        ),
        Signature(
            words="jit+builder",
            pattern=r"JIT builder for '(?P<op>\w+)' (?:found no CUDA devices|cannot probe CUDA device)",
            sample="RuntimeError: DeepSpeed JIT builder for 'fused_adam' found no CUDA devices. Set "
            "TORCH_CUDA_ARCH_LIST or make GPUs "
            "visible.",
        ),
        Signature(
            words="literal",
            pattern=r"invalid literal for int\(\) with base 10: ''",
            after=IN_THE_BUILDER,
            title="TORCH_CUDA_ARCH_LIST is set to nothing",
            sample="    major = int(cc[0])  # compute_capability_args\nValueError: invalid literal for int() "
            "with base 10: ''",
        ),
        Signature(
            words="gpus+available nvidia+driver",
            pattern=r"RuntimeError: (?:No CUDA GPUs are available|Found no NVIDIA driver on your system)",
            after=r"op_builder|compute_capability|get_device_capability|cpp_extension|setup\.py",
            sample='  File "/src/op_builder/builder.py", line 600, in compute_capability_args\n'
            "RuntimeError: No CUDA GPUs are available",
        ),
    ),
)

GPU_ARCH_UNKNOWN_TO_TORCH = Rule(
    id="gpu-arch-unknown-to-torch",
    stage=Stage.COMPILE,
    title="{arch} is not an architecture that this torch and DeepSpeed know",
    fix='write TORCH_CUDA_ARCH_LIST as numbers with ";" between them; for a GPU newer than torch knows, take a '
    "newer torch",
    steps=(step('export TORCH_CUDA_ARCH_LIST="8.0;9.0"'), step("python -m dsdoctor plan")),
    manual="""TORCH_CUDA_ARCH_LIST, or a GPU here, has an architecture that this torch or DeepSpeed does not know.

torch.utils.cpp_extension knows a fixed list of architectures, and DeepSpeed takes plain numbers only:
"8.0;9.0+PTX". Commas, sm_90, 90, names in the wrong case, a trailing ";" and, for DeepSpeed, letters as in 9.0a
are refused.

Why it matters: The build stops before the first file is compiled. An old torch does not know a new GPU at all.""",
    signatures=(
        Signature(
            words="unknown+arch",
            pattern=r"Unknown CUDA arch \((?P<arch>[^)]{0,60})\) or GPU not supported",
            unless=r"\(\d{1,2}\.(?:\+PTX)?\) or",
            sample="ValueError: Unknown CUDA arch (8.9) or GPU not supported",
        ),
        Signature(
            words="indexerror",
            pattern=r"IndexError: list index out of range",
            after=r"cc\[1\]",
            title="TORCH_CUDA_ARCH_LIST{arch_list_hint} holds an entry without a dot",
            sample="    num = cc[0] + cc[1].split('+')[0]\nIndexError: list index out of range",
        ),
        Signature(
            words="literal",
            pattern=r"invalid literal for int\(\) with base 10: '(?P<arch>[^']{1,60})'",
            unless=r"base 10: '\.'",
            after=IN_THE_BUILDER,
            sample="    major = int(cc[0])  # compute_capability_args\nValueError: invalid literal for int() "
            "with base 10: 'Hopper'",
        ),
        Signature(
            words="keyerror",
            pattern=r"KeyError: '(?P<arch>\d{1,2}\.\d\w?|[A-Z][a-z]+)'",
            after=r"_get_cuda_arch_flags|named_arches|arch_list",
            sample="    arch_list = named_arches[arch]\nKeyError: '9.0'",
        ),
    ),
)

GPU_TOO_OLD_FOR_OP = Rule(
    id="gpu-too-old-for-op",
    stage=Stage.JIT,
    title="{op|the op} needs a newer GPU than the ones it was to be built for",
    fix="leave the op out, or build it for GPUs that it supports (8.0 for the v2 inference kernels, 7.0 for "
    "evoformer_attn)",
    steps=(step("python -m dsdoctor plan --ops {op|all}"),),
    manual="""Some ops need a newer GPU than those they were to be built for.

The ragged and cutlass kernels of inference v2 and MII and fp_quantizer need 8.0, evoformer_attn 7.0,
transformer_inference 6.0. These ops filter the list of architectures.

Why it matters: Where the filter leaves nothing, there is nothing to build: the op cannot be used on these GPUs.""",
    signatures=(
        Signature(
            words="compute+remaining",
            pattern=r"Unable to load (?P<op>\w+) op due to no compute capabilities remaining",
            sample="RuntimeError: Unable to load ragged_device_ops op due to no compute capabilities remaining "
            "after filtering",
        ),
        Signature(
            words="bfloat16",
            pattern=r"Bfloat16 is only supported on GPUs with compute capability of at least (?P<least>[\d.]+)",
            sample="ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
        ),
        Signature(
            words="requires+compute+capability",
            pattern=r"requires (?:CUDA |a GPU with )?compute capability (?:of )?(?:at least |>=? "
            r"?)(?P<least>\d+(?:\.\d)?)",
            title="this needs a GPU of capability {least} or newer",
            sample="RuntimeError: Blocked attention requires CUDA compute capability >= 8.0",
        ),
        Signature(
            words="newer+supported gpu+capability",
            pattern=r"only supported on (?:Pascal|Volta|Turing|Ampere|Hopper) and newer|Please use a GPU with "
            r"compute capability",
            tier=Tier.PROBE,
            sample="[WARNING]  NVIDIA Inference is only supported on Ampere and newer architectures",
        ),
    ),
)

ARCH_PARSE_BUG = Rule(
    id="arch-parse-bug",
    stage=Stage.COMPILE,
    title="this DeepSpeed{deepspeed_hint} cut a two-digit architecture such as 12.0 down to {arch}",
    fix="take a DeepSpeed that splits at the dot",
    steps=(step("python -m pip install -U deepspeed"), instead("python -m dsdoctor build-wheel --source newest")),
    manual="""An older DeepSpeed takes the first and the third character of the capability as its two numbers.

12.0 and 10.0 both become "1.", and nvcc is asked for compute_1.

Why it matters: GPUs of capability 10.0 and up cannot be built for with such a DeepSpeed.""",
    signatures=(
        Signature(
            words="unsupported+gpu value+gpu",
            pattern=r"(?:[Uu]nsupported gpu architecture|Value) '?(?P<arch>(?:compute|sm)_1[0-3]?\.?)'",
            tier=Tier.FILE,
            sample="nvcc fatal   : Unsupported gpu architecture 'compute_1.'",
        ),
        Signature(
            words="unknown+arch",
            pattern=r"Unknown CUDA arch \((?P<arch>\d{1,2}\.(?:\+PTX)?)\) or",
            sample="ValueError: Unknown CUDA arch (1.) or GPU not supported",
        ),
        Signature(
            words="literal",
            pattern=r"invalid literal for int\(\) with base 10: '(?P<arch>\.)'",
            sample="ValueError: invalid literal for int() with base 10: '.'",
        ),
    ),
)

NO_KERNEL_IMAGE = Rule(
    id="no-kernel-image",
    stage=Stage.RUN,
    title="the code that runs holds nothing for this GPU{arch_hint}",
    fix="build the ops for this GPU; if torch itself says so, take a torch that supports it",
    steps=(
        step("python -m dsdoctor prebuild --arch 9.0", note="yours: nvidia-smi --query-gpu=compute_cap --format=csv"),
        step("python -m dsdoctor check --deep"),
    ),
    manual="""An op, or torch itself, was compiled for other architectures than the GPU it runs on.

The reason is a wheel made elsewhere, a TORCH_CUDA_ARCH_LIST without this GPU, a cache (~/.cache/torch_extensions)
shared by machines, or a GPU newer than torch.

Why it matters: The first kernel that is started fails, although everything could be imported. An old cache keeps
the error alive after a correct build.""",
    signatures=(
        Signature(
            words="kernel+image cudaerrornokernelimagefordevice cuda_error_no_binary_for_gpu",
            pattern=r"no kernel image is available for execution|cudaErrorNoKernelImageForDevice"
            r"|CUDA_ERROR_NO_BINARY_FOR_GPU"
            r"|device kernel image is invalid",
            sample="RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
        Signature(
            words="invalid+device cudaerrorinvaliddevicefunction",
            pattern=r"CUDA error: invalid device function|cudaErrorInvalidDeviceFunction",
            sample="RuntimeError: CUDA error: invalid device function",
        ),
        Signature(
            words="ptx+toolchain",
            pattern=r"provided PTX was compiled with an unsupported toolchain",
            title="the PTX is newer than this driver understands",
            fix="update the driver, or build with machine code for this GPU and a toolkit no newer than the driver",
            steps=(step("python -m dsdoctor look"),),
            sample="RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        ),
        Signature(
            words="capability+compatible",
            pattern=r"with CUDA capability (?P<arch>sm_\d+) is not compatible with the current PyTorch installation",
            tier=Tier.PROBE,
            title="this torch was not built for {arch}",
            fix="take a torch whose CUDA release supports this GPU",
            steps=(
                step(
                    "python -m pip install -U torch --index-url https://download.pytorch.org/whl/{cuda_tag|CUDA_TAG}",
                    note="a CUDA release that the driver runs, such as cu128",
                ),
            ),
            sample="NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current "
            "PyTorch installation.",
        ),
    ),
)

RULES = (
    GPU_ARCH_UNSUPPORTED_BY_NVCC,
    ARCH_LIST_EMPTY,
    GPU_ARCH_UNKNOWN_TO_TORCH,
    GPU_TOO_OLD_FOR_OP,
    ARCH_PARSE_BUG,
    NO_KERNEL_IMAGE,
)
