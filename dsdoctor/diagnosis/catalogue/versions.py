"""Rules of packages that do not go together: bounds of versions, numpy 2, and compiled packages that are not DeepSpeed's."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.load import FOREIGN
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

PACKAGE_VERSION_BOUND = Rule(
    id="package-version-bound",
    stage=Stage.RUN,
    title="a package asks for {wanted}, and {found|another version} is installed",
    fix="install a version within the bound, or a version of the asking package that takes what is here",
    steps=(step("python -m pip install {wanted}"),),
    manual="""A package checks the version of another one when it is imported, and refuses what it finds.

transformers, accelerate, LLaMA-Factory and others name the DeepSpeed, transformers or accelerate that they were tested
with. The bound is often an upper one, too.

Why it matters: Nothing starts until the versions fit.""",
    signatures=(
        Signature(
            words="functioning+required+normal",
            pattern=r"Error: (?P<wanted>[\w.-]{1,60}[<>=!~]=?[\w.,<>=!~*-]{1,60}) is required for a normal "
            r"functioning of this module"
            r"(?:, but found (?P<found>[\w.-]{1,60}==[\w.+-]{1,40}\w))?",
            sample="ImportError: deepspeed>=0.9.3 is required for a normal functioning of this module, but found "
            "deepspeed==0.8.3.",
        ),
        Signature(
            words="must+deepspeed+version",
            pattern=r"DeepSpeed (?:\w{1,8} )?version must be (?P<wanted>>= [\d.]{1,12}\d)",
            title="accelerate asks for a DeepSpeed version {wanted}",
            steps=(step("python -m pip install -U deepspeed"),),
            sample="ImportError: DeepSpeed version must be >= 0.9.3. Please update DeepSpeed.",
        ),
        Signature(
            words="trainer+requires",
            pattern=r"Using the `Trainer` with `PyTorch` requires `(?P<wanted>accelerate>=[\d.]{1,12}\d)`",
            title="the Trainer asks for {wanted}",
            sample="ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=1.1.0`: Please run "
            "`pip install transformers[torch]`",
        ),
    ),
)

NUMPY_CHANGED = Rule(
    id="numpy-changed",
    stage=Stage.RUN,
    title="this code was written or built for an older numpy: {what}",
    fix="upgrade the package that fails, or take an older numpy: below 2 for what numpy 2 removed or changed, "
    "below 1.24 for np.float, np.int, np.bool and np.object",
    steps=(step("python -m pip install 'numpy<2'"), instead("python -m pip install 'numpy<1.24'")),
    manual="""numpy removed names, or changed the layout of what compiled packages were built with.

numpy 1.24 removed np.float, np.int, np.bool and np.object; numpy 2.0 removed more and changed its binary interface, so
packages that were compiled for numpy 1 have to be built again.

Why it matters: The import or the first use fails, in whatever package it is.""",
    signatures=(
        Signature(
            words="numpy+attribute",
            pattern=r"AttributeError: module 'numpy' has no attribute "
            r"(?P<what>'(?:float|int|bool|object|complex|str|long|unicode)')\.?",
            title="{what} of np was removed from numpy (1.24), and this code uses it",
            sample="AttributeError: module 'numpy' has no attribute 'float'.",
        ),
        Signature(
            words="removed+numpy",
            pattern=r"(?P<what>`np\.\w{1,30}`) was removed in the NumPy 2\.0 release",
            sample="AttributeError: `np.float_` was removed in the NumPy 2.0 release. Use `np.float64` instead.",
        ),
        Signature(
            words="changed+numpy+size ufunc+numpy+size",
            pattern=r"ValueError: (?P<what>numpy\.(?:dtype|ufunc|ndarray) size changed)",
            title="a compiled package was built for another numpy ({what})",
            sample="ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from "
            "C header, got 88",
        ),
        Signature(
            words="compiled+numpy multiarray+import",
            pattern=r"A module that was compiled using (?P<what>NumPy 1\.x) cannot be run in|ImportError: "
            r"(?P<what2>numpy\.core\."
            r"(?:multiarray|umath) failed to import)",
            tier=Tier.GENERIC,
            title="a compiled package was built for numpy 1, and numpy 2 is installed",
            sample="A module that was compiled using NumPy 1.x cannot be run in",
        ),
    ),
)

FLASH_ATTENTION_UNAVAILABLE = Rule(
    id="flash-attention-unavailable",
    stage=Stage.RUN,
    title="flash attention is asked for, and it is not installed or cannot run here",
    fix="install flash-attn for this torch, or load the model with attn_implementation='sdpa', which needs nothing",
    steps=(step("python -m pip install flash-attn --no-build-isolation"), step("python -m pip show flash-attn")),
    manual="""The model is to use FlashAttention, and the package flash-attn (flash_attn) is not usable.

