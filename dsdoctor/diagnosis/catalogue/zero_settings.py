"""Rules of ZeRO's settings: what does not go together, ZeRO++, gathered parameters, groups of the optimizer."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

ZERO_SETTINGS = Rule(
    id="zero-settings",
    stage=Stage.RUN,
    title="settings of ZeRO do not go together: {what|one of them}",
    fix="change or remove the setting that the message names, in the DeepSpeed configuration",
    manual="""DeepSpeed refuses a combination of settings when the engine, or the model under zero.Init, is made.

The message names the setting. Many settings exist for one stage only, or only with (or without) offloading.

Why it matters: deepspeed.initialize stops, on every rank.""",
    signatures=(
        Signature(
            words="partial+offloading",
            pattern=r"Partial offloading only supported for ZeRO Stage 3",
            title="offload_optimizer.ratio (partial offloading) exists for ZeRO stage 3 only",
            fix="remove ratio from zero_optimization.offload_optimizer, or use stage 3",
            sample="AssertionError: Partial offloading only supported for ZeRO Stage 3.",
        ),
        Signature(
            words="communication_data_type+scatter",
            pattern=r"AssertionError: .{1,40} supports .{1,120} communication_data_type with reduce scatter enabled\. "
            r"Got: '?(?P<what>[\w.]{1,40})",
            title="communication_data_type is {what}, which ZeRO's reduce_scatter does not take",
            fix="leave communication_data_type out, or choose a type that the message names; stage 1 and 2 can also set "
            "reduce_scatter false",
            sample="AssertionError: ZeRO-3 supports (torch.float16, torch.bfloat16, torch.float32) "
            "communication_data_type with reduce scatter enabled. Got: 'torch.float64'",
        ),
        Signature(
            words="gradient_predivide_factor+scatter pre+scale+scatter",
            pattern=r"AssertionError: (?P<what>gradient_predivide_factor != 1\.0|pre-scale gradients) is not yet "
            r"supported with .{1,40} with reduce scatter enabled",
            title="{what} does not go together with ZeRO's reduce_scatter",
            fix="leave prescale_gradients and gradient_predivide_factor out; with stage 1 and 2 reduce_scatter false "
            "is the other way",
            sample="AssertionError: pre-scale gradients is not yet supported with ZeRO-3 with reduce scatter enabled",
        ),
        Signature(
            words="master+weights+deepspeedcpuadam hybrid+deepspeedcpuadam",
            pattern=r"AssertionError: (?P<what>Master weights feature|Hybrid Optimizer) (?:requires .{1,40} with "
            r"DeepSpeedCPUAdam|Only Supports DeepSpeedCPUAdam)",
            title="{what} needs offload_optimizer on the CPU with DeepSpeed's own CPU Adam",
            fix="let the configuration make the optimizer (type Adam or AdamW, with offload_optimizer.device cpu), or "
            "give deepspeed.ops.adam.DeepSpeedCPUAdam; else remove the setting",
            sample="AssertionError: Hybrid Optimizer Only Supports DeepSpeedCPUAdam",
        ),
        Signature(
            words="allgather_bucket_size+multiple",
            pattern=r"AssertionError: allgather_bucket_size must be a multiple of nccl_start_alignment_factor, "
            r"(?P<what>\d{1,6})",
            title="allgather_bucket_size must be a multiple of {what}",
            sample="AssertionError: allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2 ",
        ),
        Signature(
            words="compute_grad_norm",
            pattern=r"ValueError: (?:zero_optimization\.)?compute_grad_norm=false (?P<what>(?:is "
            r"supported|requires|does not support) .{1,100})",
            title="compute_grad_norm=false {what}",
            fix="remove compute_grad_norm, or the setting that does not go with it",
            sample="ValueError: zero_optimization.compute_grad_norm=false requires gradient_clipping=0",
        ),
        Signature(
            words="muon+reduce muon+all2all all_to_all_reduce",
            pattern=r"(?:ValueError: |AssertionError: )(?P<what>Muon and (?:reduce scatter|all2all process group) "
            r"cannot be used together|when enable all_to_all_reduce, reduce_scatter should also be enabled)",
            title="settings of ZeRO do not go together: {what}",
            sample="ValueError: Muon and reduce scatter cannot be used together",
        ),
        Signature(
            words="managed_gradient_accumulation",
            pattern=r"AssertionError: (?:\w{1,60}(?:\(\))? is not supported with )?managed_gradient_accumulation=False"
            r"(?P<what> (?:supports|is not supported) .{1,100})?",
            title="managed_gradient_accumulation=false does not go together with something else{what_hint}",
            fix="set managed_gradient_accumulation back to true (its default), or do without the other one",
            sample="AssertionError: managed_gradient_accumulation=False is not supported with pipeline parallelism",
        ),
        Signature(
            words="remote+device+deepspeed",
            pattern=r"AssertionError: 'device' in DeepSpeed Config cannot be (?P<what>\S{1,60}) if remote device is",
            title="remote_device of zero.Init and offload_param of the configuration contradict each other",
            fix="name the device in one place: zero_optimization.offload_param in the configuration that zero.Init "
            "gets, without remote_device",
            sample="AssertionError: 'device' in DeepSpeed Config cannot be nvme if remote device is cpu.",
        ),
        Signature(
            words="autoep+support autoep+supports autoep_non_moe",
            pattern=r"^(?:Assertion|Value|Runtime|NotImplemented)Error: (?P<what>(?:AutoEP (?:with ZeRO Stage 3 "
            r")?|compile\.autoep_non_moe=True )(?:does not (?:currently )?support|only supports|supports "
            r"only|cannot be combined).{1,120})",
            title="AutoEP does not go together with another setting: {what}",
            sample="AssertionError: AutoEP with ZeRO Stage 3 does not support zero_quantized_gradients yet.",
        ),
        Signature(
            words="deprecated+zero+stage",
            pattern=r"Exception: The deprecated version of ZeRO Stage 1 is not supported in deepspeed >= 0\.5\.9",
            title="the configuration asks for the old ZeRO stage 1 (legacy_stage1), which DeepSpeed no longer has",
            fix="remove legacy_stage1 from zero_optimization",
            sample="Exception: The deprecated version of ZeRO Stage 1 is not supported in deepspeed >= 0.5.9. Please "
            "downgrade to a version less than 0.5.9 if you need to use this deprecated version of ZeRO.",
        ),
    ),
)

ZERO_PLUS_PLUS = Rule(
    id="zero-plus-plus",
    stage=Stage.RUN,
    title="ZeRO++ cannot be used as it is set here{what_hint}",
    fix="let zero_hpz_partition_size be the number of GPUs of one node; switch zero_quantized_weights or "
    "zero_quantized_gradients off where the model or the nodes do not fit",
    manual="""ZeRO++ quantizes weights and gradients for the network, and keeps a second copy of the weights in each node.

