"""Rules of the backward pass: changed in place, recomputed otherwise, nan in it, losses that are no numbers, DDP's own checks."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

DEEPSPEED = r"deepspeed[/\\]|[Zz]e[Rr][Oo].{0,3}3|zero3"

CHANGED_IN_PLACE = Rule(
    id="changed-in-place",
    stage=Stage.RUN,
    title="a tensor that the backward pass needs was changed in place{shape_hint}",
    fix="replace the in-place operation (+=, x[...] = , relu(inplace=True), .add_()) by one that makes a new tensor, or "
    "clone() first; torch.autograd.set_detect_anomaly(True) shows which forward line made the tensor",
    manual="""Autograd keeps tensors of the forward pass for the backward pass, and one of them is no longer what it was.

Under ZeRO-3 the outputs of modules are views of a hook's output, so that an in-place operation on them fails there
and not elsewhere. Two forwards before one backward, with an optimizer step or a buffer's update between them, do so
too.

Why it matters: The backward pass stops.""",
    signatures=(
        Signature(
            words="modified+inplace+gradient modified+place+gradient",
            pattern=r"RuntimeError: one of the variables needed for gradient computation has been modified by an "
            r"inplace operation: \[[\w.]{1,40} (?P<shape>\[[\d, ]{0,60}\])",
            sample="RuntimeError: one of the variables needed for gradient computation has been modified by an "
            "inplace operation: [torch.cuda.HalfTensor [4096, 4096]], which is output 0 of "
            "AsStridedBackward0, is at version 2; expected version 1 instead.",
        ),
        Signature(
            words="view+modified+inplace",
            pattern=r"RuntimeError: Output \d{1,3} of \w{0,60}Backward\w{0,20} is a view and is being modified "
            r"in-?place",
            title="a module's output is changed in place, and under DeepSpeed's ZeRO-3 hooks it is a view",
            fix="replace the in-place operation by one that makes a new tensor (relu without inplace=True, x = x + y "
            "instead of x += y), or clone() the module's output first",
            sample="RuntimeError: Output 0 of PreBackwardFunctionForModuleBackward is a view and is being modified "
            "inplace. This view was created inside a custom Function",
        ),
        Signature(
            words="leaf+place",
            pattern=r"RuntimeError: a (?:view of a )?leaf Variable that requires grad is (?:being )?used in an "
            r"in-place operation",
            title="a parameter is changed in place while gradients are recorded",
            fix="change parameters under torch.no_grad() (or parameter.data), and before deepspeed.initialize",
            sample="RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.",
        ),
    ),
)

RECOMPUTED_OTHERWISE = Rule(
    id="recomputed-otherwise",
    stage=Stage.RUN,
    title="activation (gradient) checkpointing computed something else the second time than in the forward pass "
    "(recomputed: {what|other tensors})",
    fix="under ZeRO-3 checkpoint with the reentrant kind, use_reentrant=True (Hugging Face: "
    "gradient_checkpointing_kwargs={'use_reentrant': True}), or take a newer DeepSpeed and torch; else find what differs "
    "between the two passes: a cache (use_cache=False), random choices, dropout by hand, autocast, a frozen part that was "
    "cast, a router of experts",
    steps=(step("python -m pip install -U deepspeed transformers"),),
    manual="""In the backward pass a checkpointed block runs again, and its tensors must be those of the forward pass.

With use_reentrant=False torch compares them. Under ZeRO-3 a weight that is gathered in one pass is empty (shape [0])
in the other, and the comparison fails. A key-value cache that grows, dropout of another state, or experts chosen
otherwise do so too.

