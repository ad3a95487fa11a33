"""Rules of ZeRO: partitioned weights, gradients that are reduced twice, ranks that run other modules, no_sync."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

MOE = r"[Mm]ixtral|[Mm][Oo][Ee]\b|\bmoe_|MoE|[Ee]xperts?\b|[Dd]eepseek"
"""Traces of a model with experts in the lines above."""

LEAF = (
    "mark the block of experts as a leaf module, so that ZeRO-3 gathers all of it at once: "
    "deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock]) before deepspeed.initialize, or "
    "zero_optimization.leaf_module in newer DeepSpeeds"
)

ZERO3_PARTITIONED_WEIGHT = Rule(
    id="zero3-partitioned-weight",
    stage=Stage.RUN,
    title="ZeRO-3 has partitioned a weight (its shape is [0] here), and it is used without being gathered",
    fix="use it inside of its own module's forward, or gather it: with "
    "deepspeed.zero.GatheredParameters([weight]): ...; start the script with a launcher; do not call the bare "
    "model past the engine",
    steps=(step("deepspeed --num_gpus 1 SCRIPT.py", note="not plain python"),),
    manual="""Under ZeRO-3 every rank holds a part of each weight only; the weight itself is empty until it is gathered.

DeepSpeed gathers the weights of a module just before the module's forward. Whoever uses a weight elsewhere (tied
weights, an embedding's weight called by F.linear, resizing, a second model, generate on the bare model) finds shape
[0]. Hugging Face makes models under zero.Init whenever the TrainingArguments name ZeRO-3, also where no engine follows:
started by plain python, or a reference model that was never given to an engine.

