"""Rules of parts of the engine in use: schedulers, optimizers without a scale, norms of zero, sizes of partitions."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

IN_ZERO = r"zero[/\\](?:stage|partition|mics)\w{0,40}\.py"

SCHEDULER_IN_USE = Rule(
    id="scheduler-in-use",
    stage=Stage.RUN,
    title="the learning-rate scheduler is asked for something that it does not have yet, or not at all{name_hint}",
    fix="ask for the learning rate after the first real step (with fp16 the first steps are skipped for overflow), "
    "or read it from engine.get_lr(); a newer DeepSpeed gives it from the start",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""DeepSpeed's own schedulers (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle) are stepped by the engine.

In older releases they know a learning rate only after a step that was not skipped, and some lack functions of torch's
schedulers.

Why it matters: Logging or saving fails; the training itself is right.""",
    signatures=(
        Signature(
            words="call+step+first",
            pattern=r"AssertionError: need to call step\(\) first",
            title="get_last_lr() was called before the scheduler had made a step: all steps so far were skipped for "
            "overflow, or none was made",
            sample="AssertionError: need to call step() first",
        ),
        Signature(
            words="warmuplr+attribute warmupdecaylr+attribute warmupcosinelr+attribute onecycle+attribute "
            "lrrangetest+attribute",
            pattern=r"AttributeError: '(?P<scheduler>WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle|LRRangeTest)' "
            r"object has no attribute '(?P<name>\w{1,60})'",
            title="DeepSpeed's {scheduler} has no {name} in this release",
            fix="upgrade DeepSpeed, use another scheduler of DeepSpeed (WarmupDecayLR), or make one of torch or "
            "transformers in the script and give it to deepspeed.initialize (remove the block scheduler)",
            sample="AttributeError: 'WarmupCosineLR' object has no attribute 'get_last_lr'",
        ),
        Signature(
            words="zerodivisionerror",
            pattern=r"^ZeroDivisionError: float division by zero",
            after=r"self\.decay_step_size|_get_decay_lr",
            title="OneCycle reached its decay phase, and decay_step_size is 0 (its default)",
            fix="set decay_step_size in scheduler.params, or let the cycle be as long as the training",
            sample="    decay_interval = decay_batch_iteration / self.decay_step_size\nZeroDivisionError: float "
            "division by zero",
        ),
        Signature(
            words="dynamic+loss+scaling",
            pattern=r"AssertionError: DeepSpeed (?P<name>\w{1,40}) optimizer requires dynamic loss scaling",
            title="the optimizer {name} works only with fp16 and dynamic loss scaling (loss_scale 0)",
            fix="set fp16.enabled with loss_scale 0, or choose another optimizer (AdamW) for bf16 and fp32",
            sample="AssertionError: DeepSpeed lamb optimizer requires dynamic loss scaling",
        ),
    ),
)