zero_hpz_partition_size must divide the number of ranks. zero_quantized_gradients needs all GPUs of each node that it
runs on. Quantized weights are cut into groups of 8.

Why it matters: The model or its engine cannot be made, or the first gradient fails.""",
    signatures=(
        Signature(
            words="qantized+weight quantized+weight",
            pattern=r"AssertionError: Qu?antized weight requires the number of weights be a multiple of 8\. Yet "
            r"(?P<what>\d{1,15}) cannot be divided",
            title="zero_quantized_weights needs parameters whose size is a multiple of 8; one has {what} elements",
            fix="set zero_quantized_weights false, or give that layer (a small head, an odd vocabulary) a size that is "
            "a multiple of 8",
            sample="AssertionError: Qantized weight requires the number of weights be a multiple of 8. Yet 1001 cannot "
            "be divided by 8*1",
        ),
        Signature(
            words="assertionerror+divisible",
            pattern=r"^AssertionError: (?P<world>\d{1,6}) is not divisible by (?P<size>\d{1,6})$",
            after=r"zero_param_parallel",
            title="zero_hpz_partition_size {size} does not divide the number of ranks, {world}",
            sample='  File "/venv/deepspeed/utils/groups.py", line 945, in _create_zero_param_parallel_group\n'
            "AssertionError: 6 is not divisible by 4",
        ),
        Signature(
            words="initialize+all+num_gpus initialize+all+num_nodes",
            pattern=r"AssertionError: num_(?P<what>gpus|nodes)(?: not equal to device per node|<2| must >=1),? cannot "
            r"initialize All-To-All",
            title="zero_quantized_gradients needs all GPUs of a node: the number of ranks is another than the GPUs that "
            "this node shows",
            fix="start one rank on each visible GPU (or hide the others by CUDA_VISIBLE_DEVICES), or switch "
            "zero_quantized_gradients off",
            sample="AssertionError: num_gpus not equal to device per node, cannot initialize All-To-All",
        ),
        Signature(
            words="start+length+exceeds start+length+negative",
            pattern=r"^RuntimeError: start \(-?\d{1,15}\) \+ length \(-?\d{1,15}\) exceeds dimension size \(\d{1,15}\)"
            r"|^RuntimeError: narrow\(\): length must be non-negative",
            after=r"_partition_param_sec|secondary_start",
            title="zero_hpz_partition_size: a parameter is smaller than the number of ranks, and its second copy has "
            "empty parts, which this DeepSpeed cannot cut",
            fix="upgrade DeepSpeed (0.14.4 mends empty parts), or set zero_hpz_partition_size 1, or fewer ranks for "
            "such a small parameter",
            steps=(step("python -m pip install -U deepspeed"),),
            sample='  File "/venv/deepspeed/runtime/zero/partition_parameters.py", line 1618, in '
            "_partition_param_sec\nRuntimeError: start (32) + length (1) exceeds dimension size (32).",
        ),
    ),
)

ZERO3_GATHERED_PARAMETERS = Rule(
    id="zero3-gathered-parameters",
    stage=Stage.RUN,
    title="deepspeed.zero.GatheredParameters is used in a way that it does not allow",
    fix="with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0): change them on rank 0 only; without "
    "modifier_rank only read them",
    manual="""Inside of GatheredParameters the whole parameters are there, and at its end they are divided again.

