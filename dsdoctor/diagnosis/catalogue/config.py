"""Rules of DeepSpeed's configuration: its keys, their types, the batch sizes, and the file itself."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

OF_DEEPSPEED = (
    r"validation errors? for "
    r"(?P<model>DeepSpeed\w{1,60}|(?:HybridEngine|ZenFlow|TPTraining|CommsLogger|Wandb|TensorBoard"
    r"|Comet|RaggedInferenceEngine)Config)"
)
"""What pydantic prints above the keys that it refuses; the name is that of the block's class."""

TOP_LEVEL = (
    "aio|fp16|bf16|optimizer|scheduler|activation_checkpointing|gradient_clipping|train_\\w{1,40}|wall_clock_breakdown"
)
"""Keys that DeepSpeed knows only at the top level of its configuration."""

IN_THE_CONFIG = (
    r"deepspeed[/\\]runtime[/\\](?:config|lr_schedules|zero[/\\]config)\.py|_configure_basic_optimizer"
    r"|_scheduler_from_config|gradient_clipping\(\) >"
)
"""Frames in which DeepSpeed computes with what the configuration says."""

CONFIG_BATCH_SIZES = Rule(
    id="config-batch-sizes",
    stage=Stage.RUN,
    title="the batch sizes of the configuration contradict each other: {train|train_batch_size} is not "
    "{micro|micro batch} x {accumulation|gradient accumulation} x {world|world size}",
    fix="remove train_batch_size from the configuration, and DeepSpeed computes it as "
    "train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size; or give three values that fit",
    manual="""The three batch sizes of the configuration do not fit the number of ranks.

train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size, where the world
size is the number of data-parallel ranks: ranks divided by tensor, pipeline and sequence parallelism. DeepSpeed
computes whichever of the three is left out. A value of 0 comes from a train_batch_size that is smaller than the world
size.

Why it matters: No rank starts to train. A configuration with all three values fits one number of GPUs only.""",
    signatures=(
        Signature(
            words="world_size+train_batch_size",
            pattern=r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size "
            r"(?P<train>-?\d+) != (?P<micro>-?\d+) \* (?P<accumulation>-?\d+) \* (?P<world>1)\b",
            title="the batch sizes contradict each other: train_batch_size {train} is not micro batch {micro} x "
            "gradient_accumulation_steps {accumulation} x world size 1",
            fix="if you started more than one rank, this code ran before the ranks knew each other (zero.Init, "
            "HfDeepSpeedConfig): start it with a launcher and call deepspeed.init_distributed() first. Otherwise "
            "remove train_batch_size, and DeepSpeed computes it from train_micro_batch_size_per_gpu x "
            "gradient_accumulation_steps x world size",
            sample="AssertionError: Check batch related parameters. train_batch_size is not equal to "
            "micro_batch_per_gpu * gradient_acc_step * world_size 16 != 1 * 8 * 1",
        ),
        Signature(
            words="world_size+train_batch_size",
            pattern=r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size"
            r"(?: ?\\?n? ?(?P<train>-?\d+) != (?P<micro>-?\d+) \* (?P<accumulation>-?\d+) \* (?P<world>\d+))?",
            title="the batch sizes contradict each other: train_batch_size {train|of the configuration} is not "
            "micro batch {micro|x} x gradient_accumulation_steps {accumulation|x} x world size {world|of this "
            "run}",
            sample="AssertionError: Check batch related parameters. train_batch_size is not equal to "
            "micro_batch_per_gpu * gradient_acc_step * world_size 16 != 2 * 3 * 2",
        ),
        Signature(
            words="greater+batch greater+gradient",
            pattern=r"(?:Train batch size|Micro batch size per gpu|Gradient accumulation steps): "
            r"(?P<value>-?\d+) has to be "
            r"greater than 0",
            title="a batch size of the configuration comes out as {value}: train_batch_size is smaller than "
            "micro batch x world size",
            sample="AssertionError: Gradient accumulation steps: 0 has to be greater than 0",
        ),
        Signature(
            words="divisible+parallelism",
            pattern=r"Train batch size must be divisible by micro-batch data parallelism",
            title="the new train batch size is not divisible by micro batch x world size",
            sample="ValueError: Train batch size must be divisible by micro-batch data parallelism",
        ),
    ),
)

