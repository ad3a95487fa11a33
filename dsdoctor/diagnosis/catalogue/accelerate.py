"""Rules of accelerate and trl with DeepSpeed: settings that are there twice, models that they make or unwrap, autocast."""

from dsdoctor.core.fix import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

ACCELERATE_CONFIG_TWICE = Rule(
    id="accelerate-config-twice",
    stage=Stage.RUN,
    title="accelerate's own configuration sets what deepspeed_config_file sets as well: {keys}",
    fix="remove these keys from accelerate's YAML (and from the command line of accelerate launch), and set them in "
    "the "
    "DeepSpeed configuration file alone",
    steps=(step("accelerate config"), instead("accelerate env")),
    manual="""accelerate was given a DeepSpeed configuration file and the same settings beside it.

With deepspeed_config_file only a few keys of accelerate's own YAML may stay (deepspeed_hostfile,
deepspeed_multinode_launcher, zero3_init_flag). accelerate refuses the others, mixed_precision among them. A default
YAML of an earlier `accelerate config` in ~/.cache/huggingface/accelerate counts, too.

Why it matters: No rank starts to train.""",
    signatures=(
        Signature(
            words="deepspeed_config_file+ignored",
            pattern=r"When using `deepspeed_config_file`, the following accelerate config variables will be ignored: "
            r"(?P<keys>.{1,160})",
            sample="ValueError: When using `deepspeed_config_file`, the following accelerate config variables will be "
            "ignored: ['gradient_accumulation_steps', 'zero_stage', 'mixed_precision'].",
        ),
    ),
)

AUTOCAST_OUTSIDE = Rule(
    id="autocast-outside",
    stage=Stage.RUN,
    title="torch.autocast is used around the model, and DeepSpeed's configuration does not say so",
    fix='set "torch_autocast": {"enabled": true, "dtype": "bfloat16"} in the DeepSpeed configuration, or take the '
    "script's own torch.autocast away and use bf16 or fp16 of the configuration",
    manual="""The script calls the engine inside of torch.autocast, which DeepSpeed was not told of.

DeepSpeed has to know of it to choose the type in which gradients are sent. Only one of its own fp16 or bf16 and
torch_autocast may be on.

Why it matters: The first forward fails.""",
    signatures=(
        Signature(
            words="autocast+enabled+outside",
            pattern=r"torch\.autocast is enabled outside DeepSpeed",
            sample="AssertionError: torch.autocast is enabled outside DeepSpeed, but not in the DeepSpeed config.",
        ),
    ),
)

REFERENCE_MODEL_UNDER_ZERO3 = Rule(
    id="reference-model-under-zero3",
    stage=Stage.RUN,
    title="trl cannot copy a model that ZeRO-3 has divided: the reference model (ref_model) has to be loaded by itself",
    fix="load ref_model with from_pretrained and hand it to the trainer, instead of create_reference_model or a "
    "deepcopy; "
    "or let the trainer make it (ref_model=None in a newer trl), or use LoRA, whose base model is the reference",
    steps=(step("python -m pip install -U trl"),),
    manual="""A reference model was to be made as a copy of the trained one, under ZeRO-3.

ZeRO-3 leaves each rank a part of every weight, and a copy of such a model is empty.

Why it matters: The trainer cannot be made.""",
    signatures=(
        Signature(
            words="create_reference_model",
            pattern=r"not compatible with `create_reference_model\(\)`",
            sample="ValueError: DeepSpeed ZeRO-3 is enabled and is not compatible with `create_reference_model()`. "
            "Please "
            "instantiate your reference model directly with `AutoCausalLM.from_pretrained()`.",
        ),
    ),
)

MODEL_NOT_WRAPPED = Rule(
    id="model-not-wrapped",
    stage=Stage.RUN,
    title="DeepSpeed's engine is wanted, and {class} is the bare model: it was not wrapped, or was unwrapped",
    fix="hand over the model that accelerator.prepare or deepspeed.initialize gave back (in a Trainer "
    "self.model_wrapped, "
    "not self.model); with trl upgrade trl",
    steps=(step("python -m pip install -U trl accelerate"),),
    manual="""A function asks a model for what only DeepSpeed's engine has.

trl's unwrap_model_for_generation removes ZeRO-3's hooks, and needs the engine for it.

Why it matters: The call fails on every rank.""",
    signatures=(
        Signature(
            words="attribute+optimizer attribute+save_checkpoint attribute+backward attribute+zero_optimization_stage",
            pattern=r"^AttributeError: '(?P<class>\w{1,60}(?:For\w{2,40}|Model|Module|Net))' object has no attribute "
            r"'(?:optimizer|save_checkpoint|backward|zero_optimization_stage|step)'",
            tier=Tier.GENERIC,
            sample="AttributeError: 'GPTNeoXForCausalLM' object has no attribute 'optimizer'",
        ),
    ),
)

FSDP_LAYER_MISSING = Rule(
    id="fsdp-layer-missing",
    stage=Stage.RUN,
    title="FSDP does not find the layer class that it should wrap: accelerate runs FSDP here, not DeepSpeed",
    fix="name the model's own layer class in fsdp_transformer_layer_cls_to_wrap (LlamaDecoderLayer for Llama); or "
    "choose "
    "DeepSpeed with --config_file or --use_deepspeed",
    steps=(step("accelerate env"), step("accelerate launch --use_deepspeed SCRIPT.py")),
    manual="""accelerate was set to FSDP, and the named class of layers is not in this model.

Why it matters: The model cannot be wrapped, so the training does not start.""",
    signatures=(
        Signature(
            words="transformer+layer+class+wrap",
            pattern=r"Could not find the transformer layer class (?:to wrap|\S{1,60}) in the model",
            sample="Exception: Could not find the transformer layer class to wrap in the model.",
        ),
    ),
)

RULES = (
    ACCELERATE_CONFIG_TWICE,
    AUTOCAST_OUTSIDE,
    REFERENCE_MODEL_UNDER_ZERO3,
    MODEL_NOT_WRAPPED,
    FSDP_LAYER_MISSING,
)