It is a package of its own, compiled for one torch and one CUDA release. FlashAttention 2 needs an Ampere GPU or newer,
version 1 a Turing; there is none for the CPU.

Why it matters: The model is not loaded. It has nothing to do with DeepSpeed's own ops.""",
    signatures=(
        Signature(
            words="toggled+error flashattention2 flashattention3",
            pattern=r"FlashAttention ?[234]? has been toggled on, but it cannot be used due to the following error",
            sample="ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following "
            "error: the package flash_attn seems to be not installed.",
        ),
        Signature(
            words="flash_attn+named flash_attn_2_cuda+named",
            pattern=r"No module named '?(?P<module>flash_attn(?:_2_cuda|_3_cuda|\.[\w.]{1,60})?)\b",
            sample="ModuleNotFoundError: No module named 'flash_attn'",
        ),
    ),
)

FOREIGN_EXTENSION_MISMATCH = Rule(
    id="foreign-extension-mismatch",
    stage=Stage.LOAD,
    title="{module} was built for another torch than this one{torch_hint}; it is no op of DeepSpeed",
    fix="build or install {module} again for this torch (its own wheels name the torch they are for); DeepSpeed "
    "itself need not be built",
    steps=(step("python -m pip list"), step("python -m pip show {module}")),
    manual="""A compiled package other than DeepSpeed could not be loaded: it was built against another torch.

flash-attn, apex, transformer_engine, xformers, torchvision, Megatron's kernels and others are compiled for one release
of torch each, and break when torch is upgraded. The path before "undefined symbol" tells whose file it is.

Why it matters: Building DeepSpeed again does not help.""",
    signatures=(
        Signature(
            words="flash_attn_2_cuda+undefined flash_attn_3_cuda+undefined flash_attn+undefined",
            pattern=FOREIGN + r"(?P<module>flash_attn)\w{0,20}[^\s:]{0,200}\.so[\w.]{0,20}: undefined symbol",
            title="flash-attn ({module}) was built for another torch than this one{torch_hint}; it is no op of "
            "DeepSpeed",
            fix="install flash-attn again for this torch; DeepSpeed itself need not be built",
            steps=(step("python -m pip install --force-reinstall --no-deps --no-build-isolation flash-attn"),),
            sample="ImportError: "
            "/venv/lib/python3.10/site-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined "
            "symbol: _ZN3c104cuda9SetDeviceEa",
        ),
        Signature(
            words="undefined+symbol",
            pattern=FOREIGN
            + r"(?!flash_attn)(?P<module>[A-Za-z]\w{0,60})[^\s:]{0,200}\.so[\w.]{0,20}: undefined symbol: "
            r"(?:_Z\w{0,300}?(?:3c10|c104|2at|5torch|6caffe2|4c10d)|THP|aoti_torch)",
            sample="ImportError: /venv/lib/python3.10/site-packages/amp_C.cpython-310-x86_64-linux-gnu.so: "
            "undefined symbol: _ZN3c104cuda9SetDeviceEi",
        ),
        Signature(
            words="torchvision+nms",
            pattern=r"operator (?P<module>torchvision)::nms does not exist",
            title="{module} is of another release than torch{torch_hint}",
            fix="install the torchvision that belongs to this torch",
            steps=(step("python -m pip install -U torch torchvision"),),
            sample="RuntimeError: operator torchvision::nms does not exist",
        ),
    ),
)

