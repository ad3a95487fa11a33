"""Rules of scripts that do not fit what is installed, or what DeepSpeed makes of a model: names, arguments, samples, tensors."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

PACKAGES = r"(?:transformers|accelerate|peft|trl|datasets|huggingface_hub|bitsandbytes|diffusers|tokenizers|deepspeed|lightning)"
"""Packages whose names come and go, and with which scripts for DeepSpeed are written."""

PACKAGE_NAME_MISSING = Rule(
    id="package-name-missing",
    stage=Stage.RUN,
    title="{package} of this version has no {name}: what imports it was written for another version of {package}",
    fix="see in the traceback who imports it: upgrade the older of the two packages, or take the version of "
    "{package} that the script names in its requirements",
    steps=(step("python -m pip show {package}"), step("python -m pip install -U {package}")),
    explained_by=("known-regression",),
    manual="""A name is imported that the installed version of a package does not have.

It was removed since, or came later than what is installed. The frame above the message tells who asks: the script
itself, or another package that is too old or too new for this one.

Why it matters: Nothing starts until the versions fit.""",
    signatures=(
        Signature(
            words="cannot+import",
            pattern=r"ImportError: cannot import name '(?P<name>\w{1,80})' from '(?P<package>"
            + PACKAGES
            + r")(?:\.[\w.]{1,100})?'",
            unless=r"partially initialized|top_k_top_p_filtering|'AdamW'|LlamaFlashAttention2|LlamaSdpaAttention"
            r"|LLAMA_ATTENTION_CLASSES|clear_device_cache|EncoderDecoderCache|HybridCache",
            tier=Tier.GENERIC,
            sample="ImportError: cannot import name 'is_torch_xla_available' from 'transformers' "
            "(/venv/lib/python3.11/site-packages/transformers/__init__.py)",
        ),
    ),
)

NEVER_MISSING = (
    r"init_inference|initialize|init_distributed|add_config_arguments|zero|comm|ops|pipe|runtime|moe|checkpointing|utils"
    r"|Accelerator|Trainer|AutoTokenizer|__version__"
)
"""Names that deepspeed, accelerate or transformers have in every release."""

PACKAGE_SHADOWED = Rule(
    id="package-shadowed",
    stage=Stage.RUN,
    title="import {package} found something else than the installed package: it has no {name}",
    fix="print {package}.__path__ in the script to see what was imported; rename a file {package}.py or a folder "
    "{package} beside the script (and delete its __pycache__), or run it from another folder; if it is "
    "the package itself, install it anew",
    steps=(
        step("python -m pip show -f {package}", note="and in the script: print({package}.__path__)"),
        step("python -m pip install --force-reinstall --no-deps {package}"),
    ),
    manual="""Python takes a module of that name from the script's own folder before the installed one.

A script or folder named like the package, or a checkout of its repository beside the script, hides it; a package that
was removed halfway leaves an empty folder that is imported without an error. Half an upgrade, with files of two
releases, imports itself in a circle ("partially initialized").