LOSS_SCALE_WITHOUT_FP16 = Rule(
    id="loss-scale-without-fp16",
    stage=Stage.RUN,
    title="the script asks {class|the optimizer} for {name}, which only the fp16 optimizer has: the run is in bf16 "
    "or fp32",
    fix="read the loss scale only where fp16 is on (getattr(optimizer, 'cur_scale', 1.0)); bf16 has none and needs "
    "none. Where DeepSpeed itself asks, upgrade it",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""Loss scaling belongs to fp16. The optimizers for bf16 and fp32 have no cur_scale, loss_scale or fp16_groups.

Scripts of fp16 times read them for logging or when they save.

Why it matters: The script fails at the first step or save.""",
    signatures=(
        Signature(
            words="bf16_optimizer+attribute fusedadam+attribute deepspeedcpuadam+attribute adamw+attribute",
            pattern=r"AttributeError: '(?P<class>BF16_Optimizer|FusedAdam|DeepSpeedCPUAdam|AdamW)' object has no "
            r"attribute '(?P<name>cur_scale|loss_scale|loss_scaler|fp16_groups|cur_iter|dynamic_loss_scale"
            r"|fp32_groups_flat|overflow)'",
            sample="AttributeError: 'BF16_Optimizer' object has no attribute 'cur_scale'",
        ),
    ),
)

GRADIENT_NORM_ZERO = Rule(
    id="gradient-norm-zero",
    stage=Stage.RUN,
    title="the norm of all gradients is 0 or nan in this step, and DeepSpeed's bf16 optimizer stops",
    fix="look for a batch whose labels are all ignored (-100), a loss that does not depend on the trainable weights, "
    "or a nan; upgrade DeepSpeed (the assertion was taken out), or use ZeRO stage 1 or 2 instead of 0",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""BF16_Optimizer of older DeepSpeeds asserts that the norm of the gradients is above 0.

A batch without a label that counts gives no gradient at all. A nan is not above 0 either.

Why it matters: One batch ends the run.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert all_groups_norm > 0",
            sample="    assert all_groups_norm > 0.\nAssertionError",
        ),
    ),
)

ZERO_SIZES_DIFFER = Rule(
    id="zero-sizes-differ",
    stage=Stage.RUN,
    title="a part of ZeRO has another size than it should have ({sizes|two tensors do not fit}): parameters were "
    "changed after the engine was made, or ranks hold other parts",
    fix="change the model (resize, replace, freeze, quantize) before deepspeed.initialize and alike on all ranks; "
    "resume with the number of ranks that saved, or convert to a universal checkpoint",
    manual="""ZeRO lays all parameters of a group out in one flat tensor and gives each rank a part of it.

A parameter that is resized or replaced later, ranks with different models, or parts that were saved by another number
of ranks do not fit into it.

Why it matters: The backward pass, the step or loading fails.""",
    signatures=(
        Signature(
            words="singleton+size+tensor",
            pattern=r"^RuntimeError: The size of tensor a \((?P<a>[1-9]\d{0,12})\) must match the size of tensor b "
            r"\((?P<b>[1-9]\d{0,12})\) at non-singleton dimension 0",
            after=r"_rigid_load_state_dict|_load_(?:base_)?optimizer_state|load_state_dict.{0,40}zero|zero.{0,80}in "
            r"load_state_dict",
            title="the checkpoint's parts of ZeRO have other sizes than this run's ({a} and {b} elements): it was "
            "saved by another number of ranks, or by another model",
            fix="resume with the number of ranks (and the ZeRO stage) that saved; or convert it: python -m "
            "deepspeed.checkpoint.ds_to_universal, then load_universal true; or load the weights only "
            "(load_optimizer_states=False)",
            sample='  File "/venv/deepspeed/runtime/zero/stage3.py", line 2500, in _rigid_load_state_dict\n'
            "RuntimeError: The size of tensor a (778567680) must match the size of tensor b (155713536) at "
            "non-singleton dimension 0",
        ),
        Signature(
            words="singleton+size+tensor",
            pattern=r"^RuntimeError: The size of tensor a \((?P<a>[1-9]\d{0,12})\) must match the size of tensor b "
            r"\((?P<b>[1-9]\d{0,12})\) at non-singleton dimension 0",
            after=IN_ZERO
            + r".{0,30}in (?:backward|step|reduce|unscale|partition|__partition|__add|average|independent)",
            tier=Tier.GENERIC,
            title="in ZeRO two tensors do not fit ({a} and {b} elements): a parameter changed its size after the "
            "engine was made",
            sample='  File "/venv/deepspeed/runtime/zero/stage3.py", line 2135, in backward\nRuntimeError: The size '
            "of tensor a (171) must match the size of tensor b (169) at non-singleton dimension 0",
        ),
        Signature(
            words="output+world_size+input",
            pattern=r"^(?:RuntimeError|ValueError): output tensor size must be equal to world_size times input "
            r"tensor size",
            title="ranks gather parts of different size: a group has another number of ranks than its parts (ZeRO++'s "
            "zero_hpz_partition_size or zero_quantized_weights with a number of nodes that does not divide)",
            fix="let zero_hpz_partition_size be the GPUs of one node and the number of ranks a multiple of 8 with "
            "zero_quantized_weights; else switch these two off. In own code give all_gather an output of "
            "world_size times the input",
            sample="RuntimeError: output tensor size must be equal to world_size times input tensor size",
        ),
        Signature(
            words="averaged+gradients+elements pre+flattened+gradient",
            pattern=r"AssertionError: (?:averaged gradients have|Pre-flattened gradient partition has) different "
            r"number of elements that? partition size (?P<sizes>\d{1,15} \d{1,15})",
            sample="AssertionError: averaged gradients have different number of elements that partition size 1024 "
            "2048 0 0",
        ),
    ),
)

COMMUNICATION_DTYPE = Rule(
    id="communication-data-type",
    stage=Stage.RUN,
    title="ZeRO's gradients and communication_data_type are of different dtypes",
    fix="remove communication_data_type from the configuration, or set it to the dtype of the gradients (bf16, "
    "fp16); a newer DeepSpeed takes other combinations",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""communication_data_type tells in which dtype gradients are reduced among the ranks.

Some combinations with ZeRO stage 1, gradient accumulation in fp32 and bf16 were not handled in some releases.

Why it matters: The backward pass of the first accumulated step fails.""",
    signatures=(
        Signature(
            words="swap+tensor+dtype",
            pattern=r"^RuntimeError: Cannot swap tensor with different dtype",
            sample="RuntimeError: Cannot swap tensor with different dtype",
        ),
        Signature(
            words="unsupported+mix+grad_accum_dtype unsupported+grad+type",
            pattern=r"(?:NotImplementedError: unsupported mix of model_dtype=.{1,40} and "
            r"grad_accum_dtype=.{1,40}|AssertionError: (?:attempting to reduce an unsupported grad "
            r"type|BF16Optimizer: Unsupported gradient accumulation data type): .{1,40})",
            title="data_types.grad_accum_dtype does not go together with the precision of the model and this ZeRO stage",
            fix="remove data_types.grad_accum_dtype, or use bf16 with grad_accum_dtype fp32 and ZeRO stage 1",
            sample="NotImplementedError: unsupported mix of model_dtype=torch.float16 and "
            "grad_accum_dtype=torch.float32",
        ),
    ),
)

