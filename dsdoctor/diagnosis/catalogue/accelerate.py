"""Rules of accelerate and trl with DeepSpeed: settings that are there twice, models that they make or unwrap, autocast."""

from dsdoctor.core.finding import instead, step
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

ACCELERATE_STATE_MISSING = Rule(
    id="accelerate-state-missing",
    stage=Stage.RUN,
    title="accelerate is used before it knows how the ranks run: no Accelerator (or PartialState) was made yet, or "
    "its state was reset",
    fix="make the Accelerator, or the TrainingArguments, first: before accelerate's logger, before the model is "
    "loaded, and only once; do "
    "not reset its state in between; else upgrade accelerate and transformers together",
    steps=(step("python -m pip install -U accelerate transformers"),),
    manual="""accelerate keeps one state for the whole process, and the first Accelerator (or the
TrainingArguments) fills it.

What asks for it earlier, or after it was reset, finds it empty.

Why it matters: The script stops before it trains.""",
    signatures=(
        Signature(
            words="properly+initialize+accelerator partialstate+initialized",
            pattern=r"Please make sure to properly initialize your accelerator via `accelerator = "
            r"Accelerator\(\)`|The `PartialState` or "
            r"`Accelerator` must be initialized before calling",
            sample="ValueError: Please make sure to properly initialize your accelerator via `accelerator = "
            "Accelerator()` before using any "
            "functionality from the `accelerate` library.",
        ),
        Signature(
            words="acceleratorstate+attribute partialstate+attribute",
            pattern=r"AttributeError: [`']?(?:AcceleratorState|PartialState)[`']? object has no attribute "
            r"[`'](?P<name>\w{1,60})[`']",
            title="accelerate's state has no {name}: it was reset, or never filled, when this code asked for it",
            sample="AttributeError: 'AcceleratorState' object has no attribute 'distributed_type'",
        ),
        Signature(
            words="deepspeed_plugin+creating+second deepspeed_plugin+object",
            pattern=r"NotImplementedError: You cannot pass in a `deepspeed_plugin` when creating a second "
            r"`Accelerator`",
            title="a second Accelerator was given a deepspeed_plugin: only the first one takes plugins",
            fix="make one Accelerator with deepspeed_plugins={'train': ..., 'reference': ...} and switch between them "
            "with "
            "accelerator.state.select_deepspeed_plugin",
            sample="NotImplementedError: You cannot pass in a `deepspeed_plugin` when creating a second `Accelerator`.",
        ),
    ),
)

GPU_WITHOUT_PEER_ACCESS = Rule(
    id="accelerate-rtx-4000",
    stage=Stage.LAUNCH,
    title="RTX 4000-series GPUs cannot talk to each other directly (P2P), and accelerate stops because the script was "
    "not started by it",
    fix="set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 for all ranks, or start with accelerate launch, which sets them",
    steps=(step("export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1"), instead("accelerate launch SCRIPT.py")),
    manual="""GPUs of the RTX 4000 series have no peer-to-peer access, and NCCL hangs where it tries it.

accelerate knows that and refuses to begin unless the two variables are set.

Why it matters: The ranks do not start.""",
    signatures=(
        Signature(
            words="rtx+4000+broadband rtx+4000+p2p",
            pattern=r"Using RTX [34]0{3} series doesn't support faster communication broadband",
            sample="NotImplementedError: Using RTX 4000 series doesn't support faster communication broadband via P2P "
            "or IB.",
        ),
    ),
)

BATCHES_DIFFER_IN_DISPATCH = Rule(
    id="dispatch-batches-differ",
    stage=Stage.RUN,
    title="accelerate reads the data on rank 0 and sends each rank its part (dispatch_batches), and the batches are "
    "of different size",
    fix="set dispatch_batches=False (accelerator_config or DataLoaderConfiguration), with split_dataset_by_node for a "
    "data set that is "
    "iterated; or pad all samples to one length (padding='max_length') and set drop_last",
    manual="""With dispatch_batches, the default for iterable data sets, rank 0 reads a batch for every rank and
puts them together.

That works with batches of one shape only.

Why it matters: Rank 0 ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="batches+size+dispatch_batches",
            pattern=r"You can't use batches of different size with `dispatch_batches=True`",
            sample="RuntimeError: You can't use batches of different size with `dispatch_batches=True` or when using "
            "an `IterableDataset`.",
        ),
        Signature(
            words="round+multiple+processes",
            pattern=r"ValueError: To use (?:a )?`(?P<loader>\w{1,40})` in `split_batches` mode, the batch size "
            r"\((?P<size>\d{1,9})\) needs to be a "
            r"round multiple of the number of processes \((?P<world>\d{1,9})\)",
            title="split_batches divides a batch of {size} among {world} ranks, which does not come out even",
            fix="make the batch size a multiple of the number of ranks, or set split_batches=False (the batch size is "
            "then that of each rank)",
            sample="ValueError: To use a `DataLoader` in `split_batches` mode, the batch size (10) needs to be a "
            "round multiple of the number "
            "of processes (4).",
        ),
    ),
)

RULES = (
    ACCELERATE_STATE_MISSING,
    GPU_WITHOUT_PEER_ACCESS,
    BATCHES_DIFFER_IN_DISPATCH,
    ACCELERATE_CONFIG_TWICE,
    AUTOCAST_OUTSIDE,
    REFERENCE_MODEL_UNDER_ZERO3,
    MODEL_NOT_WRAPPED,
    FSDP_LAYER_MISSING,
)