FOREIGN_EXTENSION_MISSING = Rule(
    id="foreign-extension-missing",
    stage=Stage.RUN,
    title="{module} is not installed: it is built from the source of its own project, and the package of that "
    "name on PyPI is another",
    fix="build it from its own source, for this torch; or switch off in the script what asks for it",
    steps=(
        step("git clone https://github.com/NVIDIA/apex"),
        step("python -m dsdoctor explain foreign-extension-missing"),
    ),
    manual="""A script imports compiled code of NVIDIA apex, Megatron or Transformer Engine, and it is not there.

apex, with amp_C, apex_C and fused_layer_norm_cuda, is built from https://github.com/NVIDIA/apex; `pip install apex`
gives another project. transformer_engine is installed as transformer_engine[pytorch]. Megatron is megatron-core, or
the source on PYTHONPATH. torch has fused optimizers and amp of its own.

Why it matters: The import fails, and building DeepSpeed does not bring it.""",
    signatures=(
        Signature(
            words="apex+named amp_c+named apex_c+named fused_layer_norm_cuda+named "
            "fused_weight_gradient_mlp_cuda+named",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named '?(?P<module>apex(?:\.[\w.]{1,60})?|amp_C|apex_C"
            r"|fused_layer_norm_cuda|fused_weight_gradient_mlp_cuda)\b",
            title="NVIDIA apex ({module}) is not installed; `pip install apex` would give another project",
            sample="ModuleNotFoundError: No module named 'apex'",
        ),
        Signature(
            words="amp+apex+import",
            pattern=r"cannot import name '(?P<name>amp|optimizers|parallel)' from '(?P<module>apex)'",
            title="{module} has no {name}: another project of that name is installed (pip install apex), or a newer "
            "NVIDIA apex that has dropped it",
            fix="uninstall apex if nothing needs it: transformers and DeepSpeed work without; else build NVIDIA apex "
            "from its own source, of a release "
            "that has {name}",
            steps=(step("python -m pip uninstall -y apex"), step("python -m pip show apex")),
            sample="ImportError: cannot import name 'amp' from 'apex' (unknown location)",
        ),
        Signature(
            words="shared+transformer+engine",
            pattern=r"FileNotFoundError: Could not find shared object file for (?P<module>Transformer Engine) "
            r"\w{2,10} lib",
            title="{module} was installed without its part for torch",
            fix="install transformer_engine[pytorch] for this torch and CUDA: without the extra, or when its build was "
            "skipped, only the common part is there",
            steps=(step("python -m pip install --no-build-isolation 'transformer_engine[pytorch]'"),),
            sample="FileNotFoundError: Could not find shared object file for Transformer Engine torch lib.",
        ),
        Signature(
            words="megatron+named",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named '?(?P<module>megatron(?:\.[\w.]{1,60})?)\b",
            title="Megatron ({module}) is not on the path",
            fix="put the source of Megatron (Megatron-DeepSpeed) on PYTHONPATH, or install megatron-core",
            steps=(
                step("export PYTHONPATH=/path/to/Megatron-DeepSpeed"),
                instead("python -m pip install megatron-core"),
            ),
            sample="ModuleNotFoundError: No module named 'megatron'",
        ),
        Signature(
            words="transformer_engine+named transformer_engine_torch+named",
            pattern=r"(?:ModuleNotFound|Import)Error: No module named "
            r"'?(?P<module>transformer_engine(?:_torch|\.[\w.]{1,60})?)\b",
            title="Transformer Engine ({module}) is not installed",
            fix="install it for torch, without build isolation",
            steps=(step("python -m pip install --no-build-isolation 'transformer_engine[pytorch]'"),),
            sample="ModuleNotFoundError: No module named 'transformer_engine'",
        ),
    ),
)

RULES = (
    PACKAGE_VERSION_BOUND,
    NUMPY_CHANGED,
    FLASH_ATTENTION_UNAVAILABLE,
    FOREIGN_EXTENSION_MISMATCH,
    FOREIGN_EXTENSION_MISSING,
)
