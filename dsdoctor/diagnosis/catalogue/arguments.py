"""Rules of arguments that are refused before a model is made: by parsers, Hydra, and checks of the frameworks themselves."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

ARGUMENTS_REFUSED = Rule(
    id="arguments-refused",
    stage=Stage.RUN,
    title="a check of the arguments refuses them: {message}",
    fix="change what the message names: in the command line, the YAML file or the configuration, whichever sets it; "
    "names and values are those of the version that is installed",
    steps=(step("python SCRIPT.py --help"), instead("python -m pip list")),
    explained_by=(
        "config-batch-sizes",
        "config-batch-size-missing",
        "config-key-unknown",
        "config-value-wrong",
        "config-auto-left",
        "config-file-missing",
        "config-file-unreadable",
        "hf-config-mismatch",
        "precision-unsupported",
        "precision-fp16-and-bf16",
        "package-version-bound",
        "accelerate-config-twice",
        "launch-option-wrong",
        "known-regression",
    ),
    manual="""A parser or a framework has looked at the arguments before it began, and does not take them.

Its message names the argument, and what it clashes with. Nothing was loaded yet. A name that the documentation has, and
that is refused here, belongs to another version of the package.

Why it matters: No rank starts to train, and nothing else in the log is the cause.""",
    signatures=(
        Signature(
            words="arguments+hfargumentparser keys+hfargumentparser",
            pattern=r"ValueError: Some (?:specified arguments|keys) are not used by the HfArgumentParser: "
            r"(?P<message>.{1,160})",
            unless=r"--local[-_]rank",
            title="the script does not know these arguments: {message} (HfArgumentParser)",
            fix="correct or remove these arguments: they are misspelt, or belong to another version of the script, of "
            "transformers (TrainingArguments) or of trl",
            sample="ValueError: Some specified arguments are not used by the HfArgumentParser: ['--use_lora', 'True']",
        ),
        Signature(
            words="error+unrecognized+py error+argument+py error+arguments+required error+option+py",
            pattern=r"^(?!runner\.py|launch\.py)(?P<script>[\w.-]{1,80}\.py): error: "
            r"(?P<message>unrecognized arguments: .{1,140}|argument .{1,140}|the following arguments are required: "
            r".{1,140}|ambiguous option.{1,140}|.{0,80}option.{0,80})",
            unless=r"--local[-_]rank",
            title="{script} does not take its arguments: {message}",
            fix="correct the command line: an argument that is misspelt, misses its value, or stands before the "
            "script's "
            "name",
            steps=(step("python {script} --help"),),
            sample="finetune.py: error: the following arguments are required: --output_dir",
        ),
        Signature(
            words="valid+please+select+one",
            pattern=r"ValueError: (?P<value>\S{1,60}) is not a valid (?P<kind>\w{1,60}), please select one of "
            r"(?P<values>.{1,160})",
            title="{value} is no value of {kind}: it takes one of {values}",
            fix="correct the argument; the names are those of the transformers that is installed",
            steps=(step("python -m pip show transformers"),),
            sample="ValueError: adamw_bnb is not a valid OptimizerNames, please select one of ['adamw_torch', "
            "'adafactor']",
        ),
        Signature(
            words="tf32+ampere",
            pattern=r"ValueError: --tf32 requires Ampere",
            title="tf32 is asked for, and this GPU (older than Ampere), CUDA or torch has none",
            fix="set --tf32 False (tf32: false); V100, T4 and 20-series GPUs have neither tf32 nor bf16: use fp16",
            sample="ValueError: --tf32 requires Ampere or a newer GPU arch, cuda>=11 and torch>=1.7",
        ),
        Signature(
            words="hydra+errors hydra+_internal",
            pattern=r"^hydra\.(?:_internal\.)?(?:[\w.]{1,40}\.)?(?:\w{1,40})(?:Exception|Error): (?P<message>.{1,160})",
            title="Hydra does not take the configuration: {message}",
            fix="correct the override: key=value for a key that is in the configuration, +key=value for a new one, and "
            "the name of a group's file without .yaml",
            steps=(step("python SCRIPT.py --cfg job"),),
            sample="hydra.errors.ConfigCompositionException: Could not override 'actor.lr'.",
        ),
        Signature(
            words="omegaconf+errors",
            pattern=r"^omegaconf\.errors\.\w{1,40}: (?P<message>.{1,160})",
            title="the configuration (OmegaConf) does not have what is asked of it: {message}",
            fix="correct the key's name, or set it: the script is newer or older than the YAML file",
            sample="omegaconf.errors.ConfigAttributeError: Key 'foo' is not in struct",
        ),
    ),
)

LIGHTNING_REFUSED = Rule(
    id="lightning-refused",
    stage=Stage.RUN,
    title="Lightning refuses the Trainer's settings: {message}",
    fix="change the argument of Trainer, of DeepSpeedStrategy or of the DeepSpeed configuration that the message names",
    manual="""PyTorch Lightning has compared the Trainer's arguments, the strategy and the DeepSpeed configuration.

