"""Rules of DeepSpeed's own checks: moved states, Muon's groups, vocabulary-parallel loss, AutoEP, arguments, old torch."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

REFUSED = r"^(?:Assertion|Value|Runtime|Type|Key|NotImplemented|Import)Error: "
"""An exception that is raised on purpose, at the head of its line."""

STATES_MOVED = Rule(
    id="states-moved",
    stage=Stage.RUN,
    title="engine.offload_states() or another function of ZeRO-3 does not work with this engine: {what}",
    fix="call it on an engine with ZeRO-3, DeepSpeed's FusedAdam and neither offload_param nor offload_optimizer; what "
    "is offloaded by the configuration already lies in host memory",
    steps=(instead("python -m dsdoctor explain states-moved"),),
    manual="""offload_states and reload_states move a ZeRO-3 engine's states between the GPU and the host, as RLHF does around
generation.

They know states that lie on the GPU, of FusedAdam. Other stages, other optimizers, engines without an optimizer (a
reference model) and configurations that offload anyway are refused.

Why it matters: The call fails on every rank.""",
    signatures=(
        Signature(
            words="moving+states offloading+fusedadam function+requires consolidated_16bit_state_dict",
            pattern=REFUSED
            + r"(?P<what>Moving states across devices is not supported (?:without|for) \w{1,20}(?: \w{1,20})?|Offloading is "
            r"supported only for DeepSpeed FusedAdam|this function requires ZeRO-3 mode|consolidated_16bit_state_dict is "
            r"only applicable to cases where weights are partitioned)",
            sample="AssertionError: Moving states across devices is not supported for offloaded parameters.",
        ),
    ),
)

MUON_SETTINGS = Rule(
    id="muon-settings",
    stage=Stage.RUN,
    title="DeepSpeed's Muon does not take these parameters or settings: {what}",
    fix="let DeepSpeed make the optimizer from the configuration (type Muon) and give deepspeed.initialize the "
    "model, so that it marks each parameter with use_muon; keep one momentum and one ns_method for all groups, "
    "and leave vectors (biases, norms) to its Adam part",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""Muon works on matrices, and Adam on everything else; use_muon on each parameter says which.

DeepSpeed sets the mark from the model. Groups that the script made itself, parameters without a mark, and several
momenta are refused.

Why it matters: The engine cannot be made, or the first step fails.""",
    signatures=(
        Signature(
            words="muon ns_method+must",
            pattern=REFUSED
            + r"(?P<what>(?:All Muon parameter groups must|The Muon optimizer needs|Per-head Muon expects|if use muon, then "
            r"tensor dim > 1|ns_method must be one of).{0,140})",
            sample="ValueError: All Muon parameter groups must have the same momentum (beta). Found 0.95 and 0.9.",
        ),
    ),
)