Why it matters: The message speaks of shapes or dimensions, and the model is right.""",
    signatures=(
        Signature(
            words="must+weight",
            pattern=r"^RuntimeError: 'weight' must be 2-D",
            not_after=r"[Ff][Ss][Dd][Pp]|fully_sharded|FullyShardedDataParallel",
            sample="RuntimeError: 'weight' must be 2-D",
        ),
        Signature(
            words="weight+dimensions bias+size+conv weight+shape+got bias+shape+got running_mean+elements weight+elements "
            "parameter+numbers+channel normalized_shape+dimensional groups+weight+channels",
            pattern=r"^RuntimeError: (?:weight should have at least three dimensions|normalized_shape should be at least "
            r"1-dimensional|Given groups=\d{1,5}, weight of size \[0\], expected input"
            r"|Given weight of size \[[\d, ]{1,40}\], expected bias to be 1-dimensional with \d{1,9} elements, but got bias of "
            r"size \[0\]"
            r"|Expected (?P<what>weight|bias) to be (?:of same shape as normalized_shape|a vector of size equal to the number of "
            r"channels in input), but got (?:weight|bias) of shape \[0\]"
            r"|(?:weight|bias|running_mean) should contain [1-9]\d{0,9} elements not 0"
            r"|Mismatch of parameter numbers and input channel size\. Found parameter numbers = 0)",
            fix="if a function of torch is called with another module's weight, gather it: with "
            "deepspeed.zero.GatheredParameters([weight]). If the module's own forward fails, its hooks did not run: "
            "torch.utils.checkpoint called past the module (diffusers, older vision towers: use_reentrant=False, or another "
            "release), a model that no engine has (image encoder called while the data is prepared), or started by plain "
            "python. ZeRO-2 does not partition weights",
            sample="RuntimeError: weight should have at least three dimensions",
        ),
        Signature(
            words="sizes+tensors+dimension",
            pattern=r"^RuntimeError: Sizes of tensors must match except in dimension \d\. (?:Expected size [1-9]\d{0,9}"
            r" but got size 0|"
            r"Got [1-9]\d{0,9} and 0|Expected size 0 but got size [1-9]\d{0,9})\b",
            after=r"deepspeed[/\\]|[Zz]e[Rr][Oo].{0,3}3|zero3",
            sample='  File "/venv/deepspeed/runtime/zero/linear.py", line 60, in forward\n'
            "RuntimeError: Sizes of tensors must match except in dimension 0. Expected size 4096 but got size 0 for tensor number "
            "1 in the list.",
        ),
        Signature(
            words="copying+shape",
            pattern=r"size mismatch for (?P<name>[\w.]{1,120}): copying a param with shape "
            r"torch\.Size\(\[[1-9][\d, ]{0,40}\]\) from "
            r"checkpoint, the shape in current model is torch\.Size\(\[0\]\)",
            title="plain weights are loaded into a model that ZeRO-3 has partitioned: {name} has shape [0] here",
            fix="load inside of deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), or "
            "load the weights before deepspeed.initialize; a DeepSpeed checkpoint is loaded by "
            "engine.load_checkpoint",
            steps=(step("python -m dsdoctor explain zero3-partitioned-weight"),),
            sample="size mismatch for first.weight: copying a param with shape torch.Size([32, 32]) from "
            "checkpoint, the shape in current model is torch.Size([0]).",
        ),
        Signature(
            words="mismatch+size",
            pattern=r"^RuntimeError: size mismatch, got input \(\d{1,12}\), mat \(\d{1,12}x\d{1,12}\), vec \(0\)",
            sample="RuntimeError: size mismatch, got input (2), mat (2x32), vec (0)",
        ),
        Signature(
            words="singleton+size+tensor",
            pattern=r"^RuntimeError: The size of tensor a \((?:\d{1,12}\) must match the size of tensor b "
            r"\(0|0\) must match the size of "
            r"tensor b \(\d{1,12})\)",
            after=r"deepspeed[/\\]|[Zz]e[Rr][Oo].{0,3}3|zero3",
            sample='  File "/venv/deepspeed/runtime/engine.py", line 1800, in forward\n'
            "RuntimeError: The size of tensor a (4096) must match the size of tensor b (0) at non-singleton "
            "dimension 2",
        ),
        Signature(
            words="index+bounds+size trying+shape+tensor",
            pattern=r"^(?:IndexError: index \d{1,9} is out of bounds for dimension 0 with size 0|ValueError: Trying "
            r"to set a tensor of shape torch\.Size\(\[[1-9][\d, ]{0,40}\]\) in \"[\w.]{1,80}\" \(which has "
            r"shape torch\.Size\(\[0\]\)\))",
            title="ZeRO-3 has partitioned a weight (it is empty here), and code writes into it or loads it without "
            "gathering it",
            fix="gather it: with deepspeed.zero.GatheredParameters([weight], modifier_rank=0); a newer transformers "
            "does so where it initializes and loads models (and quantized weights need zero.Init switched off: "
            "zero3_init_flag false, or ZeRO-2)",
            steps=(step("python -m pip install -U transformers accelerate"),),
            after=r"deepspeed|[Zz]e[Rr][Oo].{0,3}3|zero3|_init_weights|padding_idx|_load_state_dict_into",
            sample="    module.weight.data[module.padding_idx].zero_()\n"
            "IndexError: index 0 is out of bounds for dimension 0 with size 0",
        ),
        Signature(
            words="gradient+shape+expected",
            pattern=r"^RuntimeError: Function \w{1,60} returned an invalid gradient at index \d{1,3} - got "
            r"(?:\[[\d, ]{1,60}\] but expected shape compatible with \[0\]"
            r"|\[0\] but expected shape compatible with \[)",
            title="a weight was used in the forward without being gathered or after it was released again: ZeRO-3 has "
            "partitioned it (its shape is [0]) when its gradient comes",
            fix="use each weight in its own module's forward only: take out sums over parameters (p.sum() * 0 in the "
            "loss), which ZeRO-3 does not need; under reentrant checkpointing use use_reentrant=False; or ZeRO-2",
            sample="RuntimeError: Function SumBackward0 returned an invalid gradient at index 0 - got [0] but expected "
            "shape compatible with [256]",
        ),
        Signature(
            words="invalid+shape+input",
            pattern=r"^RuntimeError: shape '\[-1, 0\]' is invalid for input of size [1-9]\d{0,12}",
            title="the model's vocabulary size reads as 0 (view(-1, 0)): config.vocab_size was taken from an embedding "
            "that ZeRO-3 has partitioned",
            fix="set config.vocab_size from the tokenizer, or resize embeddings inside of "
            "deepspeed.zero.GatheredParameters([weight]); newer transformers and peft do so themselves",
            steps=(step("python -m pip install -U transformers peft"),),
            sample="RuntimeError: shape '[-1, 0]' is invalid for input of size 4644864",
        ),
        Signature(
            words="invalid+shape+size mat2+matrix mat1+mat2",
            pattern=r"^RuntimeError: (?:shape '\[[\d, -]{1,60}\]' is invalid for input of size 0\b|mat2 must be "
            r"a matrix, got 1-D tensor"
            r"|mat1 and mat2 shapes cannot be multiplied \(\d{1,12}x\d{1,12} and (?:0x\d{1,12}|\d{1,12}x0|0x0)\))",
            after=r"deepspeed[/\\]|[Zz]e[Rr][Oo].{0,3}3|zero3",
            sample='  File "/venv/deepspeed/runtime/zero/linear.py", line 60, in forward\n'
            "RuntimeError: mat2 must be a matrix, got 1-D tensor",
        ),
    ),
)

ZERO3_PARAMETER_UNKNOWN = Rule(
    id="zero3-parameter-unknown",
    stage=Stage.RUN,
    title="ZeRO-3 does not know a parameter or module{name_hint}: it was made or replaced after deepspeed.initialize",
    fix="change the model (resize, add heads or adapters, replace modules) before deepspeed.initialize; what a "
    "module uses of another module, register with deepspeed.zero.register_external_parameter",
    manual="""DeepSpeed marks every parameter when the engine is made, and this one has no mark.

