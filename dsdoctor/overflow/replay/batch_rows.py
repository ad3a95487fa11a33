"""Which rows of a batch are bad, and whether its labels count at all: looked up in the tensors that a replay was given."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dsdoctor.overflow.measure.tensor_paths import leaves, tensors_of

IGNORED = -100
"""What torch's losses leave out if they are not told otherwise."""
MOST_ROWS = 6


def rows_text(where: str, tensors: Iterable[Tensor], rows: int) -> str:
    """Which rows hold nan or inf; empty where all do or none. ``rows``: the size of the first dimension that counts."""
    with torch.no_grad(), _disable_current_modes():
        bad: set[int] = set()
        for tensor in tensors:
            if tensor.dim() > 1 and tensor.shape[0] == rows and tensor.is_floating_point() and tensor.numel():
                # -inf alone may be a mask
                holds = (torch.isnan(tensor) | torch.isposinf(tensor)).reshape(rows, -1).any(1)
                bad.update(holds.nonzero().flatten().tolist())
    if not bad or len(bad) == rows:
        return ""
    named = ", ".join(map(str, sorted(bad)[:MOST_ROWS])) + (" and more" if len(bad) > MOST_ROWS else "")
    return f"{where}: only row{'s' if len(bad) > 1 else ''} {named} of {rows} (first dimension, from 0) not finite"


def rows_of(inputs: Any) -> int | None:
    """How many rows a batch has; None where its tensors do not agree."""
    sizes = {tensor.shape[0] for tensor in leaves(inputs) if tensor.dim() > 1}
    return sizes.pop() if len(sizes) == 1 else None


def ignored_labels(kwargs: dict[str, Any]) -> str:
    """Whether no label of a batch counts, with or without the shift by one of language models."""
    for name, tensor in _labels(kwargs):
        if bool((tensor == IGNORED).all()):
            return f"all {tensor.numel()} elements of {name} are {IGNORED}, which a loss leaves out"
        if tensor.dim() > 1 and bool((tensor[..., 1:] == IGNORED).all()):
            return f"all elements of {name} but the first of each row are {IGNORED}, and a shift by one leaves out the first"
    return ""


def _labels(kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in kwargs.items():
        for name, tensor in tensors_of(key, value):
            if "label" in key.lower() and tensor.dtype in (torch.int64, torch.int32) and tensor.numel():
                yield name, tensor