Why it matters: The backward pass stops; with the check switched off gradients would be wrong.""",
    signatures=(
        Signature(
            words="recomputed+tensors checkpointerror+recomputed",
            pattern=r"torch\.utils\.checkpoint: Recomputed values for the following tensors have "
            r"(?P<what>different metadata)",
            sample="torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the "
            "following tensors have different metadata than during the forward pass.",
        ),
        Signature(
            words="number+tensors+recomputation checkpointerror+number recomputation+tensors unpack+triggered+tensor",
            pattern=r"torch\.utils\.checkpoint: (?:A (?P<what>different number of tensors) was saved|trying "
            r"to save (?P<what2>more tensors) during recomputation|Unpack is being triggered)",
            sample="torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors "
            "was saved during the original forward and recomputation.",
        ),
        Signature(
            words="checkpointing+compatible+grad",
            pattern=r"RuntimeError: Checkpointing is not compatible with \.grad\(\)",
            title="reentrant activation checkpointing does not work with torch.autograd.grad, nor with "
            "backward(inputs=...)",
            fix="checkpoint with use_reentrant=False, or call loss.backward() without inputs",
            sample="RuntimeError: Checkpointing is not compatible with .grad() or when an `inputs` parameter is "
            "passed to .backward().",
        ),
    ),
)

NAN_IN_BACKWARD = Rule(
    id="nan-in-backward",
    stage=Stage.RUN,
    title="{function|the backward pass} gave nan: the numbers left the range of the dtype in this step",
    fix="train in bf16 where the GPU has it (fp16 ends at 65504), lower the learning rate, clip gradients, and look "
    "for log(0), a division by zero or a fully masked row of attention in the forward line that anomaly "
    "detection shows",
    steps=(step("python -m dsdoctor.run SCRIPT.py", note="names the first module with inf or nan"),),
    manual="""Anomaly detection, or a check of the framework, met values that are no numbers.

A loss that is nan at one rank or one batch makes all gradients nan. fp16 overflows at 65504; models that were trained
in bf16 often do not fit into it. Empty labels (all -100) give 0/0 in the mean of the loss.

Why it matters: From here on nothing is learned, unless the step is skipped.""",
    signatures=(
        Signature(
            words="function+returned+nan",
            pattern=r"RuntimeError: Function '(?P<function>\w{1,80})' returned nan values in its \d{1,4}th output",
            sample="RuntimeError: Function 'MmBackward0' returned nan values in its 0th output.",
        ),
        Signature(
            words="nan+local found+nan nan+loss loss+nan infinite+nan finite+loss loss+finite",
            pattern=r"(?:Assertion|Value|Runtime|FloatingPoint)Error: (?:Rank \d{1,6}: )?(?:found "
            r"(?:NaN|Inf|nan|inf)\b.{0,40}in local (?:forward loss|grad)|(?:[Tt]he )?[Ll]oss "
            r"(?:is|became|was) (?:nan|NaN|infinite|inf|not finite|non-finite|infinite or NaN)|[Nn]on-finite "
            r"(?:loss|gradient)|NaN (?:loss|detected|encountered|found)|nan loss)",
            title="the training itself found that the loss or a gradient is no number (nan or inf)",
            sample="AssertionError: Rank 3: found NaN in local grad norm in backward pass before data-parallel "
            "communication collective.",
        ),
        Signature(
            words="expected+parameter+distribution+invalid",
            pattern=r"ValueError: Expected parameter \w{1,40} \(.{1,80}\) of distribution \w{1,40}\(.{0,400}to "
            r"satisfy the constraint.{0,200}but found invalid values",
            title="a distribution got parameters that are no numbers: the model's output is nan or inf",
            sample="ValueError: Expected parameter logits (Tensor of shape (8, 32000)) of distribution "
            "Categorical(logits: torch.Size([8, 32000])) to satisfy the constraint "
            "IndependentConstraint(Real(), 1), but found invalid values:",
        ),
    ),
)

DDP_PARAMETERS = Rule(
    id="ddp-parameters",
    stage=Stage.RUN,
    title="DistributedDataParallel waits for the gradients of parameters that got none, or got one twice",
    fix="set find_unused_parameters=True (Hugging Face: --ddp_find_unused_parameters True) or freeze what is not "
    "used; marked ready twice: checkpoint with use_reentrant=False. The run uses torch's DDP here, not "
    "DeepSpeed's engine: see whether the configuration reaches it",
    manual="""torch's DistributedDataParallel reduces each gradient once in a backward pass.

