"""What autograd keeps of one operation: its name, its operands and its result, or what it takes to compute that again; and
whether all bad elements of an operand reach its result.

Where some do not (they were masked, sliced away or made finite), what made those need not be what made the result bad, and the
walk back ends. Nothing is read that has hooks of its own (activation checkpointing would run its forward), and nothing above
``MAX_TENSOR_BYTES``.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor

MAX_TENSOR_BYTES = 256 << 20
"""Bytes of a tensor that is looked at: logits of a large vocabulary have gigabytes."""
SECOND = ("other", "target", "exponent", "weight")
MAX_PART_ELEMENTS = 1 << 24
"""Elements of an operand whose parts are looked at: an index of eight bytes is made for each."""


def words(text: str) -> frozenset[str]:
    """The words of a text.

    >>> sorted(words("Sum Mean"))
    ['Mean', 'Sum']
    """
    return frozenset(text.split())


def kind_of(node: Any) -> str:
    """What an operation's node is called, without its number: ``Log`` for ``LogBackward0``. Empty for a function of the script's
    own, which may have the name of one of torch's."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return ""
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def snake(kind: str) -> str:
    """The operation's name as torch's functions have it.

    >>> snake("NllLoss"), snake("LogSoftmax"), snake("Div")
    ('nll_loss', 'log_softmax', 'div')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()


def second_operand(node: Any) -> str:
    return next((each for each in SECOND if isinstance(saved(node, each), Tensor)), "other")


def saved(node: Any, name: str) -> Any:
    """What a node keeps under a name, if that is a number, or a tensor that reading does not compute again."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        kept = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # freed by a backward, or written in place since
        return None
    return readable(kept) if isinstance(kept, Tensor) else kept


def readable(tensor: Tensor) -> Tensor | None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    fits = plain and not tensor.is_complex() and 0 < tensor.nbytes <= MAX_TENSOR_BYTES
    return tensor.detach() if fits else None


def _alpha(node: Any) -> float:
    alpha = getattr(node, "_saved_alpha", 1)
    return alpha if isinstance(alpha, int | float) and math.isfinite(alpha) else 1


def signed(number: int) -> int:
    """Autograd gives a dimension of -1 as the largest number of 64 bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _nll_loss(node: Any, one: Tensor) -> Tensor:
    kept = (node._saved_target, node._saved_weight, node._saved_reduction, signed(node._saved_ignore_index))
    result: Tensor = torch.ops.aten.nll_loss_forward(one, *kept)[0]
    return result


def _reduced(function: Any, node: Any, one: Tensor) -> Tensor:
    dims = getattr(node, "_saved_dim", None)
    keeps = bool(getattr(node, "_saved_keepdim", False))
    result: Tensor = (
        function(one) if dims is None else function(one, dim=[signed(each) for each in dims], keepdim=keeps)
    )
    return result


AGAIN: dict[str, Any] = {
    "Add": lambda node, one, other: one + other * _alpha(node),
    "Sub": lambda node, one, other: one - other * _alpha(node),
    "Mul": lambda _, one, other: one * other,
    "Div": lambda _, one, other: one / other,
    "Neg": lambda _, one: -one,
    "Abs": lambda _, one: one.abs(),
    "Log": lambda _, one: one.log(),
    "Log2": lambda _, one: one.log2(),
    "Log10": lambda _, one: one.log10(),
    "Log1P": lambda _, one: one.log1p(),
    "Pow": lambda node, one, *exponent: one ** (exponent[0] if exponent else node._saved_exponent),
    "Xlogy": lambda _, one, other: torch.xlogy(one, other),
    "Select": lambda node, one: one.select(signed(node._saved_dim), signed(node._saved_index)),
    "Sum": lambda node, one: _reduced(torch.sum, node, one),
    "Mean": lambda node, one: _reduced(torch.mean, node, one),
    "Clone": lambda _, one: one,
    "Alias": lambda _, one: one,
    "T": lambda _, one: one.t(),
    "Unsqueeze": lambda node, one: one.unsqueeze(signed(node._saved_dim)),
    "Clamp": lambda node, one: one.clamp(node._saved_min, node._saved_max),
    "MseLoss": lambda node, one, target: torch.ops.aten.mse_loss(one, target, node._saved_reduction),
    "NllLoss": lambda node, one, *_: _nll_loss(node, one),
    "Gather": lambda node, one: one.gather(signed(node._saved_dim), saved(node, "index")),
}
"""Operations whose results autograd does not keep: computed again, of what it does keep."""
SAME_MEMORY = words("Select Clone Alias T Unsqueeze")
"""Of these, what takes none."""


def bytes_again(node: Any, given: list[Any]) -> int:
    """How many bytes a result that is computed again has at most. RuntimeError: shapes that do not fit."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    if kind_of(node) in SAME_MEMORY or not tensors:
        return 0
    element = max(each.element_size() if each.is_floating_point() else 8 for each in tensors)
    return element * int(math.prod(torch.broadcast_shapes(*(each.shape for each in tensors))))


