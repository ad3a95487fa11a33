"""Rules of names that do not fit: imports, attributes and arguments that the installed version of a package does not have."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.catalogue.scripts import NEVER_MISSING
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

OTHERS = (
    r"(?!torch\b|pydantic|triton|numpy\b|apex\b|pkg_resources|dsdoctor|deepspeed\.ops|op_builder|setuptools|partially)"
    r"(?P<package>[A-Za-z_]\w{1,40})"
)
"""The first part of a module's name; those of which other rules know more are left out."""

NAME_NOT_IN_PACKAGE = Rule(
    id="name-not-in-package",
    stage=Stage.RUN,
    title="{package} has no {name} in the version that is installed: what asks for it was written for another version",
    fix="see in the traceback who asks for it, and upgrade the older of the two, or pin {package} to the version that "
    "the other one names. A file of "
    "the same name ({package}.py) beside the script hides the package, too",
    steps=(
        step("python -m pip show {package}"),
        step("python -c 'import importlib, sys; print(importlib.import_module(sys.argv[1]).__file__)' {package}"),
    ),
    explained_by=(
        "known-regression",
        "package-name-missing",
        "deepspeed-too-old-for-torch",
        "pydantic-incompatible",
        "numpy-changed",
    ),
    manual="""A module is asked for a name that it does not have.

Names come and go with releases. Where the name is certainly there, Python has found another file of that name: a
script beside the main script, or the rest of an older installation.

Why it matters: Nothing starts until the versions fit.""",
    signatures=(
        Signature(
            words="cannot+import",
            pattern=r"ImportError: cannot import name '(?P<name>\w{1,80})' from '"
            + OTHERS
            + r"(?:\.[\w.]{1,100})?' \(",
            unless=r"partially initialized|from '(?:transformers|accelerate|peft|trl|datasets|huggingface_hub|bitsandb"
            r"ytes|diffusers|tokenizers"
            r"|deepspeed|lightning|pyramid\.session)\b",
            tier=Tier.GENERIC,
            sample="ImportError: cannot import name 'LLM' from 'vllm' (/venv/vllm/__init__.py)",
        ),
        Signature(
            words="module+attribute",
            pattern=r"AttributeError: module '?"
            + OTHERS
            + r"(?:\.[\w.]{1,100})?'? has no attribute '?(?P<name>\w{1,80})",
            unless=r"'numpy'|pydantic|'triton|Version'|module '(?:signal|os|resource)'|parallel_state_sp'|module "
            r"'(?:deepspeed|accelerate|transformers)' has no attribute '(?:" + NEVER_MISSING + r")'",
            tier=Tier.GENERIC,
            sample="AttributeError: module transformers has no attribute Qwen2ForCausalLM",
        ),
        Signature(
            words="import+torch modulenotfounderror+torch attribute+torch",
            pattern=r"cannot import name '(?P<name>\w{1,80})' from '(?P<package>torch)(?:\.[\w.]{1,100})?'|No module "
            r"named "
            r"'(?P<package2>torch)\.(?P<name2>[\w.]{1,100})'|AttributeError: module "
            r"'(?P<package3>torch)(?:\.[\w.]{1,100})?' has no "
            r"attribute '(?P<name3>\w{1,80})'",
            after=r"(?:site|dist)-packages[/\\](?!deepspeed|torch[/\\])",
            not_after=r"[/\\]deepspeed[/\\]|op_builder",
            title="this torch has no {name}: the package in the last frame was written for a newer or an older torch",
            fix="upgrade the older of the two: that package, or torch (with everything that is compiled for it); its "
            "requirements name the versions of torch",
            steps=(step("python -m pip list"), step("python -m pip check")),
            sample='  File "/v/lib/python3.11/site-packages/transformers/pytorch_utils.py", line 30, in <module>\n'
            "ImportError: cannot import name 'DTensor' from 'torch.distributed.tensor' "
            "(/v/torch/distributed/tensor/__init__.py)",
        ),
        Signature(
            words="tokenizer+class+exist",
            pattern=r"ValueError: Tokenizer class (?P<name>\w{1,60}) does not exist or is not currently imported",
            title="this transformers is older than the model: it has no tokenizer {name}",
            fix="upgrade transformers, or install what that tokenizer needs (sentencepiece, tiktoken)",
            steps=(step("python -m pip install -U transformers sentencepiece tiktoken"),),
            sample="ValueError: Tokenizer class Qwen2Tokenizer does not exist or is not currently imported.",
        ),
        Signature(
            words="module+signal module+resource named+resource named+fcntl named+termios module+os",
            pattern=r"AttributeError: module '(?P<package>signal|os)' has no attribute "
            r"'(?P<name>SIGKILL|SIGUSR1|SIGUSR2|SIGALRM|SIGHUP|setsid|getuid"
            r"|killpg|fork|uname|sched_\w{1,20})'",
            title="{package}.{name} exists on Linux only, and this is Windows: this program is not made for it",
            fix="run it in WSL2 or a Linux container",
            steps=(step("wsl --install", note="Windows"),),
            sample="AttributeError: module 'signal' has no attribute 'SIGUSR1'",
        ),
    ),
)