Why it matters: Every function of the package seems to be missing.""",
    signatures=(
        Signature(
            words="module+attribute",
            pattern=r"^AttributeError: (?:partially initialized )?module "
            r"'(?P<package>deepspeed|accelerate|transformers)' has no attribute "
            r"'(?P<name>" + NEVER_MISSING + r")'",
            sample="AttributeError: module 'deepspeed' has no attribute 'initialize'",
        ),
        Signature(
            words="partially+initialized+module",
            pattern=r"(?:ImportError: cannot import name '(?P<name>\w{1,80})' from partially initialized module "
            r"'(?P<package>(?!triton|torch\b|numpy\b|deepspeed\.)\w{1,40})(?:\.[\w.]{1,100})?'"
            r"|AttributeError: partially initialized module "
            r"'(?P<package2>(?!triton|torch\b|numpy\b|deepspeed\.)\w{1,40})"
            r"(?:\.[\w.]{1,100})?' has no attribute '(?P<name2>\w{1,80})')",
            tier=Tier.GENERIC,
            title="the package {package} is hidden or imports itself in a circle: {name} is asked for before it is there",
            fix="see whether a file or folder of your own is named {package} ({package}.py beside the script) and rename "
            "it; else reinstall {package} in a fresh environment, as files of two releases are mixed",
            steps=(
                step("ls -d {package}*"),
                step("python -m pip install --force-reinstall --no-deps {package}"),
            ),
            sample="ImportError: cannot import name 'LoraConfig' from partially initialized module 'peft' (most likely "
            "due to a circular import)",
        ),
        Signature(
            words="unencryptedcookiesessionfactoryconfig",
            pattern=r"ImportError: cannot import name '(?P<name>UnencryptedCookieSessionFactoryConfig)' from "
            r"'pyramid\.session'",
            title="the installed package apex is not NVIDIA's: `pip install apex` gives another one of that name",
            fix="remove it: newer transformers and DeepSpeed do not need apex; who does, builds NVIDIA's from its "
            "repository",
            steps=(
                step("python -m pip uninstall -y apex"),
                step("git clone https://github.com/NVIDIA/apex", note="only if the script needs it"),
            ),
            sample="ImportError: cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session' "
            "(unknown location)",
        ),
    ),
)

PACKAGE_ARGUMENT_MISSING = Rule(
    id="package-argument-missing",
    stage=Stage.RUN,
    title="{class} of the installed version does not take the argument {name}",
    fix="rename or remove the argument as the release notes of the package say, or take the version that the "
    "script was written for",
    steps=(step("python -m pip list"), step("python -m pip install -U transformers accelerate trl")),
    explained_by=("known-regression",),
    manual="""A class of transformers, accelerate, trl or peft is called with an argument that this version does not know.

Arguments are renamed (evaluation_strategy, tokenizer), move to another class (SFTConfig), or come with a later
version.

Why it matters: The script stops before it trains.""",
    signatures=(
        Signature(
            words="unexpected+keyword",
            pattern=r"^TypeError: (?P<class>\w{0,40}(?:Trainer|TrainingArguments|Accelerator|LoraConfig"
            r"|SFTConfig|DPOConfig|GRPOConfig"
            r"|PPOConfig|Plugin))\.__init__\(\) got an unexpected keyword argument '(?P<name>\w{1,60})'",
            unless=r"'(?:evaluation_strategy|tokenizer|dispatch_batches|split_batches|even_batches"
            r"|use_seedable_sampler)'",
            tier=Tier.GENERIC,
            sample="TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'",
        ),
    ),
)

ENGINE_ATTRIBUTE = Rule(
    id="engine-attribute-missing",
    stage=Stage.RUN,
    title="the script asks DeepSpeed's {class} for {name}, which it does not have",
    fix="what belongs to the model is at engine.module.{name}; what belongs to the optimizer at "
    "engine.optimizer. If another package asks, it was written for another version of DeepSpeed",
    steps=(step("python -m pip show deepspeed"),),
    explained_by=("known-regression", "optimizer-missing"),
    manual="""An attribute is looked for on an object of DeepSpeed.

deepspeed.initialize wraps the model in an engine and the optimizer in one of its own. Their attributes are not all
passed on, and private ones change with releases.

