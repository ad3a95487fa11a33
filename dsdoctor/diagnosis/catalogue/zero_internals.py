"""Rules of ZeRO's groups and bookkeeping: MiCS, hpZ, states of parameters, refused modules, groups of the optimizer."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

ZERO_MICS = Rule(
    id="zero-mics",
    stage=Stage.RUN,
    title="MiCS (mics_shard_size) is not set up as it must be",
    fix="make the model under deepspeed.zero.MiCS_Init(config_dict_or_path=config) instead of deepspeed.zero.Init; "
    "Hugging Face's and Lightning's integrations use zero.Init, so leave mics_shard_size out there, or use "
    "zero_hpz_partition_size instead",
    manual="""MiCS divides the model within small groups of ranks, and each parameter carries these groups.

Only deepspeed.zero.MiCS_Init makes them. mics_shard_size must divide the number of ranks; hierarchical gathering
needs several nodes.

Why it matters: The engine cannot be made.""",
    signatures=(
        Signature(
            words="mics_commgroups mics+sharding",
            pattern=r"AssertionError: Sharded parameters don't have the MiCS_CommGroups attached",
            title="MiCS is on (mics_shard_size), and the model was made under deepspeed.zero.Init instead of "
            "deepspeed.zero.MiCS_Init",
            sample="AssertionError: Sharded parameters don't have the MiCS_CommGroups attached. Might due to the use of "
            "deepspeed.zero.Init context for initializing the weights.",
        ),
        Signature(
            words="illegalwork",
            pattern=r"RuntimeError: Illegal to call \w{1,20} on IllegalWork object",
            title="MiCS's hierarchical gather (mics_hierarchical_params_gather) waits for a collective that this "
            "torch has joined with others",
            fix="set mics_hierarchical_params_gather false, or take the torch that this DeepSpeed was tested with "
            "(torch 2.1 changed coalesced collectives) or a newer DeepSpeed",
            steps=(step("python -m pip install -U deepspeed"),),
            sample="RuntimeError: Illegal to call wait on IllegalWork object",
        ),
    ),
)

ZERO_GROUPS_TWICE = Rule(
    id="zero-groups-twice",
    stage=Stage.RUN,
    title="ZeRO++'s groups (zero_hpz_partition_size) are made a second time in this process: a second engine or "
    "zero.Init",
    fix="use zero_hpz_partition_size in one engine only: leave it out (or set 1) in the configuration of the "
    "reference or reward model, and make the model once",
    manual="""The groups of hpZ are global to the process, and DeepSpeed makes them when a model or an engine with hpZ begins.

A second engine, or zero.Init before the engine in some releases, asks for them again.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="intra+parallel+initialized",
            pattern=r"AssertionError: ZeRO parameter intra parallel group is already initialized",
            sample="AssertionError: ZeRO parameter intra parallel group is already initialized",
        ),
    ),
)

ZERO3_MODULE_STATE = Rule(
    id="zero3-module-state",
    stage=Stage.RUN,
    title="ZeRO-3 finds a parameter in a state that its own order of modules does not allow",
    fix="run every forward and backward through the engine (engine(batch), engine.backward(loss)); let no other "
    "thread, engine or generate() use the same modules meanwhile, and load or swap no weights in the middle of a "
    "step. Newer DeepSpeed mends cases of generation and of LoRA",
    steps=(step("python -m pip install -U deepspeed"),),
    explained_by=("zero3-other-modules",),
    manual="""ZeRO-3 keeps for each parameter whether it is gathered, in flight or divided, and who uses it.

Modules that are called past their forward, a hybrid engine that switches between training and generation, or
parameters that were replaced after the start leave states that do not fit together.

Why it matters: The step stops on this rank, and the others wait in a gather.""",
    signatures=(
        Signature(
            words="record+trace invalidate+trace trace+complete",
            pattern=r"RuntimeError: (?:attempted to (?:record trace when status|invalidate already invalid "
            r"trace)|expected trace to be complete)",
            title="ZeRO-3's record of the order of modules was disturbed: two forwards run into each other",
            sample="RuntimeError: attempted to record trace when status = ZeroTraceMode.COMPLETE",
        ),
        Signature(
            words="buffers_to_allgather",
            pattern=r"AssertionError: params and buffers_to_allgather must have the same (?P<what>length|numel)",
            title="ZeRO-3 gathers parameters into buffers of another {what}: parameters were changed after the "
            "engine was made",
            fix="change, resize or quantize the model before deepspeed.initialize",
            sample="AssertionError: params and buffers_to_allgather must have the same numel",
        ),
        Signature(
            words="numel+params+reduce scatter+size",
            pattern=r"AssertionError: \d{1,15} != \d{1,15} Cannot reduce scatter gradients whose size is not same as "
            r"the params",
            title="a gradient has another size than its parameter had when ZeRO-3 divided it",
            fix="resize embeddings and replace layers before deepspeed.initialize, and touch parameter.data of a "
            "gathered parameter only inside of GatheredParameters",
            sample="AssertionError: 1024 != 2048 Cannot reduce scatter gradients whose size is not same as the params",
        ),
    ),
)

