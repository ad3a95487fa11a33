"""Rules of whole blocks of the configuration: one that is no block, and an optimizer that torch does not have."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

CONFIG_BLOCK_WRONG = Rule(
    id="config-block-wrong",
    stage=Stage.RUN,
    title="the DeepSpeed configuration has a plain value ({found}) where a block of keys in braces belongs",
    fix='write the block: "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "bf16": {"enabled": true}, '
    '"optimizer": {"type": "AdamW", "params": {...}}; the block that the last frame reads is the one',
    steps=(step("python -m json.tool DS_CONFIG.json"),),
    manual="""zero_optimization, fp16, bf16, optimizer, scheduler and activation_checkpointing are blocks of keys.

A number, true or a name in their place is not read as the block's most important key. A configuration that was given
as text (the file's content, or a name where a dictionary is wanted) fails in the same way.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="argument+mapping",
            pattern=r"TypeError: (?:[\w.]{0,80}\.)?(?P<block>DeepSpeed\w{2,40}Config)(?:\(\))? argument after \*\* must be a "
            r"mapping, not (?P<found>\w{1,30})",
            title="the DeepSpeed configuration has a plain value ({found}) where the block of {block} belongs "
            "(zero_optimization for DeepSpeedZeroConfig)",
            sample="TypeError: deepspeed.runtime.zero.config.DeepSpeedZeroConfig() argument after ** must be a mapping, not "
            "int",
        ),
        Signature(
            words="attributeerror+keys attributeerror+get attributeerror+items",
            pattern=r"^AttributeError: '(?P<found>bool|int|str|float|list)' object has no attribute '(?:keys|get|items)'",
            after=r"deepspeed[/\\]runtime[/\\](?:\w{1,20}[/\\])?config(?:_utils)?\.py|get_scalar_param|param_dict|hf_ds_config|"
            r"integrations[/\\]deepspeed\.py|accelerate[/\\]utils[/\\]deepspeed\.py",
            tier=Tier.GENERIC,
            sample='  File "/venv/lib/python3.11/site-packages/deepspeed/runtime/config.py", line 110, in get_fp16_enabled\n'
            "AttributeError: 'bool' object has no attribute 'keys'",
        ),
        Signature(
            words="attribute+optim attribute+lr_scheduler",
            pattern=r"AttributeError: module 'torch\.(?P<block>optim(?:\.lr_scheduler)?)' has no attribute '(?P<found>\w{1,40})'",
            after=r"_configure_basic_optimizer|_configure_optimizer|_scheduler_from_config|_configure_lr_scheduler|"
            r"_initialize_params",
            title="the DeepSpeed configuration names the optimizer or scheduler {found}, and neither DeepSpeed nor "
            "torch.{block} has one of that name",
            fix="correct optimizer.type: Adam, AdamW, Lamb, Lion, Adagrad, OneBitAdam, ZeroOneAdam, Muon, or a class of "
            "torch.optim in its exact letters (SGD, RMSprop); scheduler.type: WarmupLR, WarmupDecayLR, WarmupCosineLR, "
            "OneCycle, LRRangeTest",
            sample='  File "/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line 1500, in '
            "_configure_basic_optimizer\nAttributeError: module 'torch.optim' has no attribute 'adamx'",
        ),
    ),
)

TRAINER_DIRECTORIES = Rule(
    id="output-not-empty",
    stage=Stage.RUN,
    title="the output folder {path} is not empty, and the script does not write into it",
    fix="give --overwrite_output_dir, another --output_dir, or --resume_from_checkpoint to go on from what is there",
    steps=(step("ls -l {path|OUTPUT}"),),
    manual="""The example scripts of transformers refuse an output folder with files in it.

Where it holds checkpoint-N, they go on from there by themselves, unless --overwrite_output_dir is given.

Why it matters: Nothing has been trained, and nothing was overwritten.""",
    signatures=(
        Signature(
            words="output+directory+exists",
            pattern=r"ValueError: Output directory \(?(?P<path>[^)\n]{1,160}?)\)? already exists and is not empty",
            sample="ValueError: Output directory (out) already exists and is not empty. Use --overwrite_output_dir to "
            "overcome.",
        ),
    ),
)

RULES = (CONFIG_BLOCK_WRONG, TRAINER_DIRECTORIES)
