"""Rules of autograd: a loss without a gradient, a second backward, dtypes that do not go together."""

from dsdoctor.core.finding import step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

LOSS_WITHOUT_GRADIENT = Rule(
    id="loss-without-gradient",
    stage=Stage.RUN,
    title="the loss has no gradient: nothing that it depends on has requires_grad",
    fix="see that something is trainable (LoRA added, not everything frozen) and that the loss is computed from "
    "it without torch.no_grad(). With activation checkpointing over frozen layers call "
    "model.enable_input_require_grads(), or checkpoint with use_reentrant=False",
    manual="""backward was called on a loss that depends on no trainable parameter.

Everything is frozen; or the model ran under torch.no_grad() or inference_mode. With reentrant activation checkpointing a
layer whose input needs no gradient gives an output without one, even if its own weights are trainable: that is what
frozen embeddings below LoRA do.

Why it matters: There is nothing to train with.""",
    signatures=(
        Signature(
            words="require+element+grad",
            pattern=r"^RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
            sample="RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        ),
        Signature(
            words="scalar+loss",
            pattern=r"AssertionError: loss must be a scalar tensor",
            title="the loss given to the engine's backward has no gradient (nothing has requires_grad), or is no "
            "single number",
            fix="see that something is trainable (LoRA added, not everything frozen), that the model does not "
            "run under torch.no_grad(), and that the loss is one number (loss.mean())",
            sample="AssertionError: loss must be a scalar tensor. If you need to pass output gradients, "
            "backward() of output tensors",
        ),
        Signature(
            words="implicitly+grad",
            pattern=r"^RuntimeError: grad can be implicitly created only for scalar outputs",
            title="backward was called on a tensor with several elements",
            fix="reduce the loss to one number: loss.mean()",
            sample="RuntimeError: grad can be implicitly created only for scalar outputs",
        ),
    ),
)

BACKWARD_TWICE = Rule(
    id="backward-twice",
    stage=Stage.RUN,
    title="backward runs a second time over the same graph",
    fix="compute the loss again for each backward; do not keep tensors of the last step (detach them), or add "
    "both losses and call backward once",
    manual="""A backward pass frees what it needs, and this one comes to a part that was freed already.

Two losses that share a forward, or a state (a memory, a moving average, hidden states) that was not detached, carry the
graph of the last step into this one. retain_graph=True is seldom what is wanted.

Why it matters: The step fails, on the rank that comes to it first.""",
    signatures=(
        Signature(
            words="second+backward+graph",
            pattern=r"^RuntimeError: Trying to backward through the graph a second time",
            sample="RuntimeError: Trying to backward through the graph a second time (or directly access saved "
            "tensors after they have already been freed).",
        ),
    ),
)

DTYPES_DIFFER = Rule(
    id="dtypes-differ",
    stage=Stage.RUN,
    title="two tensors of different dtype meet{types_hint}: input or a layer is not in the precision of the "
    "engine's weights",
    fix="cast the inputs to the engine's dtype (half for fp16, bfloat16 for bf16): "
    "x.to(next(engine.parameters()).dtype); keep layers that were added or upcast later in the same precision, "
    "or train under torch.autocast",
    manual="""The weights are in one precision, and what they are multiplied with is in another.

DeepSpeed casts the module to fp16 or bf16 when the engine is made, and does not cast what the script feeds to it. A layer
in float32 in between (norms upcast by peft's prepare_model_for_kbit_training, a new head) gives the same.

Why it matters: The first forward fails.""",
    signatures=(
        Signature(
            words="dtype+same",
            pattern=r"^RuntimeError: (?:mat1 and mat2 must have the same dtype|expected m1 and m2 to have the "
            r"same dtype|expected mat1 and"
            r" mat2 to have the same dtype)(?:, but got:? (?P<types>[\w:. !=]{3,60}))?",
            sample="RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        ),
        Signature(
            words="scalar+type",
            pattern=r"^RuntimeError: [Ee]xpected (?:object of )?scalar type (?P<types>\w{3,12} but "
            r"(?:got|found)(?: scalar type)? "
            r"\w{3,12})",
            sample="RuntimeError: Expected object of scalar type Half but got scalar type Float for argument #2 "
            "'mat2' in call to _th_mm",
        ),
        Signature(
            words="output+type+input",
            pattern=r"^(?:Type|Runtime)Error: output tensor must have the same type as input tensor",
            title="a collective mixes two dtypes: under ZeRO-3 parameters of one module, or adapter and model, "
            "differ in dtype",
            fix="load model and adapter in one dtype (torch_dtype=torch.bfloat16, and cast the adapter after "
            "adding it)",
            sample="TypeError: output tensor must have the same type as input tensor",
        ),
        Signature(
            words="input+weight+type bias+input+type",
            pattern=r"^RuntimeError: Input type \((?P<types>[\w.:]{3,40})\) and (?:weight|bias) type "
            r"\([\w.:]{3,40}\) should be the same",
            sample="RuntimeError: Input type (float) and bias type (c10::Half) should be the same",
        ),
    ),
)

GRADIENT_NONE = Rule(
    id="gradient-none",
    stage=Stage.RUN,
    title="the script reads the gradient of a parameter, and the gradient is None",
    fix="under ZeRO read it with deepspeed.utils.safe_get_full_grad(parameter), between backward and step; "
    "without ZeRO test for None: a parameter that was not used for the loss has no gradient",
    manual="""param.grad is None.

ZeRO takes the gradients away in the backward pass and keeps its own parts, so param.grad stays None; and a parameter of
a branch that did not run has no gradient at all.

Why it matters: Code that reads or clips gradients by itself fails under DeepSpeed.""",
    signatures=(
        Signature(
            words="nonetype+attribute",
            pattern=r"^AttributeError: 'NoneType' object has no attribute "
            r"'(?:norm|data|abs|detach|float|mean|sum|clone|mul_|div_|item"
            r"|add_|zero_|isnan|isfinite|dtype|numel|pow|to|copy_|view|flatten|cpu)'",
            after=r"\.grad\.(?:norm|data|abs|detach|float|mean|sum|clone|mul_|div_|item|add_|zero_|isnan"
            r"|isfinite|dtype|numel|pow"
            r"|to|copy_|view|flatten|cpu)\b",
            not_after=r"new_grad_tensor\.copy_|reduce_independent_p_g",
            sample='    print("norm of the gradient", model.other.weight.grad.norm())\n'
            "AttributeError: 'NoneType' object has no attribute 'norm'",
        ),
        Signature(
            words="typeerror+nonetype",
            pattern=r"^TypeError: (?:unsupported operand type\(s\) for .{1,16}: 'NoneType' and|bad operand type "
            r"for \w{1,12}\(\): 'NoneType')",
            after=r"\.grad\b(?!_)",
            tier=Tier.GENERIC,
            sample="    total += p.grad ** 2\n"
            "TypeError: unsupported operand type(s) for ** or pow(): 'NoneType' and 'int'",
        ),
    ),
)

FP16_WEIGHTS_UNDER_AMP = Rule(
    id="fp16-weights-under-amp",
    stage=Stage.RUN,
    title="the trainable weights are in fp16, and torch's GradScaler unscales gradients of fp32 weights only",
    fix="load the model in fp32 (dtype=torch.float32) and let fp16=True do the rest, or cast the trainable parameters "
    "(LoRA's) to fp32; with bf16 there is no scaler at all. Under DeepSpeed's own fp16 no GradScaler is needed, so see that "
    "DeepSpeed is really in use",
    manual="""Mixed precision of torch keeps fp32 weights and computes in fp16; its scaler refuses gradients that are fp16.

The model was loaded in fp16, often to save memory, and then trained with fp16=True. Where the run was meant to use
DeepSpeed, this error says that the Trainer or Accelerate did not.

Why it matters: The first optimizer step fails.""",
    signatures=(
        Signature(
            words="attempting+unscale",
            pattern=r"^ValueError: Attempting to unscale FP16 gradients",
            sample="ValueError: Attempting to unscale FP16 gradients.",
        ),
    ),
)

CPU_ADAM_EMPTY_TENSOR = Rule(
    id="cpu-adam-empty-tensor",
    stage=Stage.RUN,
    title="DeepSpeed's CPU Adam was handed a parameter or a gradient that holds nothing (offload to the CPU)",
    fix="two reasons are known, and the names of the parameters decide: print those that require a gradient and have "
    "none after the first backward (freeze them, or let the loss use them); where each has one, run without offload_param, "
    "and with the newest DeepSpeed",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""The C++ code of CPU Adam asks a tensor for its device, and the tensor was never filled.

With offloading a parameter that took no part in the backward pass, or one whose shard was not brought back, reaches the
optimizer as an empty tensor.

Why it matters: The first step of the optimizer fails.""",
    signatures=(
        Signature(
            words="tensor+device",
            pattern=r"^RuntimeError: tensor does not have a device",
            after=r"cpu_adam\.py|adam_update|cpu_lion|cpu_adagrad",
            sample='  File "/venv/deepspeed/ops/adam/cpu_adam.py", line 163, in step\n'
            "RuntimeError: tensor does not have a device",
        ),
    ),
)

RULES = (
    FP16_WEIGHTS_UNDER_AMP,
    CPU_ADAM_EMPTY_TENSOR,
    LOSS_WITHOUT_GRADIENT,
    BACKWARD_TWICE,
    DTYPES_DIFFER,
    GRADIENT_NONE,
)