SELECTS = words("Select Slice Index Gather IndexSelect MaskedSelect Split Narrow")
"""They take a part of their operand."""
CHOOSES = words("Where MaskedFill")
"""They take an element of one operand or of another, by a mask."""
KEEP_BAD = words(
    "View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Expand Clone Alias T Transpose Permute Neg Sum Mean Add Sub Mul"
    " Rsub ToCopy Abs MseLoss"
)
"""Every nan and inf of an operand leaves nan or inf in the result."""
KEEP_NAN = words(
    "Div Exp Expm1 Log Log2 Log10 Log1P Sqrt Rsqrt Reciprocal Sigmoid LogSigmoid Tanh Relu Clamp ClampMin ClampMax Softplus"
    " Softmax LogSoftmax Logsumexp Xlogy Mm Bmm Addmm Baddbmm Std Var Cumsum Cat Stack SmoothL1Loss HuberLoss L1Loss"
    " BinaryCrossEntropy BinaryCrossEntropyWithLogits"
)
"""Every nan of an operand leaves nan in the result."""
MAKES_NOTHING = words(
    "View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Expand Clone Alias T Transpose Permute Neg Abs Relu Clamp ClampMin"
    " ClampMax Sigmoid LogSigmoid Tanh Softmax LogSoftmax"
)
"""Of finite elements they make nothing bad."""


def adds_nothing(node: Any, value: Tensor, result: Tensor | None) -> bool:
    """Whether all that is bad in a result is of what is bad in the one operand that has bad elements. False: not known."""
    kind = kind_of(node)
    if kind == "NllLoss":
        target = saved(node, "target")
        counts = isinstance(target, Tensor) and bool((target != signed(node._saved_ignore_index)).any())
        return counts and node._saved_weight is None
    if kind in MAKES_NOTHING | SELECTS | {"Where"}:
        return True
    same = result is not None and result.shape == value.shape
    return same and result is not None and not bool((torch.isfinite(value) & ~torch.isfinite(result)).any())


def passes_all(node: Any, name: str, value: Tensor | None, result: Tensor | None, *, is_nan: bool | None) -> bool:
    """``name``, ``value``: an operand that has bad elements, None where it is not kept; ``is_nan``: so is the result. False where
    it is not known. Any error of torch: what is kept does not fit."""
    kind = kind_of(node)
    if kind in KEEP_BAD or (kind in KEEP_NAN and is_nan):
        return True
    if value is None:
        return False
    bad = ~torch.isfinite(value)
    if kind == "NllLoss":
        return _reach_nll_loss(node, bad)
    if kind in SELECTS | CHOOSES:
        taken = taken_of(node, name, value)
        return taken is not None and not bool((bad & ~taken).any())
    known = kind in KEEP_NAN and result is not None and result.shape == value.shape
    return known and result is not None and not bool((bad & torch.isfinite(result)).any())


def taken_of(node: Any, name: str, value: Tensor) -> Tensor | None:
    """Which elements of an operand are in the result, as a mask. None: not known."""
    kind = kind_of(node)
    if kind in CHOOSES:
        chosen = saved(node, "condition" if kind == "Where" else "mask")
        if not isinstance(chosen, Tensor):
            return None
        return chosen if kind == "Where" and name == "self" else ~chosen
    if value.numel() > MAX_PART_ELEMENTS:
        return None
    numbers = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    part = _part(node, kind, numbers)
    if part is None:
        return None
    taken = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    taken[part.reshape(-1)] = True
    return taken.reshape(value.shape)


def _part(node: Any, kind: str, whole: Tensor) -> Tensor | None:
    """What a selecting operation takes of a tensor."""
    dim = signed(getattr(node, "_saved_dim", 0))
    if kind == "Select":
        return whole.select(dim, signed(node._saved_index))
    if kind == "Slice":
        end = min(signed(node._saved_end), whole.shape[dim])
        sliced: Tensor = torch.ops.aten.slice(whole, dim, signed(node._saved_start), end, signed(node._saved_step))
        return sliced
    if kind == "Index":
        if any(getattr(each, "unpack_hook", None) is not None for each in node._raw_saved_indices):
            return None
        indexed: Tensor = torch.ops.aten.index(whole, node._saved_indices)
        return indexed
    if kind == "MaskedSelect":
        mask = saved(node, "mask")
        return whole.masked_select(mask) if isinstance(mask, Tensor) else None
    index = saved(node, "index")
    if kind not in ("Gather", "IndexSelect") or not isinstance(index, Tensor):
        return None
    return whole.gather(dim, index) if kind == "Gather" else whole.index_select(dim, index)


def _reach_nll_loss(node: Any, bad: Tensor) -> bool:
    """Of each row that has something bad, the element of a target that counts is bad."""
    target = saved(node, "target")
    if not isinstance(target, Tensor) or bad.dim() != 2 or target.dim() != 1:
        return False
    counts = target != signed(node._saved_ignore_index)
    picked = bad.gather(1, target.where(counts, 0)[:, None])[:, 0] & counts
    return not bool((bad.any(1) & ~picked).any())