A parameter without part in the loss never becomes ready; one that is used twice under reentrant checkpointing becomes
ready twice. With DeepSpeed's own engine this wrapper is not used.

Why it matters: The next forward, or this backward, stops on that rank and the others wait.""",
    signatures=(
        Signature(
            words="finished+reduction+prior",
            pattern=r"RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
            r"one",
            title="parameters got no gradient, and DistributedDataParallel waits for them",
            sample="RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
            "one. This error indicates that your module has parameters that were not used in producing loss.",
        ),
        Signature(
            words="mark+ready+once",
            pattern=r"RuntimeError: Expected to mark a variable ready only once",
            title="DistributedDataParallel got the gradient of a parameter twice: reentrant activation "
            "checkpointing, or a shared layer",
            fix="checkpoint with use_reentrant=False, or call model._set_static_graph(); a parameter that is used "
            "twice must not be checkpointed twice",
            sample="RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the "
            "following reasons",
        ),
    ),
)

GRADIENT_LOST_IN_ZERO = Rule(
    id="zero-gradient-lost",
    stage=Stage.RUN,
    title="ZeRO asks a parameter for its gradient, and there is none",
    fix="call engine.backward(loss) once for each engine.step(), and never loss.backward(); checkpoint activations with "
    "use_reentrant=False; leave what is frozen out of the optimizer; a newer DeepSpeed mends several cases",
    steps=(step("python -m pip install -U deepspeed"), instead("python -m dsdoctor explain zero-gradient-lost")),
    explained_by=("known-regression",),
    manual="""ZeRO 1 and 2 take each gradient out of its parameter during the backward pass and put it into a bucket.

It was gone already, or was never made: the backward ran past the engine (loss.backward()), over the same graph twice, in
parts by reentrant checkpointing, or step() was called without a backward.