Parameters that were made later, modules that were replaced, or a copy of the model outside of the engine are not known
to ZeRO-3.

Why it matters: The first forward or backward through it fails.""",
    signatures=(
        Signature(
            words="ds_id ds_tensor ds_status ds_numel ds_shape ds_persist ds_active_sub_modules ds_summary",
            pattern=r"AttributeError: '(?:Parameter|Tensor|\w{1,40}Parameter)' object has no attribute "
            r"'(?P<name>ds_\w{1,40})'",
            sample="AttributeError: 'Parameter' object has no attribute 'ds_id'",
        ),
        Signature(
            words="expected+available",
            pattern=r"RuntimeError: expected param (?P<name>\{'id': \d{1,9}).{0,400} to (?:not )?be available",
            title="ZeRO-3 expected a parameter to be gathered, and it is not: a module is used outside of its "
            "own forward",
            sample="RuntimeError: expected param {'id': 12, 'status': 'NOT_AVAILABLE', 'numel': 0} to be available",
        ),
    ),
)

ZERO_REDUCED_TWICE = Rule(
    id="zero-reduced-twice",
    stage=Stage.RUN,
    title="a gradient is reduced twice in one backward pass{name_hint}: a layer is used twice under reentrant "
    "activation checkpointing",
    fix="checkpoint with use_reentrant=False (Hugging Face: gradient_checkpointing_kwargs={'use_reentrant': "
    "False}), or do not checkpoint the layers that run twice",
    manual="""A parameter's gradient was complete, was reduced among the ranks, and then came once more.

A shared layer (tied weights, a Siamese model, two forwards before one backward) under reentrant activation
checkpointing runs its backward once for each use, and each time the gradient looks complete. Two backward passes
without a step between them (without gradient accumulation by the engine) do the same.

Why it matters: ZeRO 2 and 3 have already given the gradient away, and stop.""",
    signatures=(
        Signature(
            words="already+reduced",
            pattern=r"Error: The parameter (?P<name>[\w.-]{1,120}) has already been reduced",
            sample="AssertionError: The parameter embed.bias has already been reduced.                         "
            "Gradient computed twice for this partition.",
        ),
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert len\(set\(p\.ds_id for p in (?:.{0,40}params_in_ipg_bucket|params_in_bucket)",
            sample="    assert len(set(p.ds_id for p in self.params_in_ipg_bucket)) == "
            "len(self.params_in_ipg_bucket)\n"
            "AssertionError",
        ),
    ),
)

ZERO3_OTHER_MODULES = Rule(
    id="zero3-other-modules",
    stage=Stage.RUN,
    title="the modules ran in another order than ZeRO-3 had recorded: which module runs depends on the data",
    fix="let every rank run the same modules in each forward (add unused branches times 0), or mark the block as "
    "a leaf module: deepspeed.utils.set_z3_leaf_modules(model, [Block]); stage3_prefetch_bucket_size 0 switches "
    "prefetching off",
    manual="""ZeRO-3 records in which order modules run, and fetches the next ones ahead. This time others ran.

A condition on the data, experts of a mixture that get no token, generation between two training steps, or evaluation
of another path change the order. With experts the ranks differ from each other, and then wait in different gathers.

