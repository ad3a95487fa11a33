"""Whose a place in a traceback is: a project's, Python's or the user's own; and whether it only passes on what others raise.

"Not below site-packages" is no test of the user's own code: training frameworks run from clones, and a console script such as
``/usr/local/bin/trl`` belongs to its package.
"""

import re
from functools import lru_cache

PYTHON = "Python"

DSDOCTOR = "dsdoctor"

REMOTE_CODE = "the model's own code"  # what a library downloaded with a model and runs (trust_remote_code)
INSTALLED = re.compile(r"(?:site|dist)-packages[/\\](?:(?P<package>[^/\\]{1,80})[/\\]|(?P<module>[^/\\.]{1,80}))")

STANDARD_LIBRARY = re.compile(
    r"^<(?!ipython-input)|[/\\]lib(?:64)?[/\\]python3(?:\.\d{1,2})?[/\\](?!(?:site|dist)-packages)|\.p(?:yx|xi)$"
)

CONSOLE_SCRIPT = re.compile(r"[/\\](?:s?bin|Scripts)[/\\](?P<name>[A-Za-z][\w-]{0,60})$")

TITLES = {
    "_pytest": "pytest",
    "accelerate": "accelerate",
    "areal": "AReaL",
    "axolotl": "axolotl",
    "colossalai": "ColossalAI",
    "datasets": "datasets",
    "deepspeed": "DeepSpeed",
    "diffusers": "diffusers",
    "fastchat": "FastChat",
    "flash_attn": "flash-attn",
    "hydra": "hydra-core",
    "internvl": "InternVL",
    "lightning": "Lightning",
    "lightning_fabric": "Lightning",
    "litgpt": "LitGPT",
    "llamafactory": "LLaMA-Factory",
    "llava": "LLaVA",
    "llmtuner": "LLaMA-Factory",
    "megatron": "Megatron-LM",
    "nemo": "NeMo",
    "nemo_rl": "NeMo RL",
    "open_r1": "open-r1",
    "openrlhf": "OpenRLHF",
    "peft": "peft",
    "pytorch_lightning": "Lightning",
    "ray": "Ray",
    "realhf": "AReaL",
    "roll": "ROLL",
    "sglang": "SGLang",
    "skyrl_gym": "SkyRL",
    "skyrl_train": "SkyRL",
    "slime": "slime",
    "slime_plugins": "slime",
    "swift": "ms-swift",
    "torchtitan": "torchtitan",
    "torchtune": "torchtune",
    "transformer_engine": "transformer-engine",
    "transformers": "transformers",
    "trl": "TRL",
    "unsloth": "unsloth",
    "unsloth_zoo": "unsloth",
    "verl": "verl",
    "vllm": "vLLM",
    "vllm_ascend": "vLLM Ascend",
    "xtuner": "XTuner",
}
"""The packages that also run from a clone, and what their projects are called where that differs from the package's name."""

LIBRARIES = frozenset(
    {
        *(
            "torch",
            "torchvision",
            "transformers",
            "accelerate",
            "datasets",
            "peft",
            "DeepSpeed",
            "diffusers",
            "flash-attn",
        ),
        *(
            "Lightning",
            "Ray",
            "hydra-core",
            "jinja2",
            "pydantic",
            "tokenizers",
            "huggingface_hub",
            "safetensors",
            "pyarrow",
        ),
        *(
            "numpy",
            "pandas",
            "triton",
            "bitsandbytes",
            "transformer-engine",
            "omegaconf",
            "aiohttp",
            "httpx",
            "requests",
        ),
        *("fire", "click", "typer", "multiprocess", "torchdata", "pytest", "wandb", "joblib", "sympy", "scipy"),
    }
)
"""Libraries that only pass a value on: what they got, a program above them has chosen."""

SUBPACKAGES = (
    r"(?:_private|_internal|_utils|actors?|api|args|arguments?|backends?|base_config|callbacks?|chat|cli|cli_main|collections|commands?|common|config|core|data"
    r"|datasets?|distributed|engine|evals?|experimental|extras?|extensions|hparams|integrations|interactions|legacy|llm|loaders|lightning"
    r"|loss|models?|monkeypatch|optimizers?|pipelines?|plugins?|post_training|prompt_strategies|protocol|ray|recipes?|rewards?|rlhf|rollout"
    r"|router|runtime|ops|comm|moe|sequence|inference|module_inject|launcher|checkpoint|schedulers?|scripts|server|serve|single_controller"
    r"|tests?|third_party|tools|train|trainers?|training|tuners?|ui|utils|webui|workers?|examples?|legacy_workers)"
)

