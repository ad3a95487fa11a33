"""Rules of groups of experts, AutoEP, sizes that do not divide, and of activation checkpointing by DeepSpeed."""

from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

MOE_GROUPS = Rule(
    id="moe-groups",
    stage=Stage.RUN,
    title="the groups of the experts ({what|expert parallel}) do not exist, or are not those of this model",
    fix="use deepspeed.moe.layer.MoE(..., ep_size=N) and let deepspeed.initialize make the groups; do not call "
    "groups.initialize(); let the model's set_deepspeed_parallelism reach every MoE layer, with a Megatron-DeepSpeed "
    "that fits this DeepSpeed",
    manual="""DeepSpeed makes groups of ranks for each ep_size, when deepspeed.initialize meets the MoE layers of the model.

Layers that are used before that, that a pipeline or a wrapper hides, or code for an older interface ask for groups
that nobody has made.

Why it matters: The engine cannot be made, or the first forward of a MoE layer fails.""",
    signatures=(
        Signature(
            words="expert+group+initialized process+group+initialized",
            pattern=r"AssertionError: (?:Warning! Process group not initialized|(?P<what>expert (?:data )?parallel) "
            r"group is not initialized)",
            not_after=r"groups\.py",
            sample="AssertionError: expert parallel group is not initialized",
        ),
        Signature(
            words="expert+configured+moe overriding+ep_group override+ep_group groups+deprecated",
            pattern=r"(?:Error|Exception): (?:(?P<what>Expert (?:data )?parallel) group should be configured with "
            r"MoE|Attempting to override an existing ep_group|Please do not use the groups\.initialize\(\) "
            r"API)",
            sample="AssertionError: Expert parallel group should be configured with MoE",
        ),
        Signature(
            words="noisy_gate_policy drop_policy",
            pattern=r"Error: (?P<what>Unsupported noisy_gate_policy: .{1,40}|Invalid drop_policy: .{1,40})",
            title="the MoE layer was given a value that it does not know: {what}",
            fix="noisy_gate_policy takes None, 'Jitter' and 'RSample'; drop_policy 'probs' and 'position'",
            sample="AssertionError: Unsupported noisy_gate_policy: Gauss",
        ),
    ),
)