CONFIG_BATCH_SIZE_MISSING = Rule(
    id="config-batch-size-missing",
    stage=Stage.RUN,
    title="the configuration has neither train_batch_size nor train_micro_batch_size_per_gpu",
    fix="set train_micro_batch_size_per_gpu in the configuration",
    manual="""DeepSpeed was told no batch size, and nothing from which it could compute one.

One of train_batch_size and train_micro_batch_size_per_gpu must be given. Hugging Face's Trainer fills it in where it
says "auto"; accelerate takes it from the dataloader that is given to accelerator.prepare().

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="needs+provided",
            pattern=r"Either train_batch_size or (?:train_)?micro_batch(?:_size)?_per_gpu needs to be provided",
            sample="AssertionError: Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        ),
        Signature(
            words="deepspeedconfig+defined",
            pattern=r"DeepSpeedConfig: (?:train_micro_batch_size_per_gpu|gradient_accumulation_steps) is not defined",
            sample="AssertionError: DeepSpeedConfig: train_micro_batch_size_per_gpu is not defined",
        ),
        Signature(
            words="dataloaders+accelerate dataloaders+deepspeed",
            pattern=r"requires you to pass at least one of training or evaluation dataloaders|"
            r"At least one of the dataloaders passed to `accelerate\.prepare\(\)` has `None` as batch size",
            title="accelerator.prepare() got no dataloader with a batch size, and the configuration has no "
            "train_micro_batch_size_per_gpu either",
            fix="give the dataloader to accelerator.prepare() together with the model, or set "
            "train_micro_batch_size_per_gpu to a number in the DeepSpeed configuration",
            sample="ValueError: When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one "
            "of training or evaluation dataloaders with `batch_size` attribute returning an integer value",
        ),
    ),
)

CONFIG_KEY_UNKNOWN = Rule(
    id="config-key-unknown",
    stage=Stage.RUN,
    title="{key|a key of the configuration} is not known in this block of the configuration{model_hint}",
    fix="correct or remove it: it is misspelt, belongs into another block, or this DeepSpeed{deepspeed_hint} is "
    "older or newer than the configuration",
    steps=(step("python -m dsdoctor config ds_config.json"), step("python -m pip show deepspeed")),
    manual="""The DeepSpeed configuration has a key that this DeepSpeed does not know in that block.

Inside its blocks (zero_optimization, fp16, bf16, ...) DeepSpeed refuses every key that it does not know; at the top
level it ignores them. The name of the class tells the block: DeepSpeedZeroConfig is zero_optimization,
DeepSpeedZeroOffloadParamConfig is offload_param. Keys come and go with releases of DeepSpeed.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="validation+error errors+validation",
            pattern=OF_DEEPSPEED
            + rf" (?P<key>{TOP_LEVEL}) (?:Extra inputs are not permitted|extra fields not permitted)",
            title="{key} stands inside another block{model_hint}, and it belongs on the top level of the configuration",
            fix="move {key} to the top level of the DeepSpeed configuration",
            sample="pydantic.error_wrappers.ValidationError: 1 validation error for DeepSpeedZeroConfig\n"
            "aio\n"
            "  extra fields not permitted (type=value_error.extra)",
        ),
        Signature(
            words="validation+error errors+validation",
            pattern=OF_DEEPSPEED + r" (?P<key>zero_hpz_partition_size|zero_quantized_\w{1,40}|mics_\w{1,40}) "
            r"(?:Extra inputs are not permitted|extra fields not permitted)",
            title="this DeepSpeed{deepspeed_hint} does not know the ZeRO++ or MiCS key {key}: it is older than "
            "that key",
            fix="upgrade DeepSpeed to a version that has ZeRO++ (0.10.0 or newer), or remove the key",
            steps=(step("python -m pip install -U deepspeed"),),
            sample="pydantic.error_wrappers.ValidationError: 3 validation errors for DeepSpeedZeroConfig\n"
            "zero_hpz_partition_size\n"
            "  extra fields not permitted (type=value_error.extra)",
        ),
        Signature(
            words="validation+error errors+validation",
            pattern=r"validation errors? for DeepSpeedBF16Config "
            r"(?P<key>loss_scale|initial_scale_power|loss_scale_window"
            r"|hysteresis|min_loss_scale|auto_cast) (?:Extra inputs are not permitted|extra fields not permitted)",
            title="{key} is a key of the fp16 block and stands in the bf16 block: bf16 has no loss scale",
            fix="remove the keys of loss scaling from the bf16 block",
            sample="pydantic_core._pydantic_core.ValidationError: 5 validation errors for DeepSpeedBF16Config\n"
            "loss_scale\n"
            "  Extra inputs are not permitted [type=extra_forbidden, input_value=0, input_type=int]",
        ),
        Signature(
            words="validation+error errors+validation",
            pattern=OF_DEEPSPEED
            + r" (?P<key>[\w.]{1,80}) (?:Extra inputs are not permitted|extra fields not permitted)",
            sample="pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\n"
            "overlap_com\n"
            "  Extra inputs are not permitted [type=extra_forbidden, input_value=True, input_type=bool]",
        ),
        Signature(
            words="extra+permitted",
            pattern=r"^(?:Extra inputs are not permitted|extra fields not permitted)",
            after=r"validation errors? for (?:DeepSpeed\w{1,40}|HybridEngineConfig)",
            tier=Tier.GENERIC,
            title="a key of the configuration is not known in its block",
            sample="ValidationError - 1 validation error for DeepSpeedZeroConfig\n"
            "  Extra inputs are not permitted [type=extra_forbidden, input_value=True, input_type=bool]",
        ),
    ),
)