With modifier_rank the values of that rank go to all others; without it changes would differ among the ranks, so newer
DeepSpeeds refuse them. A parameter must not be gathered twice, nor be moved to another device meanwhile.

Why it matters: The block fails when it ends, often after the work was done.""",
    signatures=(
        Signature(
            words="place+modification+modifier_rank",
            pattern=r"RuntimeError: Detected in-place modification of ZeRO-3 parameters inside GatheredParameters with "
            r"modifier_rank=None",
            title="parameters were changed inside of GatheredParameters without a modifier_rank",
            sample="RuntimeError: Detected in-place modification of ZeRO-3 parameters inside GatheredParameters with "
            "modifier_rank=None. Use modifier_rank=<rank> to broadcast updates across ranks.",
        ),
        Signature(
            words="nested+gatheredparameters",
            pattern=r"RuntimeError: Nested GatheredParameters contexts cannot overlap parameters",
            title="a parameter is gathered inside of another GatheredParameters that has gathered it already",
            fix="gather each parameter once: leave those of the outer block out of the inner one",
            sample="RuntimeError: Nested GatheredParameters contexts cannot overlap parameters; parameter ds_ids "
            "already gathered by an outer context: [12]",
        ),
        Signature(
            words="broadcast+requires+modifier_rank broadcast+requires+parameter",
            pattern=r"RuntimeError: Parameter \S{1,40} is on (?P<device>\S{1,20}) but broadcast requires it to be on",
            title="a parameter was moved to {device} inside of GatheredParameters with modifier_rank",
            fix="copy it instead of moving it: parameter.detach().cpu().clone(); without changes use "
            "modifier_rank=None",
            sample="RuntimeError: Parameter 0 is on cpu but broadcast requires it to be on cuda:0. When using "
            "GatheredParameters with modifier_rank set, parameters must remain on the accelerator device.",
        ),
        Signature(
            words="free+active+submodules",
            pattern=r"RuntimeError: Cannot free a ZeRO-3 parameter while it is still active in submodules",
            title="ZeRO-3 is to give a parameter back while a module still uses it",
            fix="change gathered parameters only with modifier_rank=RANK, and run no part of the model's forward across "
            "the end of GatheredParameters",
            sample="RuntimeError: Cannot free a ZeRO-3 parameter while it is still active in submodules. This can "
            "happen if: (1) submodules have not released the parameter, or (2) you modified parameters",
        ),
    ),
)

OPTIMIZER_OTHER_PARAMETERS = Rule(
    id="optimizer-other-parameters",
    stage=Stage.RUN,
    title="the optimizer's parameters are not those of the model{name_hint}",
    fix="make the optimizer from the parameters of the model that deepspeed.initialize gets, each of them once, after "
    "the last change of the model",
    manual="""DeepSpeed finds each parameter of the optimizer by its name in the model.

A parameter that stands in two groups (tied weights, lists that were joined), one of another copy of the model, or one
that was replaced after the optimizer was made does not fit.