ARGUMENT_NOT_KNOWN = Rule(
    id="argument-not-known",
    stage=Stage.RUN,
    title="{class} does not take the argument {name}: it and its caller were written for different versions",
    fix="rename or remove the argument, or take the version of the package that the caller was written for; where a "
    "package calls it (see the last but one "
    "frame), upgrade both together. In a model's own code give forward **kwargs",
    steps=(step("python -m pip list"), step("python -m pip install -U transformers accelerate trl peft deepspeed")),
    explained_by=(
        "known-regression",
        "package-argument-missing",
        "scheduler-parameters",
        "name-not-in-package",
        "deepspeed-too-old-for-torch",
    ),
    manual="""A function is called with an argument that this version of it does not have.

Arguments are renamed, move to another class, or come with a later release; the frame above the message tells who calls.

Why it matters: The script stops before it trains.""",
    signatures=(
        Signature(
            words="unexpected+keyword",
            pattern=r"^TypeError: (?P<class>[\w.<>]{1,100})\(\) got an unexpected keyword argument "
            r"'(?P<name>\w{1,60})'",
            unless=r"(?:Trainer|TrainingArguments|Accelerator|LoraConfig|SFTConfig|DPOConfig|GRPOConfig|PPOConfig|Plug"
            r"in)\.__init__\(\)"
            r"|^TypeError: __init__\(\)|'(?:evaluation_strategy|tokenizer|dispatch_batches|split_batches|even_batches"
            r"|use_seedable_sampler|keep_torch_compile|hipify_extra_files_only)'|compute_loss|(?:WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycl"
            r"e|LRRangeTest)\.",
            tier=Tier.GENERIC,
            sample="TypeError: LlamaForCausalLM.forward() got an unexpected keyword argument 'num_items_in_batch'",
        ),
        Signature(
            words="hipify_extra_files_only",
            pattern=r"^TypeError: (?P<class>hipify)\(\) got an unexpected keyword argument '(?P<name>hipify_extra_files_only)'",
            title="this ROCm build of torch is older than this DeepSpeed, whose build gives torch's hipify the argument {name}",
            fix="take a newer torch for ROCm, whose hipify has this argument, or a DeepSpeed of the time of this torch",
            steps=(
                step('python -c "import torch; print(torch.__version__, torch.version.hip)"'),
                step("python -m pip install -U torch --index-url https://download.pytorch.org/whl/rocm6.4"),
            ),
            sample="TypeError: hipify() got an unexpected keyword argument 'hipify_extra_files_only'",
        ),
        Signature(
            words="trainer+unexpected config+unexpected init+unexpected __init__+unexpected",
            pattern=r"^TypeError: (?P<class>__init__)\(\) got an unexpected keyword argument '(?P<name>\w{1,60})'",
            unless=r"'(?:evaluation_strategy|tokenizer|dispatch_batches|split_batches|even_batches|use_seedable_sample"
            r"r)'",
            not_after=r"_configure_lr_scheduler|_scheduler_from_config|lr_schedules",
            tier=Tier.GENERIC,
            title="a class does not take the argument {name}: it and its caller were written for different versions",
            sample="TypeError: __init__() got an unexpected keyword argument 'no_cuda_graphs'",
        ),
        Signature(
            words="missing+required+positional",
            pattern=r"^TypeError: (?P<class>[A-Z]\w{1,80}\.forward)\(\) missing \d required positional arguments?: "
            r"(?P<name>'\w{1,60}'.{0,160})",
            after=r"transformers[/\\](?:models|modeling)|transformers_modules|modeling_\w{1,40}\.py",
            not_after=r"deepspeed[/\\]runtime[/\\]pipe",
            tier=Tier.GENERIC,
            title="{class} wants {name}, which its caller does not give: the model's code and what calls it were written for "
            "different versions",
            sample='  File "/venv/lib/python3.10/site-packages/transformers/models/qwen2/modeling_qwen2.py", line 240, in '
            "forward\n"
            "TypeError: Qwen2Attention.forward() missing 1 required positional argument: 'position_embeddings'",
        ),
        Signature(
            words="positional+arguments+takes positional+argument+takes",
            pattern=r"^TypeError: (?P<class>[\w.<>]{1,100})\(\) takes (?:from \d{1,3} to )?(?P<name>\d{1,3} "
            r"positional arguments?) but \d{1,3}",
            unless=r"_set_master_addr_port",
            after=r"site-packages|dist-packages",
            tier=Tier.GENERIC,
            title="{class} takes {name}, and got another number: packages of different versions call each other",
            fix="upgrade the two packages in the last two frames together, or take the release of the one that the "
            "other was made for",
            sample='  File "/venv/lib/python3.9/site-packages/accelerate/optimizer.py", line 55, in step\n'
            "TypeError: unscale_() takes 1 positional argument but 2 were given",
        ),
    ),
)

RULES = (NAME_NOT_IN_PACKAGE, ARGUMENT_NOT_KNOWN)