ZERO3_MODULE_REFUSED = Rule(
    id="zero3-module-refused",
    stage=Stage.RUN,
    title="ZeRO-3 puts hooks on every module, and one of the model's modules takes none ({what|a compiled one})",
    fix="let the model have plain torch.nn.Modules: no torch.jit.script, for RWKV RWKV_JIT_ON=0, no torch.compile of "
    "single layers before deepspeed.initialize; or use ZeRO-2",
    manual="""Under ZeRO-3 hooks before and after each module's forward gather and release its parameters.

Modules that torch.jit.script has compiled cannot have hooks.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="supported+scriptmodules",
            pattern=r"RuntimeError: (?P<what>register_\w{1,40}) is not supported on ScriptModules",
            sample="RuntimeError: register_forward_pre_hook is not supported on ScriptModules",
        ),
    ),
)

NVME_SWAPPER_MISSING = Rule(
    id="nvme-swapper-missing",
    stage=Stage.RUN,
    title="parameters are to be offloaded to NVMe, and DeepSpeed has made no swapper for them",
    fix="make the model under deepspeed.zero.Init with the same configuration (offload_param.device nvme and "
    "nvme_path) that deepspeed.initialize gets, with DeepSpeed 0.5.8 or newer; or offload the parameters to the "
    "CPU",
    manual="""offload_param with device nvme is carried out by a swapper that zero.Init makes when it divides the first parameter.

A configuration that reaches the engine and not zero.Init, or the other way round, leaves it out.

Why it matters: The model cannot be divided.""",
    signatures=(
        Signature(
            words="reserve_partitioned_swap_space get_buffer swap_in+nonetype available_swap_in_buffers",
            pattern=r"AttributeError: 'NoneType' object has no attribute "
            r"'(?:reserve_partitioned_swap_space|available_swap_in_buffers|swap_in|swap_out_and_release"
            r"|swappable_tensor)'",
            sample="AttributeError: 'NoneType' object has no attribute 'reserve_partitioned_swap_space'",
        ),
        Signature(
            words="narrow+tensor",
            pattern=r"^RuntimeError: narrow\(\) cannot be applied to a 0-dim tensor",
            after=r"zenflow",
            title="ZenFlow's ZeRO-3 does not work with the optimizer's states on NVMe in this release",
            fix="set offload_optimizer.device cpu with zenflow, or leave the block zenflow out for NVMe",
            sample='  File "/venv/deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py", line 200, in step\n'
            "RuntimeError: narrow() cannot be applied to a 0-dim tensor.",
        ),
    ),
)

OPTIMIZER_GROUP_KEY = Rule(
    id="optimizer-group-key",
    stage=Stage.RUN,
    title="a parameter group of {optimizer|DeepSpeed's optimizer} lacks {key}: the group was made by another "
    "optimizer, or comes from an older checkpoint",
    fix="let the DeepSpeed configuration make the optimizer (or DeepSpeedCPUAdam from the model's parameters); add "
    "no groups to it afterwards, and load a checkpoint's optimizer states with the optimizer that wrote them "
    "(else load_optimizer_states=False)",
    manual="""Each group of an optimizer carries its settings (lr, betas, bias_correction), and step() reads them.

Groups that a scheduler, a framework or a loaded state has replaced hold the settings of another optimizer, such as
torch's AdamW.

Why it matters: The first step fails, on every rank.""",
    signatures=(
        Signature(
            words="keyerror",
            pattern=r"^KeyError: '(?P<key>bias_correction|betas|amsgrad|weight_decay|eps|lr|step|use_muon|momentum)'",
            after=r"ops[/\\](?:adam|lion|lamb|adagrad|muon)[/\\]\w{1,40}\.py",
            sample="  File \"/venv/deepspeed/ops/adam/cpu_adam.py\", line 164, in step\nKeyError: 'bias_correction'",
        ),
        Signature(
            words="list+range",
            pattern=r"^IndexError: list index out of range",
            after=r"fp16_param_groups\[group_id\]|ops[/\\]adam[/\\]cpu_adam\.py",
            title="the groups of the CPU optimizer and those of ZeRO's half-precision parameters do not agree",
            fix="give the optimizer trainable parameters only, each of them once, and no empty group; a newer "
            "DeepSpeed no longer needs it",
            steps=(
                step("python -m pip install -U deepspeed"),
                instead("python -m dsdoctor explain optimizer-group-key"),
            ),
            sample="    fp16_param_groups[group_id][param_id].data)\nIndexError: list index out of range",
        ),
    ),
)

OPTIMIZER_STATE_KEY = Rule(
    id="optimizer-state-key",
    stage=Stage.RUN,
    title="the optimizer asks a parameter for its own state {key}, and finds none",
    fix="an optimizer that fills self.state when it is made does not work with ZeRO 1, 2 and 3, which step it with flat "
    "partitions of their own: let it keep such settings in its param_groups, or look them up by name; DeepSpeed's own form of the "
    "optimizer, or no ZeRO (stage 0), does without a change. Without ZeRO a loaded checkpoint of another optimizer is the cause",
    manual="""An optimizer keeps what it knows of each parameter in self.state, by the parameter itself.

ZeRO puts its own flat partitions in the place of the model's parameters after the optimizer was made. What the optimizer
had noted of a parameter at that time, such as whether it is a matrix, is not there for the partition. A partition has lost
the shapes too, which optimizers for matrices (Muon, Shampoo, SOAP) need.

Why it matters: The first step fails, on every rank.""",
    signatures=(
        Signature(
            words="keyerror",
            pattern=r"^KeyError: '(?P<key>\w{1,60})'",
            after=r"\bself\.state\[\w{1,40}\]\[[\"']",
            tier=Tier.GENERIC,
            sample='    params = [p for p in group["params"] if self.state[p]["use_muon"]]\nKeyError: \'use_muon\'',
        ),
    ),
)

RULES = (
    ZERO_MICS,
    ZERO_GROUPS_TWICE,
    ZERO3_MODULE_STATE,
    ZERO3_MODULE_REFUSED,
    NVME_SWAPPER_MISSING,
    OPTIMIZER_GROUP_KEY,
    OPTIMIZER_STATE_KEY,
)
