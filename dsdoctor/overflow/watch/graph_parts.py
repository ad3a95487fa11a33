"""Whether all bad elements of an operand reach an operation's result.

Where some do not (they were masked, sliced away or made finite), what made those need not be what made the result bad, and the
walk back ends.
"""

from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.watch.graph_nodes import kind_of, saved, signed, words

LARGEST_PART = 1 << 24
"""Elements of an operand whose parts are looked at: an index of eight bytes is made for each."""
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
    if value.numel() > LARGEST_PART:
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