CONFIG_VALUE_WRONG = Rule(
    id="config-value-wrong",
    stage=Stage.RUN,
    title="{key|a key of the configuration} has a value that DeepSpeed does not take{model_hint}: {wanted|see the log}",
    fix="correct {key|the value} in the DeepSpeed configuration: numbers without quotes, true and false in small "
    "letters",
    steps=(step("python -m dsdoctor config ds_config.json"),),
    manual="""A value of the DeepSpeed configuration is of another type, or outside of what is allowed.

The line below the key says what was wanted and what was found. A number in quotes, 5e8 from a YAML file (which is
text there), and "auto" where nobody fills it in are the usual reasons.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="validation+error errors+validation",
            pattern=OF_DEEPSPEED + r" (?P<key>[\w.]{1,80}) (?!Extra |extra )(?P<wanted>(?:Input should|Value error"
            r"|Field required|value |field |ensure |unexpected value|Assertion "
            r"failed)(?:(?!input_value=.auto|int_from_float"
            r").){0,120}?)(?= ?\[type|\(type|$)(?!.{0,20}int_from_float)(?!.{0,60}input_value=.auto)",
            sample="pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\n"
            "reduce_bucket_size\n"
            "  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, "
            "input_value='many', input_type=str]",
        ),
        Signature(
            words="maximum+zero+stage",
            pattern=r"DeepSpeedConfig: Maximum supported ZeRO stage is (?P<wanted>\d)",
            title="the configuration asks for a ZeRO stage above {wanted}",
            sample="AssertionError: DeepSpeedConfig: Maximum supported ZeRO stage is 3",
        ),
        Signature(
            words="communication_data_type gradient_allreduce_op",
            pattern=r"Error: Invalid (?P<key>communication_data_type|gradient_allreduce_op)\. Supported "
            r"(?P<wanted>.{1,120})",
            sample="ValueError: Invalid communication_data_type. Supported data types: ['fp16', 'bf16', 'fp32']. "
            "Got: fp8",
        ),
        Signature(
            words="loss_scale+fp16",
            pattern=r"Error: (?P<key>fp16\.(?:min_)?loss_scale(?:_window)?) must be (?P<wanted>.{1,80})",
            sample="ValueError: fp16.loss_scale must be a number",
        ),
    ),
)

CONFIG_AUTO_LEFT = Rule(
    id="config-auto-left",
    stage=Stage.RUN,
    title='a value of the configuration is text where a number is wanted: nearly always "auto" that nobody filled in',
    fix='replace "auto" by a number: only Hugging Face\'s Trainer and accelerate fill it in, for the engine '
    "that they make "
    "themselves",
    steps=(step("python -m dsdoctor config ds_config.json"),),
    manual="""DeepSpeed was given "auto", or another text, where it needs a number.

"auto" is no value of DeepSpeed. Hugging Face's Trainer and accelerate replace it before they call
deepspeed.initialize. Where a script calls deepspeed.initialize itself, or makes a second engine (a reference model)
from the same file, "auto" stays. A number in quotes, or 1e-5 in a YAML file, is text too.

Why it matters: The failure shows as a TypeError deep inside of DeepSpeed, and its message does not name the key.""",
    signatures=(
        Signature(
            words="typeerror+str",
            pattern=r"^TypeError: (?:can't multiply sequence by non-int of type 'str'|unsupported operand "
            r"type\(s\) for .{1,8}: "
            r"'(?:str|int|float)' and '(?:str|int|float)'|'[<>]=?' not supported between instances of "
            r"'(?:str|int|float)' "
            r"and '(?:str|int|float)'|must be real number, not str)",
            after=IN_THE_CONFIG,
            sample='  File "/venv/lib/python3.11/site-packages/deepspeed/runtime/config.py", line 633, in '
            "_set_batch_related_parameters\nTypeError: can't multiply sequence by non-int of type 'str'",
        ),
        Signature(
            words="valueerror+auto",
            pattern=r"ValueError: (?:could not convert string to float|invalid literal for int\(\) with base "
            r"10): ['\"]auto",
            sample="ValueError: could not convert string to float: 'auto'",
        ),
        Signature(
            words="validation+error errors+validation",
            pattern=OF_DEEPSPEED + r" (?P<key>[\w.]{1,80}) [A-Za-z].{0,160}input_value=.auto",
            title='{key} is "auto", and nobody filled it in before DeepSpeed read it',
            sample="pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\n"
            "reduce_bucket_size\n"
            "  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, "
            "input_value='auto', input_type=str]",
        ),
        Signature(
            words="hidden_size+hidden_sizes",
            pattern=r"config file has neither `hidden_size` nor `hidden_sizes` entry",
            title='"auto" in zero_optimization cannot be filled in: the model\'s config has no hidden_size',
            fix="set reduce_bucket_size, stage3_prefetch_bucket_size and stage3_param_persistence_threshold to numbers",
            sample="ValueError: The model's config file has neither `hidden_size` nor `hidden_sizes` entry, "
            "therefore it's not possible to automatically fill out the following `auto` entries",
        ),
    ),
)

CONFIG_FILE_UNREADABLE = Rule(
    id="config-file-unreadable",
    stage=Stage.RUN,
    title="the DeepSpeed configuration is no valid JSON: {problem|it cannot be read}",
    fix="correct the JSON at the place that is named: a comma too many, a missing quote or brace, a comment",
    steps=(step("python -m json.tool ds_config.json"),),
    manual="""The DeepSpeed configuration file cannot be read as JSON.

The message names line and column. DeepSpeed itself reads it as Hjson and refuses keys that are there twice; Hugging
Face reads it as strict JSON.

Why it matters: No rank starts to train.""",
    signatures=(
        Signature(
            words="hjsondecodeerror",
            pattern=r"HjsonDecodeError: (?P<problem>.{1,160})",
            sample="hjson.scanner.HjsonDecodeError: Found a punctuator character when expecting a quoteless "
            "string (check your syntax): line 1 column 73 (char 72)",
        ),
        Signature(
            words="jsondecodeerror",
            pattern=r"JSONDecodeError: (?P<problem>.{1,160})",
            after=r"[Dd]eep[Ss]peed\w{0,40}Config|deepspeed[/\\]runtime|integrations[/\\]deepspeed\.py"
            r"|utils[/\\]deepspeed\.py",
            sample='  File "/venv/lib/python3.11/site-packages/transformers/integrations/deepspeed.py", line '
            "71, in __init__\n"
            "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 12 column 5 (char 301)",
        ),
        Signature(
            words="duplicate+keys",
            pattern=r"Duplicate keys in DeepSpeed config: (?P<problem>.{1,120})",
            title="keys stand twice in the DeepSpeed configuration: {problem}",
            fix="leave one of each",
            sample="ValueError: Duplicate keys in DeepSpeed config: ['zero_optimization']",
        ),
    ),
)

CONFIG_FILE_MISSING = Rule(
    id="config-file-missing",
    stage=Stage.RUN,
    title="the DeepSpeed configuration {file|was not given, or} is not there",
    fix="give the path of the config file from the folder in which the ranks run, or an absolute one",
    steps=(step("ls -l {file|ds_config.json}"),),
    manual="""DeepSpeed got no configuration, or the name of a file that does not exist.

A relative path counts from the folder in which the ranks run, on every node. Text that is neither a path nor base64
gives the same message.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="expected+path+deepspeed",
            pattern=r"Expected a string path to an existing deepspeed config, or a dictionary.{0,60}Received: "
            r"(?P<file>\S{1,160})",
            title="the config file {file} does not exist (seen from the folder in which the ranks run)",
            sample="ValueError: Expected a string path to an existing deepspeed config, or a dictionary or a "
            "valid base64. Received: configs/ds_config.json",
        ),
        Signature(
            words="deepspeed_config+requires",
            pattern=r"DeepSpeed requires --deepspeed_config to specify configuration file",
            title="deepspeed.initialize got no DeepSpeed configuration",
            fix="give it config=... in the call, or --deepspeed_config on the command line",
            sample="AssertionError: DeepSpeed requires --deepspeed_config to specify configuration file",
        ),
        Signature(
            words="configs+deepspeed given+deepspeed_config",
            pattern=r"we were given (?:deepspeed configs in the deepspeed arguments and|both a deepscale_config and)",
            title="the DeepSpeed configuration was given twice: on the command line and in the call",
            fix="give it in one place: config= in the call, or --deepspeed_config",
            sample="AssertionError: Not sure how to proceed, we were given deepspeed configs in the deepspeed "
            "arguments and deepspeed.initialize() function call",
        ),
    ),
)

RULES = (
    CONFIG_BATCH_SIZES,
    CONFIG_BATCH_SIZE_MISSING,
    CONFIG_KEY_UNKNOWN,
    CONFIG_VALUE_WRONG,
    CONFIG_AUTO_LEFT,
    CONFIG_FILE_UNREADABLE,
    CONFIG_FILE_MISSING,
)