Why it matters: The engine cannot be made, or a checkpoint cannot be saved.""",
    signatures=(
        Signature(
            words="occurs+param_groups",
            pattern=r"AssertionError: Parameter with name: (?P<name>\S{1,160}) occurs multiple times in "
            r"optimizer\.param_groups",
            title="the parameter {name} stands in the optimizer's groups more than once",
            fix="put each parameter into one group, once; tied weights are one parameter with two names",
            sample="AssertionError: Parameter with name: lm_head.weight occurs multiple times in "
            "optimizer.param_groups. Make sure it only appears once to prevent undefined behavior.",
        ),
        Signature(
            words="find+param+named find+frozen+named params+named",
            pattern=r"ValueError: failed to find (?:optimizer param|frozen .{1,400}) in named params",
            title="a parameter is not among those that the model had when the engine was made",
            fix="add or replace layers (adapters, heads, resized embeddings) before deepspeed.initialize, and let the "
            "optimizer hold parameters of this model only",
            sample="ValueError: failed to find optimizer param in named params",
        ),
        Signature(
            words="keyerror+parameter",
            pattern=r"^KeyError: Parameter containing:",
            after=r"_create_param_mapping|_configure_zero_optimizer|_get_zero_param_shapes|param_names\[",
            title="the optimizer holds a parameter that is not of the model that DeepSpeed was given: it is of a second "
            "model, or was replaced after the optimizer was made",
            fix="put all models that are trained into one torch.nn.Module and hand that over, or make one engine for each; "
            "the optimizer may hold the parameters of that one model only",
            sample='  File "/venv/deepspeed/runtime/zero/stage_1_and_2.py", line 610, in _create_param_mapping\n'
            "KeyError: Parameter containing:",
        ),
        Signature(
            words="client+optimizer+unexpected",
            pattern=r"AssertionError: Client Optimizer is of unexpected type (?P<name>.{1,120})",
            title="deepspeed.initialize was given an optimizer that is none{name_hint}",
            fix="give an instance of torch.optim.Optimizer, or a function that makes one from the parameters",
            sample="AssertionError: Client Optimizer is of unexpected type <class 'dict'>",
        ),
        Signature(
            words="client+scheduler+instantiated",
            pattern=r"AssertionError: Client Optimizer \(type = .{1,120} is not instantiated but Client LR Scheduler is",
            title="deepspeed.initialize was given a learning-rate scheduler, but not the optimizer that it drives",
            fix="give both, or give the scheduler as a function: lr_scheduler=lambda optimizer: Scheduler(optimizer, "
            "...)",
            sample="AssertionError: Client Optimizer (type = <class 'NoneType'> is not instantiated but Client LR "
            "Scheduler is instantiated",
        ),
    ),
)

ZERO3_MIXED_TENSORS = Rule(
    id="zero3-mixed-tensors",
    stage=Stage.RUN,
    title="the trainable parameters are not all of one {kind|dtype and device}, and ZeRO-3 puts them into one buffer",
    fix="let the model, its adapters and new heads be made in one dtype (dtype or torch_dtype=torch.bfloat16 for "
    "each of them), or cast them before ZeRO-3 divides them",
    manual="""ZeRO-3 copies the parts of all trainable parameters of a group into one buffer when the engine is made.

An adapter that was cast to float32, a head that was added, or a model of which some modules were moved to another device
beforehand, do not fit into it.

Why it matters: deepspeed.initialize stops, by an assertion without words.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert len\(set\(t\.dtype for t in tensors\)\) == 1",
            title="the trainable parameters are of several dtypes, and ZeRO-3 puts them into one buffer",
            sample="    assert len(set(t.dtype for t in tensors)) == 1\nAssertionError",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert len\(set\(t\.device for t in tensors\)\) == 1",
            title="the trainable parameters are on several devices, and ZeRO-3 puts them into one buffer",
            fix="do not move modules yourself before deepspeed.initialize (no device_map, no .cuda() of a part): "
            "make the whole model on the CPU or under zero.Init",
            sample="    assert len(set(t.device for t in tensors)) == 1\nAssertionError",
        ),
        Signature(
            words="unique+element",
            pattern=r"RuntimeError: expected there to be only one unique element in <generator object "
            r"(?:\w{1,40}\.){0,4}(?:<locals>\.)?\w{0,60}(?:all_gather|gather)",
            title="ZeRO-3 gathers parameters of several dtypes at once: quantized (4-bit or 8-bit) weights, or a "
            "mixture of half and float32",
            fix="do not load quantized weights under ZeRO-3 (use ZeRO-2 for QLoRA, or bnb_4bit_quant_storage equal "
            "to the training's dtype with newer transformers, peft and bitsandbytes); else make all weights one dtype before "
            "ZeRO-3 divides them: the same torch_dtype for the model, its LoRA adapter and new heads, and no cast of "
            "norms to float32 (prepare_model_for_kbit_training does that)",
            steps=(step("python -m pip install -U transformers accelerate peft bitsandbytes"),),
            sample="RuntimeError: expected there to be only one unique element in <generator object "
            "Init._convert_to_deepspeed_param.<locals>.all_gather_coalesced.<locals>.<genexpr> at 0x7f0f04211eb0>",
        ),
    ),
)

RULES = (ZERO_SETTINGS, ZERO_PLUS_PLUS, ZERO3_MIXED_TENSORS, ZERO3_GATHERED_PARAMETERS, OPTIMIZER_OTHER_PARAMETERS)