Why it matters: Parameters stay behind that nobody used, or the ranks hang until a timeout.""",
    signatures=(
        Signature(
            words="inflight+params",
            pattern=r"RuntimeError: still have inflight params",
            after=MOE,
            title="ZeRO-3 fetched experts that this forward did not use (a mixture of experts): which experts "
            "run depends on the data",
            fix=LEAF,
            sample='  File "/venv/transformers/models/mixtral/modeling_mixtral.py", line 700, in forward\n'
            "RuntimeError: still have inflight params [{'id': 41, 'status': 'AVAILABLE'}]",
        ),
        Signature(
            words="inflight+params",
            pattern=r"RuntimeError: still have inflight params",
            title="ZeRO-3 has parameters in flight at the end of a forward: fetched ahead, and not used in it",
            fix="does each forward run the same modules? If a branch on the data, a mixture of experts, evaluation or "
            "generation between steps, or a second model changes them: let every rank run the same ones (unused branches times "
            "0), or mark the block as a leaf module: deepspeed.utils.set_z3_leaf_modules(model, [Block]). If they are always the "
            "same, it is this version's prefetcher: upgrade DeepSpeed, or take another version. "
            "stage3_prefetch_bucket_size 0 switches prefetching off",
            sample="RuntimeError: still have inflight params [{'id': 8, 'status': 'AVAILABLE', 'numel': 26214400}]",
        ),
        Signature(
            words="indexerror",
            pattern=r"^IndexError: pop from an empty deque",
            after=r"deepspeed[/\\]|partitioned_param_coordinator",
            title="ZeRO-3's record of modules ended before the forward did: other modules ran than it had recorded",
            fix="between training steps do not generate or evaluate with the partitioned engine, or gather the "
            "model for it; newer trl, transformers and DeepSpeed mend most cases",
            steps=(step("python -m pip install -U trl transformers accelerate deepspeed"),),
            sample='  File "/venv/deepspeed/runtime/zero/partitioned_param_coordinator.py", line 311, in '
            "fetch_sub_module\n"
            "IndexError: pop from an empty deque",
        ),
        Signature(
            words="assertionerror+status",
            pattern=r"^AssertionError: \{'id': \d{1,9}, 'status': ",
            after=r"assert not param\.ds_active_sub_modules",
            title="ZeRO-3 is to give a parameter back while a module still uses it: gathered parameters were changed "
            "or used across the end of GatheredParameters, or a forward had not ended",
            fix="inside of deepspeed.zero.GatheredParameters change parameters only with modifier_rank=RANK, and run "
            "no part of the model's forward across its end; newer trl and DeepSpeed mend cases of generation",
            steps=(step("python -m pip install -U trl deepspeed"),),
            sample="    assert not param.ds_active_sub_modules, param.ds_summary()\n"
            "AssertionError: {'id': 0, 'status': 'AVAILABLE', 'numel': 524288, 'ds_numel': 524288}",
        ),
        Signature(
            words="partition+flight",
            pattern=r"^AssertionError: .{0,400}Cannot partition a param in flight",
            title="ZeRO-3 is to give a parameter back while it is still being fetched: other modules ran than it had "
            "recorded, or parameters are gathered in the middle of a step",
            sample="AssertionError:  Parameter containing: Cannot partition a param in flight",
        ),
        Signature(
            words="expected+inflight expect+ds_status non+inflight+registry",
            pattern=r"^(?:Assertion|Runtime)Error: (?:expected param \{'id': \d{1,9}.{0,400} to be inflight|expect "
            r"param\.ds_status == ZeroParamStatus\.NOT_AVAILABLE, got|attempted to add non-inflight parameter to "
            r"registry)",
            title="ZeRO-3 finds a parameter in another state than it should be in: its module was used outside of "
            "its own forward, or modules ran in another order",
            sample="AssertionError: expected param {'id': 12, 'status': 'AVAILABLE', 'numel': 4096} to be inflight",
        ),
        Signature(
            words="assertionerror+status runtimeerror+status",
            pattern=r"^(?:Assertion|Runtime)Error: \{'id': \d{1,9}, 'status': "
            r"'?<?(?:ZeroParamStatus\.)?(?P<status>NOT_AVAILABLE|INFLIGHT"
            r"|AVAILABLE)",
            title="ZeRO-3 finds a parameter in another state than it should be in ({status}): its module was "
            "used outside of its own forward, or modules ran in another order",
            sample="AssertionError: {'id': 291, 'status': 'INFLIGHT', 'numel': 65667072, 'ds_numel': 65667072}",
        ),
        Signature(
            words="fetch+queue tracing+error",
            pattern=r"RuntimeError: (?:tracing error at step \d{1,9}|expected the next \d{1,9} parameters in the parameter fetch "
            r"queue to be)",
            sample="RuntimeError: tracing error at step 42: ",
        ),
        Signature(
            words="disagreement+rank0",
            pattern=r"(?:Detected a disagreement on list (?:length|contents)|RuntimeError: disagreement) between rank0 "
            r"and rank(?P<other>\d{1,5})",
            title="rank 0 and rank {other} gather different parameters: the ranks run different modules",
            sample="RuntimeError: Detected a disagreement on list length between rank0 and rank3: ",
        ),
    ),
)

ZERO_NO_SYNC = Rule(
    id="zero-no-sync",
    stage=Stage.RUN,
    title="no_sync (gradient accumulation by the caller) does not work with ZeRO stage {stage|2 and 3}",
    fix="let the engine accumulate: gradient_accumulation_steps in the DeepSpeed configuration, no no_sync in "
    "the script. DeepSpeed refuses it since 0.16.0: newer transformers and accelerate no longer call it; "
    "DeepSpeed 0.15.4 let it pass",
    steps=(step("python -m pip install -U transformers accelerate"),),
    manual="""no_sync was entered on an engine that divides the gradients among the ranks.