Why it matters: The script fails where it uses the wrapped object like the bare one.""",
    signatures=(
        Signature(
            words="deepspeedengine+attribute pipelineengine+attribute deepspeedzerooptimizer+attribute "
            "deepspeedzerooptimizer_stage3+attribute bf16_optimizer+attribute fp16_optimizer+attribute "
            "deepspeedzerooffload+attribute deepspeedhybridengine+attribute deepspeeddataloader+attribute "
            "pipelinemodule+attribute inferenceengine+attribute "
            "pipelineparallelgrid+attribute deepspeedconfig+attribute deepspeedcpuadam+attribute fusedadam+attribute",
            pattern=r"^AttributeError: "
            r"'(?P<class>DeepSpeedEngine|PipelineEngine|DeepSpeedZeroOptimizer(?:_Stage3)?|DeepSpeedZeRoOffload"
            r"|DeepSpeedHybridEngine|DeepSpeedDataLoader|BF16_Optimizer|FP16_Optimizer|PipelineModule"
            r"|PipelineParallelGrid|DeepSpeedConfig|InferenceEngine)' object has no attribute '(?P<name>\w{1,80})'",
            unless=r"'(?:train|_register_hooks_recursively|backward|step|param_groups|zero_grad|state_dict"
            r"|loss_scale|cur_scale|step_was_skipped)'"
            r"|ds_grads_remaining|optim_bits|'mp_group'|'fp16_groups'|'loss_scaler'|'overflow'|'ipg_(?:index|buffer)'",
            tier=Tier.GENERIC,
            sample="AttributeError: 'DeepSpeedEngine' object has no attribute 'generate'",
        ),
        Signature(
            words="dict+attribute",
            pattern=r"^AttributeError: 'dict' object has no attribute '(?P<name>is_encoder_decoder|model_type|vocab_size"
            r"|hidden_size"
            r"|pad_token_id|eos_token_id|use_cache|to_dict|to_diff_dict|architectures|name_or_path|_name_or_path|num_hidden_layers"
            r"|num_attention_heads|torch_dtype|text_config|is_composition)'",
            title="the code reads {name} from a configuration that is a dictionary: engine.config is DeepSpeed's, not the model's",
            fix="read it from engine.module.config (accelerate: accelerator.unwrap_model(model).config); where a trainer "
            "does it, a "
            "newer release of it does so",
            sample="AttributeError: 'dict' object has no attribute 'is_encoder_decoder'",
            tier=Tier.GENERIC,
        ),
    ),
)

ACCELERATE_SEVERAL_MODELS = Rule(
    id="accelerate-several-models",
    stage=Stage.RUN,
    title="one Accelerator cannot hold several models under DeepSpeed",
    fix="make an Accelerator (with a DeepSpeedPlugin of its own) for each model, or prepare the second one with "
    "deepspeed.initialize; wrap models that are trained together in one nn.Module",
    manual="""accelerator.prepare() was given more than one model while DeepSpeed is on.

Each engine of DeepSpeed has its own configuration, optimizer and process groups.

Why it matters: prepare() stops, on every rank.""",
    signatures=(
        Signature(
            words="accelerator+models+deepspeed",
            pattern=r"You can't use same `Accelerator\(\)` instance with multiple models when using DeepSpeed",
            sample="AssertionError: You can't use same `Accelerator()` instance with multiple models when using "
            "DeepSpeed",
        ),
    ),
)

TENSORS_NOT_CONTIGUOUS = Rule(
    id="tensors-not-contiguous",
    stage=Stage.RUN,
    title="a tensor that is to be sent among the ranks is not contiguous in memory",
    fix="make the model's parameters contiguous before deepspeed.initialize: for p in model.parameters(): p.data "
    "= p.data.contiguous()",
    manual="""A collective was called with a tensor whose elements do not lie one behind the other.

Transposed or sliced weights, and some models as they are loaded, have such parameters. DeepSpeed broadcasts all
parameters when the engine is made.

Why it matters: The engine cannot be made.""",
    signatures=(
        Signature(
            words="contiguous+tensors",
            pattern=r"^(?:Value|Runtime)Error: Tensors must be contiguous",
            sample="ValueError: Tensors must be contiguous",
        ),
    ),
)

SAMPLES_DIFFER_IN_SIZE = Rule(
    id="samples-differ-in-size",
    stage=Stage.RUN,
    title="the samples of a batch are of different size and cannot be put together",
    fix="pad or cut them to one length: a data collator that pads (DataCollatorWithPadding), truncation=True and "
    "padding=True in the tokenizer",
    manual="""The collate function stacks the samples of a batch, and they do not have the same shape.

