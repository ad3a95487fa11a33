"""Rules of tensors that cannot take part: made in inference mode, predictions and labels of other sizes, flat gradients."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

INFERENCE_MODE_TENSORS = Rule(
    id="inference-mode-tensors",
    stage=Stage.RUN,
    title="weights or activations were made under torch.inference_mode(), and the training uses them",
    fix="use torch.no_grad() instead of torch.inference_mode() around evaluation, generation and loading; with ZeRO-3 "
    "set stage3_prefetch_bucket_size 0, so that no weights of the training are gathered during an evaluation",
    steps=(step("python -m pip install -U trl accelerate deepspeed"),),
    manual="""A tensor that is made inside of torch.inference_mode() can never take part in a backward pass, nor be changed later.

ZeRO-3 gathers weights into new tensors, and prefetches those of the next modules: an evaluation or a generation under
inference_mode leaves such weights behind, and the next training step meets them.

Why it matters: The first training step after an evaluation or a generation fails.""",
    signatures=(
        Signature(
            words="inference+tensors inference+inplace",
            pattern=r"RuntimeError: (?:Inference tensors cannot be saved for backward|Inplace update to inference "
            r"tensor outside InferenceMode is not allowed)",
            sample="RuntimeError: Inference tensors cannot be saved for backward. To work around you can make a "
            "clone to get a normal tensor and use it in autograd.",
        ),
    ),
)

LOSS_SIZES_DIFFER = Rule(
    id="loss-sizes-differ",
    stage=Stage.RUN,
    title="the loss gets {input} predictions and {target} labels: they belong to different batches, or are cut or "
    "flattened differently",
    fix="print both shapes before the loss; with a pipeline give every micro batch the same size (drop_last=True) and "
    "return the labels of the same micro batch; with sequence parallelism or packing cut labels as the inputs are cut",
    steps=(instead("print(logits.shape, labels.shape)"),),
    manual="""Predictions and labels meet in the loss, one row of predictions for each label.

In a pipeline the last stage takes labels from its own data loader: a shorter last batch, or loaders in another order on
the first and the last stage, set them apart. Elsewhere a mask, a shift or a padding was applied to one of them only.

Why it matters: The forward pass stops at this batch.""",
    signatures=(
        Signature(
            words="batch_size+match",
            pattern=r"ValueError: Expected input batch_size \((?P<input>\d{1,12})\) to match target batch_size "
            r"\((?P<target>\d{1,12})\)",
            not_after=r"pipe[/\\]engine\.py",
            sample="ValueError: Expected input batch_size (8) to match target batch_size (4).",
        ),
    ),
)

OPTIMIZER_NEEDS_MATRICES = Rule(
    id="optimizer-needs-matrices",
    stage=Stage.RUN,
    title="the optimizer works on matrices ({what|Muon, GaLore}), and it was given flat tensors: ZeRO has flattened the "
    "gradients, or biases and norms are among its parameters",
    fix='for Muon take DeepSpeed\'s own: "optimizer": {"type": "Muon"} with ZeRO 1 or 2 (DeepSpeed 0.17.6 or newer), '
    "which keeps shapes; give it only the matrices, and embeddings, heads, biases and norms to AdamW. GaLore and other "
    "optimizers of this kind run without ZeRO",
    steps=(step("python -m pip install -U deepspeed"),),
    manual="""Muon and GaLore multiply or decompose the gradient of each weight as a matrix.

ZeRO hands an optimizer one flat piece of all parameters of a group. An own optimizer of this kind therefore cannot work
under it; DeepSpeed's Muon is applied before the gradients are flattened.

Why it matters: The first step fails.""",
    signatures=(
        Signature(
            words="assertionerror",
            pattern=r"^AssertionError:?$",
            after=r"assert (?:len\(G\.shape\) == 2|G\.ndim >= 2)|in zeropower_via_newtonschulz\w{0,3}$",
            title="Muon was given a parameter that is no matrix: ZeRO has flattened the gradients, or biases and norms "
            "are among its parameters",
            sample='  File "/work/muon.py", line 60, in zeropower_via_newtonschulz5\n    assert len(G.shape) == 2\n'
            "AssertionError",
        ),
        Signature(
            words="tuple+range dimension+range",
            pattern=r"^IndexError: (?:tuple index out of range|Dimension out of range)",
            after=r"galore_torch[/\\]|galore_projector\.py",
            title="GaLore was given a flat gradient: it does not work under ZeRO (DeepSpeed), which flattens the "
            "gradients",
            fix="run GaLore without ZeRO (torchrun or accelerate without a DeepSpeed configuration), or use LoRA or "
            "ZeRO-Offload with AdamW instead",
            sample='  File "/venv/galore_torch/galore_projector.py", line 15, in project\n'
            "IndexError: tuple index out of range",
        ),
    ),
)

RULES = (INFERENCE_MODE_TENSORS, LOSS_SIZES_DIFFER, OPTIMIZER_NEEDS_MATRICES)