CLONED = re.compile(
    rf"(?:^|[/\\])(?P<package>{'|'.join(TITLES)})[/\\](?:(?P=package)[/\\]|{SUBPACKAGES}[/\\])"
    rf"|[/\\]src[/\\](?P<below_src>{'|'.join(TITLES)})[/\\]"
    r"|(?:^|[/\\])(?P<clone>LLaMA-Factory|LlamaFactory|OpenRLHF|EasyR1|Megatron-LM|Megatron-DeepSpeed|DeepSpeedExamples|NeMo|NeMo-RL|ms-swift"
    r"|open-r1|TinyZero|vllm-ascend|SkyRL|AReaL|FastChat|LLaVA|LLaVA-NeXT|InternVL|gpt-neox|torchtitan|torchtune|ColossalAI|Open-Sora|lm-evaluation-harness)"
    rf"(?:-(?:main|master|v?\d[\w.]{{0,20}}))?[/\\](?:src[/\\])?(?:{SUBPACKAGES}|{'|'.join(TITLES)}|lm_eval|gptneox|applications|training)[/\\]"
)

DOWNLOADED = re.compile(r"[/\\]\.cache[/\\](?:huggingface|modelscope)[/\\]|[/\\]transformers_modules[/\\]")

GENERATED = re.compile(
    r"[/\\](?P<package>[a-z]\w{1,30})_compiled_cache[/\\]"
)  # code that a package writes, and runs, beside the script

OWN_TOOL = re.compile(r"[/\\]dsdoctor[/\\](?:overflow|run|memory|hang|checkpoint)[/\\]")

RELAYS = re.compile(
    r"ray/_private/(?:worker\.py:(?:get|get_objects|_get_objects)|client_mode_hook\.py:wrapper|auto_init_hook\.py:)"
    r"|ray/(?:actor|remote_function)\.py:|ray/util/tracing/"
    r"|torch/nn/modules/module\.py:(?:_(?:wrapped_)?call_impl|__getattr__)|torch/nn/parallel/distributed\.py:(?:_run_ddp_)?forward"
    r"|torch/(?:_utils\.py:reraise|utils/_contextlib\.py:|utils/data/_utils/|multiprocessing/spawn\.py:|_dynamo/eval_frame\.py:_?fn$)"
    r"|torch/distributed/(?:elastic/|run\.py|launch|launcher/|c10d_logger\.py:wrapper)"
    r"|multiprocessing/(?:pool|process|spawn|popen_\w{1,20}|connection)\.py:|concurrent/futures/|(?:^|/)asyncio/|(?:^|/)runpy\.py:"
    r"|fire/core\.py:|click/(?:core|decorators)\.py:|typer/|hydra/|absl/app\.py:|tyro/|(?:^|/)contextlib\.py:|(?:^|/)functools\.py:"
    r"|accelerate/(?:commands/launch\.py:|utils/operations\.py:(?:forward|__call__)|utils/memory\.py:decorator)"
    r"|deepspeed/utils/nvtx\.py:wrapped_fn|deepspeed/launcher/|verl/single_controller/(?:ray/base\.py:(?:func|execute\w{0,40})|base/decorator\.py:inner)"
    r"|transformers/utils/(?:generic|deprecation)\.py:(?:wrapper|wrapped_func|inner)|joblib/"
)
"""Places through which an exception of somebody else passes: their file, and where it matters the function."""


@lru_cache(maxsize=4096)
def owner_of(path: str) -> str:
    """The project that a file belongs to, ``Python``, or "" for the user's own.

    >>> owner_of("/v/lib/python3.11/site-packages/flash_attn/ops.py"), owner_of("/usr/lib/python3.10/json/decoder.py")
    ('flash-attn', 'Python')
    >>> owner_of("/root/LLaMA-Factory/src/llamafactory/train/tuner.py"), owner_of("/w/verl/trainer/main_ppo.py")
    ('LLaMA-Factory', 'verl')
    >>> owner_of("/w/unsloth_compiled_cache/UnslothSFTTrainer.py")
    'unsloth'
    >>> owner_of("/usr/local/bin/trl"), owner_of("/home/verl/train.py"), owner_of("/w/deepspeed/train.py"), owner_of("train.py")
    ('TRL', '', '', '')
    """
    if OWN_TOOL.search(path):
        return DSDOCTOR
    if found := INSTALLED.search(path):
        return title_of(found["package"] or found["module"])
    if STANDARD_LIBRARY.search(path):
        return PYTHON
    if DOWNLOADED.search(path):
        return REMOTE_CODE
    if found := GENERATED.search(path):
        return title_of(found["package"])
    if found := CONSOLE_SCRIPT.search(path):
        return title_of(found["name"].replace("-", "_"))
    if found := CLONED.search(path):
        package = found["package"] or found["below_src"]
        return title_of(package) if package else TITLES.get(found["clone"].lower().replace("-", "_"), found["clone"])
    return ""


def title_of(package: str) -> str:
    """What the project of a package is called."""
    return TITLES.get(package, package)


@lru_cache(maxsize=4096)
def is_relay(path: str, function: str) -> bool:
    """Whether a place only passes on an exception of somebody else.

    >>> ray = "/v/site-packages/ray/_private/worker.py"
    >>> is_relay(ray, "get_objects"), is_relay(ray, "init")
    (True, False)
    """
    place = f"{path}:{function.rpartition('.')[2]}".replace("\\", "/")
    return RELAYS.search(place) is not None or CONSOLE_SCRIPT.search(path) is not None
