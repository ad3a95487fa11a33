"""Rules of optimizers, schedulers and precision: what DeepSpeed, accelerate and the Trainer refuse when an engine is made."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

OPTIMIZER_OFFLOAD_CLIENT = Rule(
    id="optimizer-offload-client",
    stage=Stage.RUN,
    title="ZeRO-Offload refuses the optimizer that the script made itself{optimizer_hint}",
    fix="with offload_optimizer, use deepspeed.ops.adam.DeepSpeedCPUAdam, or describe the optimizer in the DeepSpeed "
    'configuration instead of the script; "zero_force_ds_cpu_optimizer": false allows the other one, slowly',
    manual="""The optimizer's states are offloaded to the CPU, and the optimizer is not DeepSpeed's own for the CPU.

With offload_optimizer the update runs on the CPU. DeepSpeedCPUAdam does it with vector instructions; torch's
optimizers are many times slower there, so DeepSpeed refuses them unless zero_force_ds_cpu_optimizer is false.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="client+offload",
            pattern=r"You are using ZeRO-Offload with a client provided optimizer(?! \(<class .deepspeed\.ops\.lion)"
            r"(?: \(<class '(?P<optimizer>[\w.]{1,100})'>\))?",
            sample="deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client "
            "provided optimizer (<class 'torch.optim.adamw.AdamW'>) which in most cases will yield poor "
            "performance.",
        ),
        Signature(
            words="cpuadam+param",
            pattern=r"CPUAdam param is on (?P<device>\S{1,20}) and must be 'cpu'",
            title="DeepSpeedCPUAdam got parameters on {device}: offload_optimizer is not on",
            fix='set "offload_optimizer": {"device": "cpu"} in zero_optimization, or use FusedAdam or '
            "torch.optim.AdamW",
            sample="AssertionError: CPUAdam param is on cuda:0 and must be 'cpu', make sure you enabled "
            "'offload_optimizer': 'cpu' in your ZeRO config.",
        ),
        Signature(
            words="expected+input+cuda",
            pattern=r"^RuntimeError: expected input to be on cuda",
            after=r"multi_tensor_appl|apex[/\\]optimizers|fused_adam",
            title="a fused optimizer of the GPU (apex FusedAdam) is given parameters that ZeRO-Offload keeps on the CPU",
            fix="with cpu_offload or offload_optimizer use DeepSpeedCPUAdam (GPT-NeoX: the optimizer type cpu_adam), or switch "
            "the offload off",
            sample='  File "/venv/apex/multi_tensor_apply/multi_tensor_apply.py", line 27, in __call__\n'
            "RuntimeError: expected input to be on cuda",
        ),
        Signature(
            words="deepspeedcpuadam+requires",
            pattern=r"DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load",
            title="DeepSpeedCPUAdam has no op: cpu_adam could not be built or loaded",
            fix="the first error of the build stands further up in the log; build the op alone to see it",
            steps=(step("python -m dsdoctor check --op cpu_adam --deep"),),
            sample="RuntimeError: DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.",
        ),
    ),
)

OPTIMIZER_UNTESTED = Rule(
    id="optimizer-untested",
    stage=Stage.RUN,
    title="ZeRO was not tested with this optimizer, and asks you to say that you know",
    fix='set "zero_allow_untested_optimizer": true in the DeepSpeed configuration, or use Adam, AdamW or Lion',
    manual="""ZeRO is on, and the optimizer is none of those that DeepSpeed tests with it.

Optimizers that treat each element by itself work. One that looks at whole matrices (Muon, Shampoo, LARS, LAMB)
sees only the flat part that this rank holds.

Why it matters: deepspeed.initialize stops, on every rank, until the configuration allows it.""",
    signatures=(
        Signature(
            words="untested+zero",
            pattern=r"Error: You are using an untested ZeRO Optimizer",
            sample="AssertionError: You are using an untested ZeRO Optimizer. Please add "
            '<"zero_allow_untested_optimizer": true> in the configuration file to use it.',
        ),
    ),
)