VOCABULARY_PARALLEL = Rule(
    id="vocabulary-parallel-loss",
    stage=Stage.RUN,
    title="the vocabulary-parallel loss refuses its input: {what}",
    fix="give each tensor-parallel rank its own, not overlapping part of the vocabulary (vocab_start_index, "
    "vocab_end_index), labels of the shape of the logits without the last dimension, and sp_group where the loss is "
    "gathered; or use gather_output=True, which needs none of it",
    manual="""The logits stay divided over the tensor-parallel ranks, and the loss is computed from the parts.

For that each rank must know which tokens it holds, and labels, logits and groups must fit together. The backend liger
needs liger-kernel.

Why it matters: The loss cannot be computed.""",
    signatures=(
        Signature(
            words="vocabulary+range vocab+range index+vocabulary",
            pattern=REFUSED + r"(?:Target|index) is out of range for vocabulary size (?P<size>\d{1,9})",
            title="a label is no token of the vocabulary ({size} tokens): tokenizer and model do not fit, or the "
            "padding of the labels is not -100",
            fix="resize the model's embedding to the tokenizer, and mark padded labels by -100 (ignore_index)",
            sample="ValueError: Target is out of range for vocabulary size 32000",
        ),
        Signature(
            words="vocab_parallel_logits shard+vocabulary global_vocab_size vocab_start_index liger+ce "
            "vocab_parallel_lm_head vocabparallelcausallmloss vocab_parallel_ce_backend parallel+head "
            "sp_group+required",
            pattern=REFUSED
            + r"(?P<what>(?:vocab_parallel_\w{1,20}|Vocabulary shard bounds|(?:Explicit )?vocabulary shard bounds"
            r"|TP rank \d{1,5} received an empty vocabulary shard|global_vocab_size requires|vocab_start_index and"
            r"|Liger (?:vocabulary-parallel )?CE|VocabParallelCausalLMLoss|A no-gather vocab-parallel LM head"
            r"|Unable to (?:install the|choose a loss for) |Explicit vocabulary|sp_group is required|gather_sequence_loss)"
            r".{0,140})",
            sample="ValueError: Vocabulary shard bounds must form a contiguous, non-overlapping partition starting at 0",
        ),
        Signature(
            words="reduction+unsupported vocabulary+backend vocab_parallel_logits chunk_size+positive "
            "student_logits+teacher_logits local_vocab hidden+target",
            pattern=REFUSED
            + r"(?P<what>Unsupported reduction: \S{1,40}|Unsupported vocabulary-parallel CE backend: \S{1,40}"
            r"|chunk_size must be positive|hidden and target must have matching non-hidden dimensions"
            r"|weight must have shape \[local_vocab, hidden\]|index must match the non-vocabulary dimensions of "
            r"vocab_parallel_logits|student_logits and teacher_logits must have the same shape)",
            fix="use reduction mean, sum or none and one of the back ends that the function's documentation lists; hidden states "
            "and targets must agree in all but the last dimension, and chunk_size be above 0",
            sample="ValueError: Unsupported reduction: max",
        ),
    ),
)

AUTOEP_REFUSED = Rule(
    id="autoep-refused",
    stage=Stage.RUN,
    title="DeepSpeed's automatic expert parallelism (AutoEP) does not support this combination: {what}",
    fix="let DeepSpeed make the optimizer after the experts were replaced (give it no optimizer of your own), save "
    "and load with the same expert-parallel size, and convert older checkpoints to the universal format; else "
    "leave AutoEP out",
    manual="""AutoEP replaces a model's experts by grouped ones and divides them over the expert-parallel ranks.

An optimizer that was made before holds the old parameters; checkpoints keep the division they were saved with; frozen
experts, NVMe and DeepSpeed's own MoE layers beside it are not supported yet.

Why it matters: The engine, or the checkpoint, cannot be made or loaded.""",
    signatures=(
        Signature(
            words="autoep autoepmoelayer grouped_mm+pytorch use_grouped_mm expert+checkpoint expert_storage "
            "expert+activation num_expert_groups",
            pattern=REFUSED
            + r"(?P<what>(?:Module replacement \(AutoEP\)|AutoEP (?:with ZeRO Stage 3 checkpoint|ZeRO-3|universal"
            r"|checkpointing|expert|replacement)"
            r"|Folded AutoEP|Missing AutoEP|Legacy checkpoint format \(old_moe_load\)|Expert checkpoint file is corrupt"
            r"|GroupedExperts was constructed|Checkpoint module state did not match the model outside AutoEP"
            r"|\S{1,80} is not supported for AutoEP|Unknown expert_storage|unknown expert activation"
            r"|num_experts \(\d{1,6}\) must be divisible by num_expert_groups).{0,160})",
            sample="RuntimeError: AutoEP ZeRO-3 checkpoints can only be loaded with the same parameter placement "
            "topology in this release.",
        ),
    ),
)

