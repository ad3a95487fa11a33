"""Lines of a log -> what they say of its machine: versions, folders, flags, the op being built."""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.diagnosis.models import Facts

MOST = 40
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
    "ops",
    "aio",
    "gds",
    "cpu_adam",
    "cpu_adagrad",
    "cpu_lion",
    "fused_adam",
    "fused_lamb",
    "fused_lion",
    "transformer",
    "stochastic_transformer",
    "transformer_inference",
    "inference_core_ops",
    "cutlass_ops",
    "ragged_ops",
    "ragged_device_ops",
    "quantizer",
    "fp_quantizer",
    "random_ltd",
    "spatial_inference",
    "sparse_attn",
    "evoformer_attn",
    "utils",
    "pin_memory",
    "deep_compile",
    "ccl_comm",
    "shm_comm",
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
            for value in re.findall(clue.pattern, text)[:MOST]:
                if len(values) < MOST:
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


# The message of torch's allocator that the GPU is full -> who holds the memory. Judges by its figures alone.


UNITS = {"KiB": 1 / 2**20, "MiB": 1 / 2**10, "GiB": 1.0}
SIZE = r"(?<![\d.])(\d{1,9}(?:\.\d{1,9})?) ([KMG]iB)"
TOTAL = re.compile(rf"total capac(?:i)?ty of {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
OTHERS = re.compile(rf"Process (\d{{1,9}}) has {SIZE} memory in use")
OWN = re.compile(rf"this process has {SIZE} memory in use")
LOOSE = re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")
ALLOCATED = re.compile(rf"{SIZE} is allocated by PyTorch")

MUCH = 0.25
"""From this share of the GPU on it matters what other processes hold."""

OF_CUDA = 1.5
"""Up to so many times of what torch holds a process may hold with CUDA's own context and NCCL's buffers."""


@dataclass(frozen=True, kw_only=True)
class OtherProcesses:
    """Other processes on the same GPU: their numbers, what they hold, and what the one that failed holds, in GiB.

    ``among_them``: the one that failed is one of them, and the message does not tell which.
    """

    pids: tuple[str, ...]
    held: float
    own: float
    among_them: bool = False


def held_by_others(text: str) -> OtherProcesses | None:
    """The other processes that hold more than all that this one left unused, and much of the GPU; None else.

    A container does not know its own number on the host: where the message names no "this process", it is the one of them
    that holds as much as torch says that it does, or a little more.

    >>> message = ("a total capacity of 79.25 GiB of which 410.94 MiB is free. Process 4711 has 44.71 GiB memory in use. "
    ...     "this process has 34.12 GiB memory in use. 1.20 GiB is reserved by PyTorch but unallocated")
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=34.12, among_them=False)
    >>> held_by_others(message.replace("44.71 GiB", "310.20 MiB")) is None
    True
    >>> message = message.replace("this process", "Process 12").replace("34.12", "9.12") + "; 7.50 GiB is allocated by PyTorch"
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=9.12, among_them=False)
    """
    total, own = _size(TOTAL, text), _size(OWN, text)
    others = [(pid, float(number) * UNITS[unit]) for pid, number, unit in OTHERS.findall(text)]
    mine = [] if own else _may_be_mine(others, _size(ALLOCATED, text) + _size(LOOSE, text))
    if len(mine) == 1:
        others, own = [one for one in others if one is not mine[0]], mine[0][1]
    if not others or not (own or mine) or not total:
        return None
    held = sum(size for _, size in others)
    foreign = held - max((size for _, size in mine), default=0.0) if len(mine) > 1 else held
    if foreign < MUCH * total or foreign <= _size(FREE, text) + _size(LOOSE, text):
        return None
    return OtherProcesses(pids=tuple(pid for pid, _ in others), held=held, own=own, among_them=len(mine) > 1)


def _may_be_mine(processes: list[tuple[str, float]], torch: float) -> list[tuple[str, float]]:
    """The processes that torch's own figures may be of."""
    least = min((size for _, size in processes if size >= torch), default=0.0)
    return [one for one in processes if torch and torch <= one[1] <= max(least, torch * OF_CUDA)]


def _size(pattern: re.Pattern[str], text: str) -> float:
    """A figure of the message in GiB; 0 where it is not told."""
    found = pattern.search(text)
    return float(found[1]) * UNITS[found[2]] if found else 0.0


# A template of the catalogue and what was read -> a sentence, and the values for a step.


FIELD = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
PACKAGES = {
    "dskernels": "deepspeed-kernels",
    "cpuinfo": "py-cpuinfo",
    "distutils": "setuptools",
    "setuptools": "setuptools",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "cv2": "opencv-python-headless",
    "lightning_fabric": "lightning",
}
KNOWN_PACKAGES = frozenset(
    {
        *PACKAGES.values(),
        *(
            "einops",
            "hjson",
            "msgpack",
            "ninja",
            "numpy",
            "packaging",
            "psutil",
            "pydantic",
            "torch",
            "tqdm",
            "triton",
            "mpi4py",
        ),
        *(
            "transformers",
            "accelerate",
            "datasets",
            "tokenizers",
            "safetensors",
            "sentencepiece",
            "huggingface-hub",
            "peft",
            "trl",
        ),
        *(
            "bitsandbytes",
            "wandb",
            "tensorboard",
            "evaluate",
            "diffusers",
            "torchvision",
            "torchaudio",
            "torchdata",
            "scipy",
        ),
        *(
            "pandas",
            "pyarrow",
            "regex",
            "requests",
            "six",
            "wheel",
            "deepspeed",
            "deepspeed-mii",
            "lm-eval",
            "optimum",
            "vllm",
        ),
        *(
            "ray",
            "megatron-core",
            "sympy",
            "protobuf",
            "tiktoken",
            "matplotlib",
            "pytest",
            "omegaconf",
            "hydra-core",
            "timm",
        ),
        *(
            "tensorboardx",
            "py-spy",
            "pybind11",
            "tabulate",
            "comet-ml",
            "mlflow",
            "xformers",
            "liger-kernel",
            "fire",
            "jinja2",
        ),
    }
)
"""What a command to install may name. A log chooses any other name, and so whose package it would be: a missing module may be a
file of one's own, whose name is anybody's to take on an index."""
INSTALLS = re.compile(r"\bpip (?:install|download)\b")
PACKAGE_FIELDS = frozenset({"package", "program", "wanted"})
HOST_FIELDS = {"host": "HOST", "ip": "NODE"}
PATH_FIELDS = frozenset({"path", "file", "script", "program", "error", "checkpoint_folder", "cache", "cache_aside"})
NUMBER_FIELDS = frozenset({"pid", "port", "other_port", "python", "newest"})
PATH_FORM = re.compile(r"(?!-)(?!\w+://)[\w./~+@%=,: -]+")
"""Letters, digits and what stands in the names of files; no character that a shell or a glob takes for something else."""
NUMBER_FORM = re.compile(r"\d{1,10}(?:\.\d{1,6}){0,3}", re.ASCII)
NAME_FORM = re.compile(r"(?!-)[\w./:+\[\],<>=!~;@-]+", re.ASCII)
"""A package with its versions, an address of an index, an architecture, an op: one word."""
RUN_BY_STEP = re.compile(r"(?:\bpython|\bchmod \+x) \{(?P<name>\w+)")
"""A file that a command runs, or makes one that can be run: a log chooses none."""
LAUNCHER_PACKAGES = {"pdsh": "pdsh", "srun": "slurm-client", "mpirun_rsh": "mvapich2", "mpichversion": "mpich"}
LONGEST = 160
LAST_PORT = 65535


def fill(template: str, values: Mapping[str, str]) -> str:
    """Fill ``{name}`` or ``{name|text without it}``; ``{name_hint}`` is " (value)", or nothing.

    >>> fill("nvcc is CUDA {nvcc|another}, torch {torch}{arch_hint}", {"torch": "2.1.0", "arch": "sm_90"})
    'nvcc is CUDA another, torch 2.1.0 (sm_90)'
    """
    return FIELD.sub(lambda found: _value(found, values), template)


def placeholders(template: str) -> dict[str, str]:
    """A name in capitals for each field of a template that has no text of its own without a log.

    >>> placeholders("build {op} for {arch|all}{cuda_hint}")
    {'op': 'OP'}
    """
    fields = (found for found in FIELD.finditer(template) if found[2] is None and not found[1].endswith("_hint"))
    return {found[1]: found[1].upper() for found in fields}


def values_of(groups: Mapping[str, str], facts: Facts, op: str | None) -> dict[str, str]:
    """What templates may name: the facts, then what the line itself says, then names derived from them."""
    values = {name: value for name, value in vars(facts).items() if isinstance(value, str)}
    if op:
        values["op"] = op
    values |= {name: value[:LONGEST] for name, value in groups.items()}
    if "torch_extensions" not in values.get("cache", "") or ".." in values["cache"]:
        values.pop("cache", None)  # the fix moves this folder, so it must be the right one
    if cache := values.get("cache"):
        values["cache_aside"] = f"{cache.rstrip('/')}.old"
    if cuda := values.get("cuda"):
        values["cuda_dashed"] = cuda.replace(".", "-")
        values["cuda_tag"] = f"cu{cuda.replace('.', '')}"
    values |= _torch_again(values.get("torch", ""), values.get("cuda_tag"))
    if module := values.get("module"):
        values["package"] = known_package(module.split(".")[0]) or "PACKAGE"
    if path := values.get("path"):
        values["checkpoint_folder"] = posixpath.dirname(path) if posixpath.basename(path) == "latest" else path
    if (port := values.get("port", "")).isdigit():
        values["other_port"] = str(int(port) + 1 if int(port) < LAST_PORT else int(port) - 1)
    if launcher := values.get("launcher"):
        values["launcher_package"] = LAUNCHER_PACKAGES.get(launcher, "openmpi-bin")
    return values


def known_package(name: str) -> str | None:
    """The package that an index has under this name, or that brings this module; None for one that is anybody's to take.

    >>> known_package("yaml"), known_package("huggingface_hub"), known_package("my_company_internal")
    ('pyyaml', 'huggingface-hub', None)
    """
    package = PACKAGES.get(name, name.replace("_", "-").lower())
    return package if package in KNOWN_PACKAGES else None


def values_of_step(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """What a command may take of a log: no host, nothing that it would run or make runnable, of packages to install or download
    those that are known, and of all else what has the form of a path, a number or a name.

    >>> values_of_step("pip install {wanted}", {"wanted": "evil>=1", "host": "h", "ip": "10.0.0.1"})
    {'wanted': 'PACKAGE', 'host': 'HOST', 'ip': 'NODE'}
    >>> values_of_step("ls -l {path}", {"path": "/data/a b"}), values_of_step("ls -l {path|MODEL}", {"path": "/a;id"})
    ({'path': '/data/a b'}, {})
    """
    taken = {name: value for name, value in values.items() if _form_of(name).fullmatch(value) and value.isprintable()}
    taken |= {name: without for name, without in HOST_FIELDS.items() if name in values}
    for found in RUN_BY_STEP.finditer(template):
        taken.pop(found["name"], None)
    if INSTALLS.search(template):
        for field in PACKAGE_FIELDS & set(values):
            named = re.match(r"[\w.-]*\w", values[field])
            if field not in taken or named is None or known_package(named[0]) is None:
                taken[field] = "PACKAGE"
    return taken


def _form_of(name: str) -> re.Pattern[str]:
    return NUMBER_FORM if name in NUMBER_FIELDS else PATH_FORM if name in PATH_FIELDS else NAME_FORM


def _torch_again(torch: str, tag: str | None) -> dict[str, str]:
    """The torch of the log as a requirement, with the index that has it; nothing where the log does not say.

    >>> _torch_again("2.8.0+cu128", None)
    {'torch_requirement': 'torch==2.8.0', 'torch_index': 'https://download.pytorch.org/whl/cu128'}
    """
    release, _, local = torch.partition("+")
    if not release or not (local or tag):
        return {}
    return {"torch_requirement": f"torch=={release}", "torch_index": f"https://download.pytorch.org/whl/{local or tag}"}


def groups_of(found: re.Match[str]) -> dict[str, str]:
    """The named groups that matched; ``name2`` is another wording's ``name``.

    >>> groups_of(re.search("(?P<op>x)|(?P<op2>y)", "y"))
    {'op': 'y'}
    """
    return {name.rstrip("23456"): value for name, value in found.groupdict().items() if value}


def _value(found: re.Match[str], values: Mapping[str, str]) -> str:
    name, fallback = found[1], found[2]
    if name.endswith("_hint"):
        value = values.get(name.removesuffix("_hint"))
        return f" ({value})" if value else ""
    known = values.get(name)
    if known is None:
        return fallback if fallback is not None else "(unknown)"
    return known