OPTIMIZER_UNKNOWN = Rule(
    id="optimizer-unknown",
    stage=Stage.RUN,
    title="DeepSpeed knows no {kind|optimizer} of the name {name}",
    fix="correct its type in the configuration (Adam, AdamW, OneBitAdam, Lamb, Lion, Muon ...; WarmupLR, "
    "WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest), or make it in the script and give it to "
    "deepspeed.initialize",
    manual="""The configuration names an optimizer or a scheduler that neither DeepSpeed nor torch.optim has.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="supported+optimizer",
            pattern=r"Error: (?P<name>\w{1,60}) is not a supported DeepSpeed Optimizer",
            sample="AssertionError: AdamWW is not a supported DeepSpeed Optimizer",
        ),
        Signature(
            words="recognize+scheduler",
            pattern=r"DeepSpeed does not recognize LR (?P<kind>scheduler) (?P<name>\w{1,60})",
            sample="AssertionError: DeepSpeed does not recognize LR scheduler Cosine",
        ),
    ),
)

SCHEDULER_PARAMETERS = Rule(
    id="scheduler-parameters",
    stage=Stage.RUN,
    title="{scheduler|the scheduler} of the configuration does not take these parameters{name_hint}",
    fix="correct scheduler.params: WarmupLR takes warmup_min_lr, warmup_max_lr, warmup_num_steps and "
    "warmup_type; WarmupDecayLR also total_num_steps; WarmupCosineLR total_num_steps, warmup_min_ratio, "
    "warmup_num_steps and cos_min_ratio",
    manual="""scheduler.params of the configuration does not fit the scheduler.

The parameters are handed to the class as they stand. The names are not those of torch or of Hugging Face
(warmup_num_steps, not warmup_steps), and "auto" is filled in for some of them only.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="keyword+warmuplr keyword+warmupdecaylr keyword+warmupcosinelr keyword+onecycle keyword+lrrangetest",
            pattern=r"TypeError: (?P<scheduler>WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle"
            r"|LRRangeTest)\.__init__\(\) got an "
            r"unexpected keyword argument '(?P<name>\w{1,60})'",
            title="{scheduler} has no parameter {name}",
            sample="TypeError: WarmupLR.__init__() got an unexpected keyword argument 'warmup_steps'",
        ),
        Signature(
            words="keyword+unexpected",
            pattern=r"TypeError: __init__\(\) got an unexpected keyword argument '(?P<name>\w{1,60})'",
            after=r"_scheduler_from_config",
            title="the scheduler of the configuration has no parameter {name}",
            sample='  File "/venv/deepspeed/runtime/engine.py", line 900, in _scheduler_from_config\n'
            "TypeError: __init__() got an unexpected keyword argument 'warmup_steps'",
        ),
        Signature(
            words="total_num_steps+missing",
            pattern=r"__init__\(\) missing \d required positional arguments?: '(?P<name>total_num_steps)'",
            title="WarmupDecayLR and WarmupCosineLR need {name} in scheduler.params",
            sample="TypeError: WarmupDecayLR.__init__() missing 1 required positional argument: 'total_num_steps'",
        ),
        Signature(
            words="zerodivisionerror",
            pattern=r"^ZeroDivisionError: float division by zero",
            after=r"inverse_log_warm_up",
            title="warmup_num_steps of the scheduler is 0 or 1, and this DeepSpeed divides by its logarithm",
            fix="set warmup_num_steps to 2 or more in scheduler.params, or upgrade DeepSpeed",
            sample="    self.inverse_log_warm_up = 1.0 / math.log(warmup_num_steps)\n"
            "ZeroDivisionError: float division by zero",
        ),
        Signature(
            words="warmup_num_steps+positive",
            pattern=r"warmup_num_steps must be a positive integer, got (?P<name>\S{1,20})",
            title="warmup_num_steps of the scheduler must be a positive integer, and is {name}",
            sample="ValueError: warmup_num_steps must be a positive integer, got 0",
        ),
        Signature(
            words="max_grad_norm+optimizer",
            pattern=r"'max_grad_norm' is not supported as an optimizer parameter",
            title="max_grad_norm stands in optimizer.params; DeepSpeed's name for it is gradient_clipping, on "
            "the top level",
            fix="remove max_grad_norm from optimizer.params and set gradient_clipping on the top level of the "
            "configuration",
            sample="ValueError: 'max_grad_norm' is not supported as an optimizer parameter, please switch to "
            "using the deepspeed parameter 'gradient_clipping'",
        ),
    ),
)