PLACEHOLDER_IN_USE = Rule(
    id="placeholder-in-use",
    stage=Stage.RUN,
    title="the run steps {class}, a placeholder: DeepSpeed was not initialized for it",
    fix="start with a launcher (accelerate launch, deepspeed, torchrun) so that the DeepSpeed plugin is on; where "
    "the configuration names no optimizer, make a real one in the script. Upgrade accelerate and transformers "
    "together",
    steps=(step("accelerate launch SCRIPT.py"), instead("python -m pip install -U accelerate transformers")),
    manual="""accelerate puts DummyOptim and DummyScheduler in the place of what deepspeed.initialize will make from the
configuration.

If nothing made it (a plain python start, a part of the script without accelerator.prepare), the placeholder is still
there.

Why it matters: The first step fails, or nothing is trained.""",
    signatures=(
        Signature(
            words="dummyoptim+attribute dummyscheduler+attribute",
            pattern=r"AttributeError: '(?P<class>DummyOptim|DummyScheduler)' object has no attribute "
            r"'(?!param_groups|defaults|train')\w{1,40}'",
            sample="AttributeError: 'DummyOptim' object has no attribute 'step'",
        ),
        Signature(
            words="dummyoptim+attribute",
            pattern=r"AttributeError: '(?P<class>DummyOptim)' object has no attribute '(?P<name>param_groups|defaults)'",
            title="the optimizer is in the DeepSpeed configuration, so the script has accelerate's {class}, which no real "
            "scheduler can use ({name})",
            fix="use accelerate.utils.DummyScheduler beside DummyOptim and put the scheduler into the DeepSpeed config; or "
            "remove the optimizer from the DeepSpeed config and use real ones of torch; give both to accelerator.prepare()",
            steps=(step("accelerate env"),),
            sample="AttributeError: 'DummyOptim' object has no attribute 'param_groups'",
        ),
    ),
)

RULES = (
    SCHEDULER_IN_USE,
    LOSS_SCALE_WITHOUT_FP16,
    GRADIENT_NORM_ZERO,
    ZERO_SIZES_DIFFER,
    COMMUNICATION_DTYPE,
    PLACEHOLDER_IN_USE,
)