AUTO_EXPERTS = Rule(
    id="moe-autoep",
    stage=Stage.RUN,
    title="AutoEP (expert_parallel in the configuration) cannot be used as it is set: {what}",
    fix="change the key of expert_parallel that the message names; preset_model must be that of the model, autoep_size "
    "must divide both the number of experts and the number of ranks",
    manual="""AutoEP replaces the expert blocks of a Hugging Face model by expert-parallel ones, after a preset for its
architecture.

The preset, sizes and back ends are checked when the engine is made, and the message says which value does not fit.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="autoep autoep_size preset_model comm_backend combine_impl row_weighting_impl gate_up_impl "
            "num_limited_groups experts_per_group score+function+unknown modulelist+storage fused+layout+expert weight+expert+find",
            pattern=r"^(?:Value|Runtime|Type|Import|NotImplemented)Error: (?P<what>(?:AutoEP|Unknown "
            r"preset_model|autoep_size=|comm_backend|combine_impl|row_weighting_impl|gate_up_impl"
            r"|expert_parallel\.|num_experts=\d{1,6} in layer|num_limited_groups|num_expert_groups|experts_per_group"
            r"|Unknown (?:group )?score function|Expected nn\.ModuleList for module_list storage|Unsupported fused expert"
            r" weight layout"
            r"|Could not find weight '\w{1,60}' in expert module).{1,160})",
            unless=r"does not (?:currently )?support|only supports|supports only|cannot be combined|checkpoint",
            tier=Tier.NAMED,
            sample="ValueError: AutoEP: no MoE layers detected for model class LlamaForCausalLM. Expected MoE "
            "structure for selected preset(s): mixtral",
        ),
    ),
)

SIZES_NOT_DIVISIBLE = Rule(
    id="sizes-not-divisible",
    stage=Stage.RUN,
    title="{what} is not divisible by {by}",
    family=True,
    fix="change one of the two sizes, so that the second divides the first: layers by pipeline stages, heads and hidden "
    "sizes by the tensor-parallel size, the global batch by micro batch times data-parallel ranks, ranks by the "
    "product of all parallel sizes",
    manual="""A framework divides something evenly among ranks, stages or groups, and it does not come out even.

The message names both. In Megatron-DeepSpeed the world size must be tensor x pipeline x data x sequence, in this order.

Why it matters: The run stops before the first step, on every rank.""",
    signatures=(
        Signature(
            words="divisible",
            pattern=r"^(?:AssertionError|ValueError|RuntimeError|Exception): (?P<what>[^:]{1,140}?) (?:should "
            r"be|must be|has to be|needs to be|is not|isn't|are not|not) (?:evenly )?divisible by (?:the "
            r")?(?P<by>[^.!]{1,80})",
            unless=r"[Ee]xpert|ep_size|[Tt]rain batch size|nccl_start|8\*|[Hh]ead|sequence|SP "
            r"size|sp-size|batch.{0,20}micro|Error: \d{1,9} is",
            tier=Tier.GENERIC,
            sample="AssertionError: num_layers should be divisible by pipeline_model_parallel_size",
        ),
        Signature(
            words="multiple+of",
            pattern=r"^(?:AssertionError|ValueError|RuntimeError): (?P<what>[^:]{1,140}?) (?:should be|must be|has "
            r"to be|needs to be|is not|isn't) a multiple of (?:the )?(?P<by>[^.!]{1,80})",
            unless=r"[Ee]xpert|ep_size|batch size must|nccl_start|weights be|projection size",
            tier=Tier.GENERIC,
            sample="ValueError: hidden_size must be a multiple of num_attention_heads",
        ),
    ),
)

ACTIVATION_CHECKPOINTING = Rule(
    id="activation-checkpointing-settings",
    stage=Stage.RUN,
    title="DeepSpeed's activation checkpointing is not set up as it must be{what_hint}",
    fix="in the block activation_checkpointing set partition_activations true with contiguous_memory_optimization, "
    "and number_checkpoints; call deepspeed.checkpointing.configure(mpu, config) before the model's first forward",
    manual="""deepspeed.checkpointing stores activations of checkpointed blocks, divided among tensor-parallel ranks or on the CPU.

Contiguous memory needs partitioned activations and the number of layers. Dropout of tensor-parallel regions needs
seeds that model_parallel_cuda_manual_seed makes.

Why it matters: The first forward or backward fails.""",
    signatures=(
        Signature(
            words="contiguous+checkpointing layers+checkpointing partition+activation checkpointing+supported",
            pattern=r"Error: (?:Contiguous Checkpointing is only available with partitioned activations|Must specify "
            r"the number of layers with contiguous memory checkpointing|Doesn't handle if partition "
            r"activation if item is not divisible by mp size)",
            sample="AssertionError: Contiguous Checkpointing is only available with partitioned activations. Set "
            "partitioned activations to true in deepspeed config",
        ),
        Signature(
            words="rng+state+added rng+state+exists seed+exists",
            pattern=r"Exception: (?:cuda rng state (?P<what>\S{1,60}) (?:is not added|already exists)|seed "
            r"(?P<what2>\S{1,24}) already exists)",
            title="the random state of the tensor-parallel region ({what}) was not set, or was set twice",
            fix="call model_parallel_cuda_manual_seed(seed) once in each process "
            "(deepspeed.checkpointing.model_parallel_cuda_manual_seed, or Megatron's), before the model's first "
            "forward",
            sample="Exception: cuda rng state model-parallel-rng is not added",
        ),
    ),
)

RULES = (MOE_GROUPS, AUTO_EXPERTS, SIZES_NOT_DIVISIBLE, ACTIVATION_CHECKPOINTING)