OPTIMIZER_TWICE = Rule(
    id="optimizer-twice",
    stage=Stage.RUN,
    title="the {kind|optimizer} is both in the DeepSpeed configuration and in the code given to accelerator.prepare()",
    fix="keep one: remove the block from the configuration, or make accelerate.utils.DummyOptim (DummyScheduler) "
    "in the code",
    manual="""accelerate was given an optimizer or a scheduler twice, or only a placeholder for one.

Either the configuration describes it, and the code passes DummyOptim or DummyScheduler as a placeholder; or the code
makes it, and the configuration has no such block.

Why it matters: accelerator.prepare() stops, on every rank.""",
    signatures=(
        Signature(
            words="specify+config+code",
            pattern=r"You cannot specify an? (?P<kind>optimizer|scheduler) in the config file and in the code "
            r"at the same time",
            sample="ValueError: You cannot specify an optimizer in the config file and in the code at the same "
            "time. Please remove the optimizer from the config file or create `accelerate.utils.DummyOptim` in "
            "the code.",
        ),
        Signature(
            words="dummyoptim+specifying dummyscheduler+specifying dummyscheduler+specify dummyscheduler+code",
            pattern=r"You cannot create a `DummyOptim` without specifying an optimizer in the config file"
            r"|Either specify a scheduler in the config file or pass in the `lr_scheduler_callable`"
            r"|You cannot create a `DummyScheduler` without specifying a scheduler"
            r"|You can only specify `accelerate\.utils\.DummyScheduler` in the code when using",
            title="the code passes a placeholder (DummyOptim, DummyScheduler), and the configuration lacks what "
            "it stands for",
            fix="describe optimizer and scheduler in the DeepSpeed configuration, or make real ones in the code",
            sample="ValueError: You cannot create a `DummyOptim` without specifying an optimizer in the config file.",
        ),
    ),
)

OPTIMIZER_MISSING = Rule(
    id="optimizer-missing",
    stage=Stage.RUN,
    title="the engine was made without an optimizer, and is asked to train",
    fix="describe an optimizer in the DeepSpeed configuration, or give optimizer= and model_parameters= to "
    "deepspeed.initialize",
    manual="""No optimizer was configured, neither in the DeepSpeed configuration nor in the call of deepspeed.initialize.

Such an engine is for inference. Under ZeRO-3 it holds a DeepSpeedZeRoOffload in the place of an optimizer, which has
no backward and no step.

Why it matters: The first backward or step fails.""",
    signatures=(
        Signature(
            words="provide+optimizer",
            pattern=r"must provide optimizer during init in order to use (?P<call>backward|step|scale)",
            sample="AssertionError: must provide optimizer during init in order to use backward",
        ),
        Signature(
            words="deepspeedzerooffload+attribute",
            pattern=r"'DeepSpeedZeRoOffload' object has no attribute "
            r"'(?P<call>backward|step|param_groups|zero_grad|state_dict"
            r"|loss_scale|cur_scale|checkpoint_event_(?:pro|epi)logue)'",
            title="no optimizer is configured, so ZeRO-3 made an engine for inference only ({call} was called)",
            sample="AttributeError: 'DeepSpeedZeRoOffload' object has no attribute 'backward'",
        ),
        Signature(
            words="stage+requires+optimizer",
            pattern=r"zero stage (?P<stage>\d) requires an optimizer",
            sample="AssertionError: zero stage 2 requires an optimizer",
        ),
    ),
)