ENGINE_ARGUMENTS = Rule(
    id="engine-arguments",
    stage=Stage.RUN,
    title="a function of DeepSpeed was given an argument of another kind than it takes: {what}",
    fix="give deepspeed.initialize a torch Dataset as training_data, a list or iterator of parameters (or of groups) as "
    "model_parameters, and an int as args.local_rank; save_checkpoint wants a folder's name and a client_state without "
    "DeepSpeed's own keys (module, optimizer, lr_scheduler, ...)",
    manual="""deepspeed.initialize and save_checkpoint check what they are given, before they use it.

Most often a data loader instead of a data set, a generator that is used up, an empty output folder, or a state whose
names DeepSpeed uses itself.

Why it matters: The call fails on every rank.""",
    signatures=(
        Signature(
            words="training+data+torch local_rank+type model_parameters+list argument+optimizer+iterable "
            "save_dir+string client_state+reserved",
            pattern=REFUSED
            + r"(?P<what>(?:Training data must be a torch Dataset|args\.local_rank of \S{1,40} is an unknown type"
            r"|model_parameters must be a list|param argument that would be given to the optimizer should be"
            r"|save_dir must be a non-empty string|client_state contains reserved checkpoint key).{0,120})",
            sample="AssertionError: Training data must be a torch Dataset",
        ),
    ),
)

TORCH_TOO_OLD = Rule(
    id="torch-too-old",
    stage=Stage.RUN,
    title="this torch is too old for what DeepSpeed is asked to do: {what}",
    fix="install a newer torch and build DeepSpeed's ops for it again, or switch the setting off that needs it",
    steps=(
        step("python -m pip install -U torch"),
        step("python -m dsdoctor check"),
    ),
    manual="""Some of DeepSpeed's functions are built on functions of newer torch releases.

Device meshes, symmetric memory (2.5), grouped matrix products, engine.compile and leaf modules are such.

Why it matters: The engine, or the setting, does not work with this torch.""",
    signatures=(
        Signature(
            words="current+torch+version torch+version+higher leaf+requires compile+supported+pytorch",
            pattern=REFUSED
            + r"(?P<what>(?:Current torch version does not have|Torch version must be [\d.]{1,8} or higher|Leaf module "
            r"requires PyTorch|compile is not supported in your version of PyTorch).{0,100})",
            sample="RuntimeError: Current torch version does not have device meshapi (torch.__version__: 2.1.0)",
        ),
    ),
)

ZERO_CHECKPOINT_LAYOUT = Rule(
    id="zero-checkpoint-layout",
    stage=Stage.RUN,
    title="the optimizer's states in the checkpoint do not fit the settings of this run: {what}",
    fix="load with the settings that the checkpoint was saved with, or load the weights only: "
    "engine.load_checkpoint(path, load_optimizer_states=False, load_module_only=True)",
    manual="""ZeRO saves the optimizer's states as it has divided and aligned them.

compute_grad_norm, parameter_alignment, gradient clipping and the version of ZeRO-1 belong to that layout; states of
ranks at different steps come from a save that was interrupted, or from files of several saves.

Why it matters: The training does not resume.""",
    signatures=(
        Signature(
            words="compute_grad_norm+checkpoint checkpoint+alignment empty+ds_version step+same+value "
            "zero+compatible+old custom_load_fn",
            pattern=REFUSED
            + r"(?P<what>(?:Cannot load a checkpoint with gradient clipping into zero_optimization\.compute_grad_norm"
            r"|The ZeRO checkpoint parameter-alignment layout does not match|Empty ds_version in checkpoint"
            r"|(?:State dicts of all partitions|All param groups) must have the same step value"
            r"|Old version: \S{1,20} ZeRO stage 1 changed|custom_load_fn not supported w\. pipeline).{0,100})",
            sample="AssertionError: State dicts of all partitions must have the same step value",
        ),
    ),
)

