"""Rules of mixtures of experts and of pipelines: sizes that do not divide, groups that are not marked, wrong calls."""

from dsdoctor.diagnosis.models import Rule, Signature, Stage

MOE_EXPERT_PARALLEL_SIZE = Rule(
    id="moe-expert-parallel-size",
    stage=Stage.RUN,
    title="{number|the number} is not divisible by the expert-parallel size (ep_size) {size|that was asked for}",
    fix="choose an ep_size that divides both the number of experts and the number of ranks",
    manual="""The experts cannot be spread over this many ranks.

ep_size says over how many ranks the experts of a layer are spread. It must divide the number of experts, and the number
of data-parallel ranks.

Why it matters: The model cannot be made, or the engine stops when it makes its groups.""",
    signatures=(
        Signature(
            words="divisible+experts",
            pattern=r"Number of experts \((?P<number>\d{1,6})\) should be divisible by expert parallel size "
            r"\((?P<size>\d{1,6})\)",
            title="{number} experts cannot be spread over an expert-parallel size (ep_size) of {size}",
            sample="AssertionError: Number of experts (3) should be divisible by expert parallel size (2)",
        ),
        Signature(
            words="assertionerror+divisible",
            pattern=r"^AssertionError: (?P<number>\d{1,6}) is not divisible by (?P<size>\d{1,6})$",
            after=r"groups\.py|_ensure_divisibility|[\\/]moe[\\/]|ep_size|expert_parallel",
            not_after=r"zero_param_parallel|world_size, (?:tensor_)?(?:model_)?parallel_size",
            title="the world size {number} is not divisible by the expert-parallel size (ep_size) {size}",
            sample='  File "/venv/deepspeed/utils/groups.py", line 60, in '
            "_ensure_divisibility\nAssertionError: 4 is not divisible by 8",
        ),
    ),
)

MOE_PARAMETER_GROUPS = Rule(
    id="moe-parameter-groups",
    stage=Stage.RUN,
    title="the optimizer's parameter groups do not mark the experts",
    fix="split the parameters before the optimizer is made: "
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer({'params': [...], 'name': 'all'})",
    manual="""Experts are reduced among other ranks than the rest of the model, so they need a param group of their own.

The group holds experts only and has the key 'moe': True. DeepSpeed splits the groups itself where it makes the optimizer
from its configuration.

Why it matters: ZeRO stops, because it would reduce the experts among the wrong ranks.""",
    signatures=(
        Signature(
            words="groups+moe group+moe",
            pattern=r"The model has moe layers, but None of the param groups are marked as MoE|All params in "
            r"MoE group must be MoE params",
            sample="AssertionError: The model has moe layers, but None of the param groups are marked as MoE. "
            "Create a param group with 'moe' key set to True before creating optimizer",
        ),
    ),
)