Texts of different length, images of different size, or labels that were not padded along with the inputs.

Why it matters: The rank that gets such a batch first ends, and the others wait for it.""",
    signatures=(
        Signature(
            words="stack+equal",
            pattern=r"^RuntimeError: stack expects each tensor to be equal size",
            sample="RuntimeError: stack expects each tensor to be equal size, but got [512] at entry 0 and [487] "
            "at entry 1",
        ),
        Signature(
            words="truncation+unable+tensor",
            pattern=r"^ValueError: Unable to create tensor, you should probably activate truncation and/or padding",
            sample="ValueError: Unable to create tensor, you should probably activate truncation and/or padding "
            "with 'padding=True' 'truncation=True' to have batched tensors with the same length.",
        ),
        Signature(
            words="expected+sequence+length",
            pattern=r"^ValueError: expected sequence of length \d{1,9} at dim \d \(got \d{1,9}\)",
            sample="ValueError: expected sequence of length 75 at dim 1 (got 81)",
        ),
    ),
)

SAMPLING_FROM_NAN = Rule(
    id="sampling-from-nan",
    stage=Stage.RUN,
    title="the model gives inf or nan, and tokens cannot be drawn from it",
    fix="use bf16 instead of fp16, and look at which step the loss became nan; under ZeRO-3 see that the weights "
    "were loaded and are gathered for generation",
    steps=(step("python -m dsdoctor.run SCRIPT.py"),),
    manual="""Generation draws from probabilities, and these hold inf, nan or negative numbers.

fp16 overflows with models that were trained in bf16; a training that has diverged, or weights that were not loaded, do
the same.

Why it matters: Generation stops; on a GPU it can show as a device-side assert.""",
    signatures=(
        Signature(
            words="probability+tensor",
            pattern=r"^RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
            sample="RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        ),
        Signature(
            words="probability+tensor",
            pattern=r"\.(?:cu|hip):\d{1,6}: .{0,200}Assertion .probability tensor contains either `?inf`?, `?nan`? or element < 0",
            title="the model gives inf or nan, and tokens cannot be drawn from it: so says the check in the GPU's kernel",
            sample="../aten/src/ATen/native/cuda/TensorCompare.cu:110: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] "
            "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.",
        ),
    ),
)

HALF_ON_THE_CPU = Rule(
    id="half-on-the-cpu",
    stage=Stage.RUN,
    title="the model runs in {type} on the CPU, and this operation ({operation}) has no such code there",
    fix="move the model and its inputs to the GPU, or load it in float32 (bfloat16 where the processor has it)",
    steps=(step("python -m dsdoctor check"), instead("nvidia-smi")),
    manual="""torch's operations for the CPU do not all exist in half precision.

The model was loaded in fp16 and stayed on the CPU: no GPU was seen, or the code forgot to move it.

Why it matters: The first forward fails.""",
    signatures=(
        Signature(
            words="implemented+half implemented+bfloat16",
            pattern=r"^(?:RuntimeError|NotImplementedError): \"(?P<operation>\w{1,60}?)\" not implemented for "
            r"'(?P<type>Half|BFloat16)'",
            sample="RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
        ),
    ),
)

RULES = (
    PACKAGE_NAME_MISSING,
    PACKAGE_SHADOWED,
    PACKAGE_ARGUMENT_MISSING,
    ENGINE_ATTRIBUTE,
    ACCELERATE_SEVERAL_MODELS,
    TENSORS_NOT_CONTIGUOUS,
    SAMPLES_DIFFER_IN_SIZE,
    SAMPLING_FROM_NAN,
    HALF_ON_THE_CPU,
)