ZeRO 2 and 3 reduce a gradient during the backward pass and keep a part of it, so there is nothing to hold back.
DeepSpeed before 0.16.0 let the call pass without effect; since then it is refused.

Why it matters: The first accumulation step fails.""",
    signatures=(
        Signature(
            words="no_sync+gradient",
            pattern=r"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
            r"(?P<stage>\d)",
            sample="AssertionError: no_sync context manager is incompatible with gradient partitioning logic of "
            "ZeRO stage 3",
        ),
        Signature(
            words="illegal+no_sync no_sync+reentry",
            pattern=r"It is illegal to call Engine\.step\(\) inside no_sync|no_sync context manager reentry is "
            r"unsupported",
            title="the engine's no_sync is entered twice, or step() is called inside of it",
            fix="call engine.step() after the with-block, and do not nest no_sync",
            sample="AssertionError: It is illegal to call Engine.step() inside no_sync context manager",
        ),
    ),
)

ZERO_UNUSED_PARAMETERS = Rule(
    id="zero-unused-parameters",
    stage=Stage.RUN,
    title="parameters got no gradient: they were not used for the loss",
    fix='set "ignore_unused_parameters": true in zero_optimization, or freeze what is not used (requires_grad '
    "False) before the "
    "engine is made",
    manual="""ZeRO waits for the gradient of every trainable parameter, and some got none.

A branch that did not run, or a layer whose output is not part of the loss.

Why it matters: The step stops; or a rank that did use them waits for the others.""",
    signatures=(
        Signature(
            words="indicates+module",
            pattern=r"This assert indicates that your module has parameters that",
            sample="This assert indicates that your module has parameters that",
        ),
        Signature(
            words="invalid+param+gradient",
            pattern=r"Invalid to reduce Param (?P<name>\S{1,120}) with None gradient",
            sample="AssertionError: rank 0 - Invalid to reduce Param 12 with None gradient",
        ),
    ),
)

ZERO_BACKWARD_CALLED_DIRECTLY = Rule(
    id="zero-backward-called-directly",
    stage=Stage.RUN,
    title="backward was called on the loss, not on the engine",
    fix="call engine.backward(loss) instead of loss.backward(), or engine.scale(loss).backward()",
    manual="""The engine scales the loss and reduces the gradients in its own backward.

Why it matters: With loss.backward() neither happens, so DeepSpeed stops.""",
    signatures=(
        Signature(
            words="scaling+backward direct+backward",
            pattern=r"Loss scaling is required for this configuration, but backward\(\) was called|Direct calls to "
            r"tensor\.backward\(\) are not supported in this configuration",
            sample="RuntimeError: Loss scaling is required for this configuration, but backward() was called "
            "directly without scaling the loss.",
        ),
    ),
)

RULES = (
    ZERO3_PARTITIONED_WEIGHT,
    ZERO3_PARAMETER_UNKNOWN,
    ZERO_REDUCED_TWICE,
    ZERO3_OTHER_MODULES,
    ZERO_NO_SYNC,
    ZERO_UNUSED_PARAMETERS,
    ZERO_BACKWARD_CALLED_DIRECTLY,
)