Why it matters: The backward pass or the step stops, on every rank.""",
    signatures=(
        Signature(
            words="ipg_index ipg_buffer",
            pattern=r"AttributeError: '\w{0,40}DeepSpeedZeroOptimizer\w{0,20}' object has no attribute "
            r"'ipg_(?:index|buffer)'",
            title="backward was called on the loss and not on the engine: ZeRO's buffers for gradients are made by "
            "engine.backward(loss)",
            fix="call engine.backward(loss) instead of loss.backward() (Lightning: manual_backward, Fabric: "
            "fabric.backward, accelerate: accelerator.backward)",
            sample="AttributeError: 'DeepSpeedZeroOptimizer' object has no attribute 'ipg_index'",
        ),
        Signature(
            words="nonetype+attribute",
            pattern=r"^AttributeError: 'NoneType' object has no attribute "
            r"'(?:view|numel|data|dtype|narrow|element_size|new_empty|device)'",
            after=r"reduce_independent_p_g_buckets_and_remove_grads|grad_reduc\b|new_grad_tensor"
            r"|async_accumulate_grad_in_cpu|copy_grads_in_partition|reduce_ready_partitions",
            sample="    new_grad_tensor.copy_(param.grad.view(-1))\nAttributeError: 'NoneType' object has no "
            "attribute 'view'",
        ),
        Signature(
            words="list+range",
            pattern=r"^IndexError: list index out of range",
            after=r"bucket\.buffer\[bucket\.index\]",
            title="ZeRO's bucket for gradients was not made for this backward: loss.backward() ran past the engine "
            "(Lightning's older DeepSpeed plugin, an own loop), or another dtype of gradients came than was prepared",
            fix="call engine.backward(loss) (Lightning: a release that knows this DeepSpeed; manual_backward), keep all "
            "trainable parameters in one dtype, or set contiguous_gradients false",
            sample="    self.average_tensor(bucket.buffer[bucket.index].narrow(0, 0, bucket.elements), comm_dtype)\n"
            "IndexError: list index out of range",
        ),
        Signature(
            words="nonetype+object nonetype+len keyerror list+range",
            pattern=r"^(?:TypeError: (?:object of type 'NoneType' has no len\(\)|'NoneType' object is not "
            r"(?:iterable|subscriptable))|KeyError: \d{1,4}|IndexError: list index out of range)",
            after=r"averaged_gradients",
            title="engine.step() finds no gradients of this step (averaged_gradients is empty): no backward ran "
            "before it, or it ran past the engine",
            sample="    self.averaged_gradients[i],\nTypeError: object of type 'NoneType' has no len()",
        ),
        Signature(
            words="precision+gradient+param",
            pattern=r"AssertionError: high precision param has no gradient, lp param_id",
            title="the bf16 optimizer finds a parameter without a gradient: it took no part in the loss",
            fix="freeze the parameters that are not used (requires_grad False), or add their output times 0 to the loss",
            sample="AssertionError: high precision param has no gradient, lp param_id = 14 group_info = [0][3]",
        ),
        Signature(
            words="grad_accumulator_",
            pattern=r"!grad_accumulator_\.expired\(\) INTERNAL ASSERT FAILED",
            title="the backward pass meets a parameter whose gradient hook is gone: parameters were frozen, replaced "
            "or freed after the forward, as with adapters or quantized weights under ZeRO-3",
            fix="freeze and replace parameters before deepspeed.initialize; with quantized weights use ZeRO-2, or a "
            "bitsandbytes, peft and transformers that support ZeRO-3 (bnb_4bit_quant_storage)",
            steps=(step("python -m pip install -U peft transformers bitsandbytes"),),
            sample="RuntimeError: !grad_accumulator_.expired() INTERNAL ASSERT FAILED at "
            '"../torch/csrc/autograd/saved_variable.cpp":226, please report a bug to PyTorch. No grad '
            "accumulator for a saved leaf",
        ),
        Signature(
            words="next_functions",
            pattern=r"AttributeError: 'NoneType' object has no attribute 'next_functions'",
            after=r"deepspeed[/\\]",
            not_after=r"count_used_parameters_in_backward",
            title="DeepSpeed follows a parameter's graph to its gradient, and there is none: the parameter is "
            "frozen, or is seen without gradients recorded (torch.no_grad), as in reentrant checkpointing",
            fix="use use_reentrant=False, leave frozen parameters out of the optimizer, and take a torch that this "
            "DeepSpeed was tested with",
            steps=(step("python -m pip install -U torch deepspeed"),),
            sample='  File "/venv/deepspeed/runtime/utils.py", line 1350, in create_reduce_and_remove_grad_hooks\n'
            "AttributeError: 'NoneType' object has no attribute 'next_functions'",
        ),
        Signature(
            words="backward+evaluation",
            pattern=r"AssertionError: backward pass is invalid for module in evaluation mode",
            title="ZeRO-3's backward meets a module in evaluation mode: the forward ran after model.eval()",
            fix="call engine.train() before each training forward (generation and evaluation switch to eval mode); "
            "frozen parts that stay in eval mode run under torch.no_grad(). Newer DeepSpeeds no longer ask for it",
            sample="AssertionError: backward pass is invalid for module in evaluation mode",
        ),
        Signature(
            words="active_backward_submodules",
            pattern=r"AssertionError: active_backward_submodules is empty during backward pass",
            title="ZeRO-3's backward meets a module whose backward it never saw begin: it ran past the engine, or "
            "several times",
            tier=Tier.NAMED,
            sample="AssertionError: active_backward_submodules is empty during backward pass",
        ),
    ),
)

RULES = (CHANGED_IN_PLACE, RECOMPUTED_OTHERWISE, NAN_IN_BACKWARD, DDP_PARAMETERS, GRADIENT_LOST_IN_ZERO)