ZERO_INIT_ARGUMENTS = Rule(
    id="zero-init-arguments",
    stage=Stage.RUN,
    title="deepspeed.zero.Init, or the engine, is given a type or a device that does not fit the configuration: {what}",
    fix="let zero.Init take everything from the configuration (config_dict_or_path=config, no dtype and no "
    "remote_device of its own): bf16 or fp16 enabled for the type, offload_param with its device and nvme_path "
    "for NVMe",
    manual="""zero.Init and the engine both decide in which type and where the parameters are kept.

Types other than half, bfloat16 and float32 cannot be divided, and a remote device must be the one of offload_param.

Why it matters: The model cannot be made.""",
    signatures=(
        Signature(
            words="invalid+data+type offload_param+remote param_dtype+conflicts swappable+numel params+nvme+memory",
            pattern=REFUSED
            + r"(?P<what>(?:Invalid data type \S{1,40}, allowed values are \[torch\.half|\"offload_param\" must be defined in "
            r"DeepSpeed Config|data_types\.param_dtype='\S{1,40}' conflicts with"
            r"|Parameter \S{1,20} of numel=\d{1,15} is not swappable|Either params are in nvme, or they are in CPU memory)"
            r".{0,120})",
            sample="AssertionError: Invalid data type torch.float64, allowed values are [torch.half, torch.bfloat16, "
            "torch.float]",
        ),
        Signature(
            words="larger+16k adaptive+grouping quantize_dstensor",
            pattern=REFUSED
            + r"(?P<what>\d{1,15} / \d{1,9} is larger than 16k|Adaptive grouping algorithm cannot find a group size"
            r"|quantize_dstensor\(\) expects tensor\.dtype == torch\.float16)",
            title="zero_quantized_weights cannot quantize a parameter of this size or type: {what}",
            fix="set zero_quantized_weights (and zero_quantized_nontrainable_weights) false, or use fp16 and layers "
            "whose sizes are multiples of 8",
            sample="AssertionError: Adaptive grouping algorithm cannot find a group size for input tensor of size 7",
        ),
    ),
)

COMPILE_SETTINGS = Rule(
    id="compile-settings",
    stage=Stage.RUN,
    title="DeepSpeed's settings for compilation do not go together: {what}",
    fix="name one set of passes only (compile.passes), call engine.compile() once and after all settings, or leave the "
    "block compile out",
    manual="""engine.compile runs passes of DeepSpeed over torch's graph, and not every pass works with every other.

Why it matters: The engine is not compiled, and the run stops.""",
    signatures=(
        Signature(
            words="autotp+compile+pass engine+compiled autoep_non_moe unknown+pass",
            pattern=REFUSED
            + r"(?P<what>(?:The AutoTP compile pass cannot|Engine is already compiled|compile\.autoep_non_moe=True|Unknown pass "
            r"\w{1,40}).{0,120})",
            sample="ValueError: The AutoTP compile pass cannot yet be combined with AutoSP or the ZeRO passes.",
        ),
        Signature(
            words="random_ltd_layer_num",
            pattern=REFUSED + r"random_ltd_layer_num (?P<number>\d{1,6}) must be {1,40}equivalent to the len of "
            r"random_ltd_layer_id (?P<count>\d{1,6})",
            title="random_ltd_layer_num is {number}, and the model has {count} layers of the ids in random_ltd_layer_id",
            fix="let random_ltd_layer_num be the number of ids in random_ltd_layer_id, and give ids of layers that the "
            "model has",
            sample="ValueError: random_ltd_layer_num 22 must be                 equivalent to the len of "
            "random_ltd_layer_id 20",
        ),
    ),
)

RULES = (
    STATES_MOVED,
    MUON_SETTINGS,
    VOCABULARY_PARALLEL,
    AUTOEP_REFUSED,
    ENGINE_ARGUMENTS,
    TORCH_TOO_OLD,
    ZERO_CHECKPOINT_LAYOUT,
    ZERO_INIT_ARGUMENTS,
    COMPILE_SETTINGS,
)
