"""Rules of flash-attention and the attention implementations of transformers."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

FLASH_ATTENTION_DTYPE = Rule(
    id="flash-attention-dtype",
    stage=Stage.RUN,
    title="flash-attention takes fp16 and bf16 only, and it was given {type|float32}",
    fix="load the model in half precision (torch_dtype=torch.bfloat16, newer transformers: dtype=), and train with "
    "bf16=True (or fp16=True) and the same in the DeepSpeed configuration; norms and LoRA layers that were cast to "
    "float32 need autocast, or attn_implementation='sdpa'",
    steps=(
        step("python -c 'import torch; print(torch.cuda.is_bf16_supported())'"),
        instead("python -m pip install -U transformers peft"),
    ),
    manual="""flash-attention has kernels for fp16 and bf16, and none for float32.

A model that was loaded without torch_dtype is float32; prepare_model_for_kbit_training casts norms to float32, and so
do some norms by themselves. Autocast (bf16=True) makes their results half precision again.

Why it matters: The first forward stops.""",
    signatures=(
        Signature(
            words="flashattention+fp16",
            pattern=r"FlashAttention only supports? (?:fp16, bf16, and fp8_e4m3|fp16 and bf16)(?: data type)?",
            sample="RuntimeError: FlashAttention only support fp16 and bf16 data type",
        ),
        Signature(
            words="flash+attention+dtypes",
            pattern=r"ValueError: Flash Attention 2(?:\.0)? only supports torch\.float16 and torch\.bfloat16 "
            r"dtypes.{0,40}"
            r"(?P<type>torch\.\w{3,20})?",
            title="the model was made in float32, and Flash Attention 2 takes fp16 and bf16 only",
            sample="ValueError: Flash Attention 2.0 only supports torch.float16 and torch.bfloat16 dtypes. You passed "
            "torch.float32, this might lead to unexpected behaviour.",
        ),
    ),
)

FLASH_ATTENTION_NEEDS_AMPERE = Rule(
    id="flash-attention-needs-ampere",
    stage=Stage.RUN,
    title="flash-attention needs GPUs of the generation Ampere (capability 8.0: A100, RTX 30, L4, ...) or newer, and "
    "this one is older (T4, V100, RTX 20)",
    fix="switch it off: attn_implementation='sdpa' (or 'eager'); in LLaMA-Factory flash_attn: sdpa, in axolotl "
    "flash_attention: false. Uninstalling flash-attn helps where the model's own code takes it whenever it is there",
    steps=(
        step("nvidia-smi --query-gpu=name,compute_cap --format=csv"),
        instead("python -m pip uninstall -y flash-attn"),
    ),
    manual="""flash-attention 2 is built for compute capability 8.0 and newer.

torch's own attention (sdpa) runs on the older GPUs as well and takes little more memory.

Why it matters: The first forward stops.""",
    signatures=(
        Signature(
            words="ampere",
            pattern=r"FlashAttention only supports Ampere GPUs or newer",
            sample="RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        ),
    ),
)

ATTENTION_NOT_KNOWN = Rule(
    id="attention-not-known",
    stage=Stage.RUN,
    title="this transformers knows no attention implementation {name}{class_hint}",
    fix="take attn_implementation='sdpa' or 'eager'; an attention that a framework registers itself needs the "
    "transformers that the framework was made for",
    steps=(step("python -m pip show transformers"),),
    manual="""A model's attention is looked up by the name in config._attn_implementation.

The names are sdpa, eager, flash_attention_2, flex_attention and what other packages register. A model without support,
or a package whose registration does not reach this transformers, leads to a name that is not there.

Why it matters: The model is not made, or its first forward fails.""",
    signatures=(
        Signature(
            words="keyerror",
            pattern=r"^KeyError: '(?P<name>\w{0,60}attention\w{0,40}|sdpa)'",
            after=r"transformers[/\\]|_attn_implementation|ATTENTION_CLASSES",
            tier=Tier.GENERIC,
            sample='  File "/venv/lib/python3.11/site-packages/transformers/models/qwen2/modeling_qwen2.py", line 210, '
            "in forward\nKeyError: 'sequence_parallel_attention'",
        ),
        Signature(
            words="support+attention",
            pattern=r"ValueError: (?P<class>\w{1,80}) does not support (?:an attention implementation through "
            r"(?P<name2>torch\.nn\.functional\.scaled_dot_product_attention)|(?P<name>Flash Attention \d(?:\.0)?) yet)",
            title="{class} does not support {name|sdpa} in this transformers",
            fix="load it with attn_implementation='eager', or upgrade transformers",
            sample="ValueError: GPT2LMHeadModel does not support Flash Attention 2.0 yet. Please request to add "
            "support where the model is hosted",
        ),
    ),
)

RULES = (FLASH_ATTENTION_DTYPE, FLASH_ATTENTION_NEEDS_AMPERE, ATTENTION_NOT_KNOWN)