OPTIMIZER_NOTHING_TO_TRAIN = Rule(
    id="optimizer-nothing-to-train",
    stage=Stage.RUN,
    title="the optimizer got no parameters to train: nothing in it has requires_grad",
    fix="look at which parameters are trainable: everything is frozen, the adapter (LoRA) was not added or "
    "matched no module, or a parameter group is empty; leave empty groups out",
    manual="""The optimizer, or one of its parameter groups, holds no trainable parameter.

With LoRA most often the adapter's modules were not found in the model, or a second group (no weight decay) is empty.

Why it matters: There is nothing to optimize, and ZeRO cannot divide an empty group.""",
    signatures=(
        Signature(
            words="optimizer+empty",
            pattern=r"Error: optimizer got an empty parameter list",
            after=r"pipe[/\\]engine\.py",
            title="this pipeline stage holds frozen layers only: its optimizer gets no trainable parameter",
            fix="divide the layers so that each stage has a trainable one (partition_method), or leave something "
            "in each stage with requires_grad",
            sample='  File "/venv/deepspeed/runtime/pipe/engine.py", line 67, in __init__\n'
            "ValueError: optimizer got an empty parameter list",
        ),
        Signature(
            words="optimizer+empty",
            pattern=r"Error: optimizer got an empty parameter list",
            sample="ValueError: optimizer got an empty parameter list",
        ),
        Signature(
            words="cat+list+empty _cat+arguments",
            pattern=r"^(?:RuntimeError: torch\.cat\(\): expected a non-empty list of Tensors|NotImplementedError: There "
            r"were no tensor arguments to this function .{0,200}aten::_cat)",
            after=r"DeepSpeedZeroOptimizer\(|zero[/\\]stage(?:2|_1_and_2|1)\.py.{0,30}in __init__",
            not_after=r"in (?:forward|backward|fetch_sub_module)\b",
            title="a parameter group of the optimizer is empty: nothing in it is trainable",
            sample='  File "/venv/deepspeed/runtime/zero/stage_1_and_2.py", line 313, in __init__\n'
            "RuntimeError: torch.cat(): expected a non-empty list of Tensors",
        ),
        Signature(
            words="zip+longer zip+shorter",
            pattern=r"^ValueError: zip\(\) argument \d is (?:longer|shorter) than argument",
            after=r"lr_schedule(?:r|s)\.py|param_groups",
            title="the scheduler has other parameter groups than the optimizer: DeepSpeed dropped a group that is "
            "empty (with LoRA nothing without weight decay is trainable)",
            fix="leave empty groups out before the scheduler is made, let the configuration make both, or take a "
            "newer DeepSpeed; torch 2.13 compares what older ones cut off in silence",
            sample='  File "/venv/deepspeed/runtime/lr_schedules.py", line 296, in step\n'
            "ValueError: zip() argument 2 is longer than argument 1",
        ),
        Signature(
            words="fragment_end+start",
            pattern=r"^AssertionError: fragment start \d{1,15} should be < fragment_end \d{1,15}",
            title="a trainable parameter has no elements (its shape holds a 0), and ZeRO 1 and 2 cannot place it",
            fix="freeze or remove parameters of size 0 before deepspeed.initialize, or take a newer DeepSpeed",
            sample="AssertionError: fragment start 8 should be < fragment_end 8",
        ),
        Signature(
            words="sequence+arg+empty iterable+empty",
            pattern=r"^ValueError: max\(\) (?:arg is an empty sequence|iterable argument is empty)",
            after=r"deepspeed[/\\]runtime[/\\](?:zero|bf16_optimizer|fp16)",
            title="a parameter group of the optimizer is empty: nothing in it is trainable",
            sample='  File "/venv/deepspeed/runtime/zero/stage3.py", line 923, in initialize_optimizer_states\n'
            "ValueError: max() arg is an empty sequence",
        ),
    ),
)