With the DeepSpeed strategy Lightning itself fills in gradient accumulation, precision and batch size. It takes one
optimizer, clips gradients by their norm only, and runs on GPUs.

Why it matters: Nothing is trained until they fit.""",
    signatures=(
        Signature(
            words="misconfigurationexception",
            pattern=r"MisconfigurationException: (?P<message>Do not set `gradient_accumulation_steps`.{0,120})",
            title="Lightning sets gradient_accumulation_steps itself, and the DeepSpeed configuration has it as well",
            fix="remove gradient_accumulation_steps from the DeepSpeed configuration, and give the Trainer "
            "accumulate_grad_batches",
            sample="lightning.fabric.utilities.exceptions.MisconfigurationException: Do not set "
            "`gradient_accumulation_steps` in the DeepSpeed config as this will be set with the "
            "`accumulate_grad_batches` argument passed via the Lightning Trainer.",
        ),
        Signature(
            words="misconfigurationexception+optimizer",
            pattern=r"MisconfigurationException: (?P<message>DeepSpeed currently only supports single optimizer.{0,120})",
            title="Lightning's DeepSpeed strategy takes one optimizer and one scheduler: {message}",
            fix="return one optimizer (with parameter groups, if there are several) and one scheduler from "
            "configure_optimizers, or take another strategy",
            sample="lightning.fabric.utilities.exceptions.MisconfigurationException: DeepSpeed currently only supports "
            "single optimizer, single optional scheduler.",
        ),
        Signature(
            words="strategy+only+supported",
            pattern=r"(?:ValueError|RuntimeError|MisconfigurationException): (?P<message>(?:The )?(?:DeepSpeed"
            r"|`?deepspeed\w{0,20}`?) strategy is only supported (?:on|with) .{1,120})",
            title="Lightning's DeepSpeed strategy runs on GPUs only: {message}",
            fix="set accelerator='gpu' (cuda) in the Trainer where a GPU is visible; on a CPU take another strategy",
            sample="RuntimeError: The DeepSpeed strategy is only supported on CUDA GPUs but `CPUAccelerator` is used.",
        ),
        Signature(
            words="invalid+strategy",
            pattern=r"ValueError: You selected an invalid strategy name: `strategy=(?P<message>.{1,160})",
            title="Lightning does not take this strategy: {message}",
            fix="import Trainer and DeepSpeedStrategy from the same package: lightning.pytorch and pytorch_lightning "
            "are "
            "two, and one does not take the other's objects; a name is deepspeed_stage_1, _2 or _3",
            sample="ValueError: You selected an invalid strategy name: "
            "`strategy=<pytorch_lightning.strategies.deepspeed.DeepSpeedStrategy object at 0x7f>`.",
        ),
        Signature(
            words="provided+path+deepspeed provided+path+valid",
            pattern=r"FileNotFoundError: The provided path is not a valid DeepSpeed checkpoint: ?(?P<message>.{1,160})",
            title="Lightning was given {message}, which is no folder of a DeepSpeed checkpoint",
            fix="give the folder (directory) that Lightning saved, with checkpoint/ and latest in it, not a file "
            "inside of "
            "it; a single .ckpt file was saved by another strategy, or was converted, and cannot be resumed from here",
            steps=(step("ls -l CKPT"),),
            sample="FileNotFoundError: The provided path is not a valid DeepSpeed checkpoint: ckpts/epoch=9.ckpt",
        ),
    ),
)

RULES = (ARGUMENTS_REFUSED, LIGHTNING_REFUSED)