MOE_ZERO_STAGE = Rule(
    id="moe-zero-stage",
    stage=Stage.RUN,
    title="DeepSpeed's own mixture of experts does not work with this ZeRO configuration",
    fix="use ZeRO stage 1 or 2 with contiguous_gradients and reduce_scatter true; for a Hugging Face model under "
    "ZeRO-3 mark its expert block as a leaf module instead",
    manual="""deepspeed.moe.layer.MoE distributes its experts itself, which does not go together with some ZeRO settings.

Stage 3 is refused, and stage 2 needs contiguous_gradients and reduce_scatter.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="moe+stage",
            pattern=r"MoE (?:is )?not supported with (?:ZeRO )?Stage 3|(?:Contiguous Gradients|Reduce Scatter) "
            r"in ZeRO Stage 2 must be set "
            r"to True for MoE",
            sample="AssertionError: MoE not supported with Stage 3",
        ),
    ),
)

MOE_TOO_FEW_TOKENS = Rule(
    id="moe-too-few-tokens",
    stage=Stage.RUN,
    title="a batch has fewer tokens than min_capacity of the experts",
    fix="set min_capacity=0 in the MoE layer, or use a larger batch",
    manual="""The gate of a MoE layer got fewer tokens than each expert must be able to take.

The last batch of a data set is often smaller; drop_last=True leaves it out.

Why it matters: The step fails on the ranks with the small batch, and the others wait.""",
    signatures=(
        Signature(
            words="min_capacity+tokens",
            pattern=r"No\. of tokens \(batch-size\) should be greater than min_capacity",
            sample="AssertionError: No. of tokens (batch-size) should be greater than min_capacity. Either set "
            "min_capacity to 0 or increase your batch size.",
        ),
        Signature(
            words="selected+index+range class+num_classes",
            pattern=r"^RuntimeError: (?:selected index k out of range|Class values must be smaller than num_classes)",
            after=r"sharded_moe\.py|top[1k2]gating|_top_idx",
            title="the capacity of the experts does not fit the number of tokens of this batch: ranks hold batches "
            "of different size",
            fix="give all ranks the same number of tokens (pad to one length, drop_last=True), leave use_rts on, and "
            "take a newer DeepSpeed (0.14.1 limits the capacity to the number of tokens)",
            sample='  File "/venv/deepspeed/moe/sharded_moe.py", line 172, in _top_idx\n'
            "RuntimeError: selected index k out of range",
        ),
        Signature(
            words="split+sizes+dim",
            pattern=r"^RuntimeError: Split sizes doesn't match total dim 0 size",
            title="the number of tokens that is sent to the experts of other ranks is not the number that there is "
            "(all_to_all_single)",
            fix="see that the router's counts and the tokens come from the same forward: the same padding and "
            "dropping on all ranks, no replayed or cached routing of another batch; split sizes must add up to "
            "the first dimension",
            sample="RuntimeError: Split sizes doesn't match total dim 0 size",
        ),
        Signature(
            words="shape+invalid",
            pattern=r"^RuntimeError: shape '\[[\d, ]{1,40}\]' is invalid for input of size 0",
            after=r"token_dispatcher|sharded_moe|experts?\.py|self\.hidden_shape",
            title="an expert's rank got no token at all in this batch, and the dispatcher does not expect that",
            fix="take a newer release of the framework's MoE layer, another token dispatcher (allgather), or a "
            "larger batch; tensor and expert parallelism together often need one special combination",
            sample="    output = output.view(self.hidden_shape)\n"
            "RuntimeError: shape '[2048, 1, 4096]' is invalid for input of size 0",
        ),
    ),
)

PIPELINE_STAGES = Rule(
    id="pipeline-stages",
    stage=Stage.RUN,
    title="{stages|the number of} pipeline stages do not divide the world size {world|of this run}",
    fix="choose num_stages so that it divides the number of ranks, or start more ranks",
    manual="""The ranks are divided evenly among the stages of the pipeline.

The world size must be num_stages times the data-parallel (and tensor-parallel) size.

Why it matters: The PipelineModule cannot be made.""",
    signatures=(
        Signature(
            words="num_stages+divide",
            pattern=r"num_stages \((?P<stages>\d{1,6})\) must divide distributed world size \((?P<world>\d{1,6})\)",
            sample="RuntimeError: num_stages (3) must divide distributed world size (2)",
        ),
        Signature(
            words="partition+layers",
            pattern=r"Partitioning '(?P<stages>[^']{1,80})' found no valid layers to partition",
            title="partition_method names layers that the model does not have: {stages}",
            fix="correct partition_method: type:REGEX matches the class names of the layers",
            sample="RuntimeError: Partitioning 'decoderlayer' found no valid layers to partition.",
        ),
    ),
)

PIPELINE_ZERO_STAGE = Rule(
    id="pipeline-zero-stage",
    stage=Stage.RUN,
    title="pipeline parallelism works with ZeRO stage 0 and 1 only, and the configuration has stage 2 or 3",
    fix="set zero_optimization.stage to 1 or 0; or make the model without a pipeline, and keep the stage: Megatron-DeepSpeed makes "
    "one even for a pipeline of size 1, unless it is given --no-pipeline-parallel",
    manual="""A pipeline runs several micro batches before the gradients are complete.

ZeRO 2 and 3 give gradients or weights away after each backward, so they would do so for every micro batch.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="pipeline+zero",
            pattern=r"ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
            sample="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        ),
    ),
)

PIPELINE_CALLED_DIRECTLY = Rule(
    id="pipeline-called-directly",
    stage=Stage.RUN,
    title="a pipeline engine is called like a model: only train_batch and eval_batch exist",
    fix="call engine.train_batch(data_iter=...) or engine.eval_batch(...); they run forward, backward and step "
    "for all micro batches",
    manual="""A PipelineEngine has no forward, backward and step of its own.

A rank holds some layers only, so a whole batch has to be driven through all stages together.

Why it matters: The first call fails. train_batch also needs gradients to be enabled.""",
    signatures=(
        Signature(
            words="train_batch+pipeline",
            pattern=r"Only train_batch\(\) is accessible in pipeline mode",
            sample="deepspeed.runtime.pipe.module.PipelineError: Only train_batch() is accessible in pipeline mode.",
        ),
        Signature(
            words="pipelineengine+module_state_dict",
            pattern=r"AssertionError: PipelineEngine expects module_state_dict\(\) to be called from save_checkpoint",
            title="the state_dict of a pipeline engine was asked for: its layers are saved by save_checkpoint only",
            fix="call engine.save_checkpoint(folder, tag) on every rank",
            sample="AssertionError: PipelineEngine expects module_state_dict() to be called from save_checkpoint()",
        ),
        Signature(
            words="train_batch+gradients",
            pattern=r"train_batch\(\) requires gradients enabled",
            title="train_batch was called with gradients switched off: eval_batch is for that",
            sample="RuntimeError: train_batch() requires gradients enabled. Use eval_batch() instead.",
        ),
    ),
)

RULES = (
    MOE_EXPERT_PARALLEL_SIZE,
    MOE_PARAMETER_GROUPS,
    MOE_ZERO_STAGE,
    MOE_TOO_FEW_TOKENS,
    PIPELINE_STAGES,
    PIPELINE_ZERO_STAGE,
    PIPELINE_CALLED_DIRECTLY,
)
