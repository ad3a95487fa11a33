"""Lines of a log -> what they say of its machine: versions, folders, flags, the op being built."""

import re
from dataclasses import dataclass
from typing import Any

from dsdoctor.diagnosis.models import Facts

MAX_LISTED = 40

NAME = r"[`'\"]?([A-Za-z][\w.-]{0,60}?)"

FOLDERS = (
    r"(deepspeed|flash[-_]att(?:entio)?n|apex|transformer[-_]?engine|xformers|vllm|causal[-_]conv1d|mamba(?:[-_]ssm)?)"
)
"""Folders of sources whose name is that of the package; of others it may be anything."""

FOLDER_NAMES = {
    "flash-attention": "flash-attn",
    "transformerengine": "transformer-engine",
    "mamba": "mamba-ssm",
}

VARIABLES = {
    "aio": "async_io",
    "ccl_comm": "deepspeed_ccl_comm",
    "shm_comm": "deepspeed_shm_comm",
    "deep_compile": "dc",
}
"""DS_BUILD_<X> -> the op, where the names differ."""

OPS = (
    *("ops", "aio", "gds", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"),
    *("transformer", "stochastic_transformer", "transformer_inference", "inference_core_ops", "cutlass_ops"),
    *("ragged_ops", "ragged_device_ops", "quantizer", "fp_quantizer", "random_ltd", "spatial_inference"),
    *("sparse_attn", "evoformer_attn", "utils", "pin_memory", "deep_compile", "ccl_comm", "shm_comm"),
    "not_implemented",
)
"""What stands behind DS_BUILD_, in small letters; ``ops`` asks for all."""


@dataclass(frozen=True, kw_only=True)
class Clue:
    """How to find a fact: see Signature for ``words``; the first group is the value. ``last``: the last line with it counts."""

    name: str
    words: str
    pattern: str
    last: bool = False


RELEASE = r"(?:==|-|\s{1,30}|: |=| version: )v?(\d+\.\d+(?:\.\d+)?(?:\.?\w{1,8})?)(?=[\s,;)'\"/]|$)"
"""A package's version, behind its name."""

CLUES = (
    Clue(
        name="python",
        words="python3 python python_version",
        pattern=r"[/\\][Pp]ython(3\.\d+)[/\\]|\b[Pp]ython(?: version:?|:)? (3\.\d+(?:\.\d+)?)\b",
    ),
    Clue(name="python", words="torch_extensions", pattern=r"[/\\]py(3\d+)_"),
    Clue(
        name="torch",
        words="torch",
        pattern=r"Runtime torch version=([\d.]+\d)|\btorch(?:==|-| version[ .:]{1,40}|\s{1,30}|, "
        r")(\d+\.\d+(?:\.\d+)?(?:\.dev\d+)?(?:\+\w+)?)\b",
    ),
    Clue(
        name="cuda",
        words="torch+version torch+cuda torch_extensions torch+compiled",
        pattern=r"torch cuda version [ .]{1,40}(\d+\.\d+)|torch\S{1,20}\+cu(\d{3})\b|py3\d+_cu(\d{3})\b|torch "
        r"was compiled with (\d+\.\d+)"
        r"|torch \d\S{1,20}\+cu(\d{3})\b",
    ),
    # pip names what torch brings, also where it does not say which build of torch that is
    Clue(name="cuda", words="nvidia+runtime", pattern=r"\bnvidia-cuda-runtime(?:-cu\d{1,3})?(?:==|-)(\d+\.\d+)\."),
    Clue(
        name="nvcc",
        words="nvcc compilation+tools installed+cuda",
        pattern=r"nvcc version [ .]{1,40}(\d+\.\d+)|[Cc]uda compilation tools, release (\d+\.\d+)"
        r"|cuda-(\d+\.\d+)[/\\]bin[/\\]nvcc"
        r"|Installed CUDA version (\d+\.\d+)|CUDA[/\\]v(\d+\.\d+)[/\\]bin[/\\]nvcc",
    ),
    Clue(
        name="deepspeed",
        words="deepspeed git_hash",
        pattern=r"\bdeepspeed(?:-|==|\s{1,30}|@)v?(\d+\.\d+\.\d+\S{0,24}?)(?=\.tar|-cp|-py|[\s,/\\)'\"]|$)"
        r"|DeepSpeed info: version=(\d[^\s,]{2,30})"
        r"|deepspeed info [. ]{1,40}(\d[^\s,]{2,30})|^version=(\d[^\s,]{2,30}), git_hash",
    ),
    Clue(name="transformers", words="transformers", pattern=rf"\btransformers{RELEASE}"),
    Clue(name="accelerate", words="accelerate", pattern=rf"\baccelerate{RELEASE}"),
    Clue(
        name="zero_stage",
        words="stage zero_stage zero_optimization_stage deepspeedzerooptimizer_stage3 zero3 deepspeedzerooffload "
        "offload+persistent partitioned_param_coordinator",
        pattern=r"ZeRO stage ([0-3]) optimizer|zero_optimization_stage[ .:=]{1,40}([0-3])\b|\bzero_stage['\"]?[ =:]{1,3}([0-3])\b"
        r"|DeepSpeedZeroOptimizer_Stage(3)|['\"]zero_optimization['\"]: ?\{ ?['\"]stage['\"]: ?([0-3])\b|\bzero(3)\.json"
        r"|^['\"]stage['\"]: ([0-3]),?$|(DeepSpeedZeRoOffload) initialize|(Parameter Offload): Total persistent parameters"
        r"|[/\\]zero[/\\](partitioned_param_coordinator)\.py",
    ),
    Clue(
        name="experts",
        words="mixtral moe num_experts num_local_experts qwen2_moe qwen3_moe olmoe dbrx jamba deepseek+v2 deepseek+v3 "
        "deepseek_v2 deepseek_v3 deepseekv2forcausallm deepseekv3forcausallm gpt_oss mixtralforcausallm qwen3+a3b qwen3+a22b "
        "qwen2moeforcausallm qwen3moeforcausallm mixtralsparsemoeblock qwen2moesparsemoeblock qwen3moesparsemoeblock "
        "gptossforcausallm olmoeforcausallm modeling_mixtral modeling_qwen2_moe modeling_qwen3_moe modeling_deepseek "
        "modeling_jamba modeling_dbrx modeling_olmoe modeling_phimoe modeling_granitemoe modeling_gpt_oss modeling_glm4_moe "
        "expert_layer self+experts self+moe router_logits",
        pattern=r"\b(Mixtral[\w.-]{0,40}|[Mm]odeling_(?:mixtral|qwen\d_moe|deepseek|jamba|dbrx|olmoe|phimoe|granitemoe|gpt_oss|glm4_moe)"
        r"|mixtral[\w.-]{0,30}|Qwen\w{0,4}-?MoE[\w.-]{0,20}"
        r"|[Qq]wen\d_moe|Qwen[23]Moe\w{0,30}|Qwen3-\d{1,3}B-A\d{1,2}B|[Dd]eep[Ss]eek[-_]?[Vv][23]\w{0,20}|DeepSeek-MoE\S{0,10}|OLMoE\S{0,20}"
        r"|Olmoe\w{0,20}|DBRX|Jamba\S{0,20}|GptOss\w{0,20}|gpt_oss|num_(?:local_)?experts|[Mm][Oo][Ee]-\w{1,20}|expert_layer(?=\()|self\.experts(?=[\[(])|self\.moe(?=\()|router_logits)\b",
    ),
    Clue(
        name="attention",
        words="sdpa flash_attention_2 attn_implementation flashattention flash_attn",
        pattern=r"(?i)Using torch (SDPA)|attn_implementation['\"]?[ =:]{1,3}['\"]?(sdpa|eager|flash_attention_\d)"
        r"|Using (FlashAttention-\d)",
    ),
    Clue(
        name="gcc",
        words="gcc+version gcc+x86_64 include+c gcc+lib",
        pattern=r"gcc version (\d+[\d.]*)|\b(?:gcc|g\+\+|c\+\+)(?:-\d+)? \([^)]{1,60}\) (\d+\.\d+\.\d+)"
        r"|/include/c\+\+/(\d+)[./]|lib/gcc/[\w-]+/(\d+)",
    ),
    Clue(
        name="nodes", words="min_nodes nnodes", pattern=r"\bmin_nodes {1,12}: (\d{1,6})$|--nnodes[ =](\d{1,6})(?![\d:])"
    ),
    Clue(name="pip", words="pip", pattern=r"\bpip (\d+\.\d+\S{0,8}) from|Using pip (\d+\.\d+\S{0,8})"),
    Clue(
        name="cuda_home",
        words="cuda_home cuda_path",
        pattern=r"\b(?:CUDA_HOME|CUDA_PATH)\s?[=:]\s?['\"]?(/[^'\"\s]{1,120})",
    ),
    Clue(name="cuda_home", words="nvcc", pattern=r"(?:^|\s|ccache )(/\S{1,120})/bin/nvcc\s"),
    Clue(name="cuda_home", words="dtorch_extension_name", pattern=r"-(?:isystem |I)(/usr(?:/local)?)/include\s"),
    Clue(name="cache", words="extensions", pattern=r"Using (\S{1,200}) as PyTorch extensions root"),
    Clue(name="standard", words="std", pattern=r"^.*-std=((?:c|gnu)\+\+\d\w)", last=True),
    Clue(
        name="accelerator",
        words="ds_accelerator accelerator",
        pattern=r"Setting ds_accelerator to (\w+)|Setting accelerator to (\w+)",
    ),
    Clue(
        name="arch_list",
        words="torch_cuda_arch_list",
        pattern=r"TORCH_CUDA_ARCH_LIST=['\"]?([\w.;+ ]{1,80}?)(?=['\"]|\s\S*=|\s[a-z]|$)",
    ),
    Clue(
        name="op",
        words="extension+module dtorch_extension_name building+deepspeed building+extension",
        pattern=r"(?:Building|Loading) extension module (\w+?)(?:_v\d+)?\b\.|building "
        r"'deepspeed\.[\w.]*?\b(\w+?)(?:_op)?' extension"
        r"|Error building extension '(\w+?)(?:_v\d+)?'|-DTORCH_EXTENSION_NAME=\\*\"?(\w+?)(?:_op)?[\s\\\"]",
        last=True,
    ),
    Clue(
        name="project",
        words="collecting building+wheel building+editable setup failed+building failed+build obtaining processing depends "
        "installing successfully+installed successfully+built extensions+root",
        pattern=rf"(?i:^(?:Collecting|Processing|Obtaining) (?:file://|git\+)?\S{{0,200}}/{FOLDERS}(?:[-@.]\S{{0,80}})?/?(?: |$))"
        rf"|^Collecting {NAME}(?=[\s=<>!~;@\[(]|$)|Building (?:wheel|editable) for {NAME}(?=[\s=<>!~;@\[(]|$)"
        rf"|Failed (?:building wheel for|to (?:download and )?build) {NAME}(?=[\s=<>!~;@\[('\"`]|$)"
        rf"|based projects \({NAME}[,)]|[/\\]pip-install-\w{{1,20}}[/\\]{NAME}_[0-9a-f]{{1,40}}[/\\]"
        rf"|`{NAME}@[\w.+-]{{1,40}}` depends on|^[-•] Installing {NAME} \(|Running setup\.py install for {NAME}(?=[\s:]|$)"
        rf"|(?i:[/\\]{FOLDERS}(?:-[\w.]{{1,20}})?[/\\]setup\.py)\b"
        r"|^(Processing|Obtaining) |building '(deepspeed)\.|^(Successfully) (?:installed|built)\b|(as PyTorch extensions root)",
        last=True,
    ),
    Clue(
        name="op",
        words="torch_extensions",
        pattern=r"torch_extensions[/\\](?:[\w.-]{1,100}[/\\])?(\w{1,100})[/\\]build\.ninja",
        last=True,
    ),
)

LISTS = (
    Clue(name="architectures", words="gencode", pattern=r"compute_(\d+[a-z]?)"),
    Clue(name="asked", words=" ".join(f"ds_build_{name}" for name in OPS), pattern=r"\bDS_BUILD_(\w+)=[\"']?1\b"),
)

INSTALL_OPS = Clue(name="install_ops", words="install", pattern=r"Install Ops=\{([^{}]{0,3000})\}")


class FactReader:
    """Collects the facts of one log while it is read."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lists: dict[str, dict[str, None]] = {"architectures": {}, "asked": {}}
        self.ops: dict[str, bool] = {}

    def read(self, clue: Clue, text: str) -> bool:
        """Take a clue's fact from a line that may hold it. True: no other line needs to be searched for it."""
        if clue.name in self.lists:
            values = self.lists[clue.name]
            for value in re.findall(clue.pattern, text)[:MAX_LISTED]:
                if len(values) < MAX_LISTED:
                    values.setdefault(value)
        elif clue is INSTALL_OPS:
            if found := re.search(clue.pattern, text):
                pairs = re.findall(r"'(\w+)': (\w+)", found[1])
                self.ops = {op: state not in {"False", "0"} for op, state in pairs[:100]}
        elif (clue.last or clue.name not in self.values) and (found := re.search(clue.pattern, text)):
            self.values[clue.name] = _normal(clue.name, next(value for value in found.groups() if value))
        return not clue.last and clue.name in self.values

    def facts(self) -> Facts:
        """What was found."""
        asked = tuple(op_of(variable) for variable in self.lists["asked"])
        lists: dict[str, Any] = {
            "architectures": tuple(self.lists["architectures"]),
            "asked": asked,
            "built": tuple(op for op, built in self.ops.items() if built),
            "left_out": tuple(op for op, built in self.ops.items() if not built),
        }
        values: dict[str, Any] = {**self.values}
        return Facts(**values, **lists)


def op_of(variable: str) -> str:
    """The op that DS_BUILD_<variable> builds.

    >>> op_of("AIO"), op_of("CPU_ADAM")
    ('async_io', 'cpu_adam')
    """
    return VARIABLES.get(variable.lower(), variable.lower())


def _normal(name: str, value: str) -> str:
    """``118`` -> ``11.8``; ``310`` -> ``3.10``."""
    if name == "cuda" and value.isdigit():
        return f"{value[:-1]}.{value[-1]}"
    if name == "python" and value.isdigit():
        return f"{value[0]}.{value[1:]}"
    if name == "zero_stage" and not value.isdigit():
        return "3"  # why: only that stage divides the parameters
    if name == "experts" and value in {"expert_layer", "self.experts", "self.moe", "router_logits"}:
        return f"the log has {value}"
    if name == "project":
        return _package(value)
    return value


def _package(value: str) -> str:
    """The name of a package as pip takes it; nothing for words that only say that a build is over.

    >>> _package("flash_attn"), _package("TransformerEngine"), _package("Successfully")
    ('flash-attn', 'transformer-engine', '')
    """
    if value in {"Processing", "Obtaining", "Successfully", "as PyTorch extensions root"}:
        return ""
    name = value.lower().replace("_", "-").rstrip(".")
    return FOLDER_NAMES.get(name, name)