PRECISION_FP16_AND_BF16 = Rule(
    id="precision-fp16-and-bf16",
    stage=Stage.RUN,
    title="fp16 and bf16 are both on",
    fix="switch one off: bf16 on GPUs that have it (Ampere and newer), else fp16",
    manual="""fp16 and bf16 cannot be used together.

The blocks fp16 and bf16 of the DeepSpeed configuration each have "enabled"; Hugging Face has --fp16 and --bf16.

Why it matters: No rank starts to train.""",
    signatures=(
        Signature(
            words="bfloat16+fp16",
            pattern=r"bfloat16 and fp16 (?:modes )?cannot be (?:simultaneously )?enabled",
            sample="AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
        ),
        Signature(
            words="most+fp16+bf16",
            pattern=r"At most one of fp16 and bf16 can be True",
            sample="ValueError: At most one of fp16 and bf16 can be True, but not both",
        ),
    ),
)

PRECISION_UNSUPPORTED = Rule(
    id="precision-unsupported",
    stage=Stage.RUN,
    title="{type|this precision} is not supported by the device that DeepSpeed chose{accelerator_hint}",
    fix="bf16 needs an Ampere GPU (A100, RTX 30) or newer, and most CPUs have no fp16: switch to the other, or "
    "to fp32. If there is a GPU, see why it was not chosen",
    steps=(step("python -m dsdoctor check"), instead("nvidia-smi")),
    manual="""The configuration asks for a precision that the device does not have.

fp16 on a CPU, or bf16 on a GPU before Ampere. If the machine has a GPU, DeepSpeed did not see it and chose the CPU:
CUDA_VISIBLE_DEVICES, a CPU build of torch, DS_ACCELERATOR.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="supported+type+fp16 supported+type+bf16",
            pattern=r"Error: Type (?P<type>fp16|bf16) is not supported(?: on your device)?\.",
            sample="ValueError: Type fp16 is not supported on your device.",
        ),
        Signature(
            words="setup+bf16",
            pattern=r"Your setup doesn't support (?P<type>bf16)(?:/gpu)?",
            sample="ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to "
            "train the model on CPU.",
        ),
        Signature(
            words="precision+requires",
            pattern=r"Error: (?P<type>fp16|bf16|fp8) mixed precision requires ",
            sample="ValueError: bf16 mixed precision requires PyTorch >= 1.10 and a supported device.",
        ),
        Signature(
            words="precision+accelerator fp16+accelerator",
            pattern=r"Error: (?:Cannot use (?P<type>fp16|torch\.\w{1,12}) without accelerator|Accelerator is "
            r"not detected, cannot "
            r"perform low precision training)",
            title="there is no accelerator for low precision",
            sample="SystemError: Cannot use fp16 without accelerator.",
        ),
    ),
)

PRECISION_APEX_REMOVED = Rule(
    id="precision-apex-removed",
    stage=Stage.RUN,
    title="the configuration asks for apex AMP, and this DeepSpeed{deepspeed_hint} no longer has it",
    fix="remove the amp block from the DeepSpeed configuration, and use fp16, bf16 or torch_autocast",
    manual="""The amp block of the configuration stands for NVIDIA apex, which newer DeepSpeeds have dropped.

Installing apex does not help.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="apex+removed",
            pattern=r"NVIDIA Apex AMP integration has been removed",
            sample="deepspeed.runtime.config.DeepSpeedConfigError: NVIDIA Apex AMP integration has been removed. "
            "Use DeepSpeed 'fp16', 'bf16', or 'torch_autocast' instead.",
        ),
    ),
)

RULES = (
    OPTIMIZER_OFFLOAD_CLIENT,
    OPTIMIZER_UNTESTED,
    OPTIMIZER_UNKNOWN,
    SCHEDULER_PARAMETERS,
    OPTIMIZER_TWICE,
    OPTIMIZER_MISSING,
    OPTIMIZER_NOTHING_TO_TRAIN,
    PRECISION_FP16_AND_BF16,
    PRECISION_UNSUPPORTED,
    PRECISION_APEX_REMOVED,
)
