"""What autograd keeps of one operation: its name, its operands and its result, or what it takes to compute that again.

Nothing is read that has hooks of its own (activation checkpointing would run its forward), and nothing larger than ``LARGEST``.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor

LARGEST = 256 << 20
"""Bytes of a tensor that is looked at: logits of a large vocabulary have gigabytes."""
SECOND = ("other", "target", "exponent", "weight")


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
    fits = plain and not tensor.is_complex() and 0 < tensor.nbytes <= LARGEST
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
