"""A weight that became bad: what its optimizer, which has written it or has not, shows of that. Read only then."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.watch.small import groups

SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""What Adam and its kin, RMSprop and Adagrad divide by the root of, with eps added."""
PART = 1 << 24
"""Elements that are looked at together: a partition may have billions."""


def is_frozen(engine: Any, name: str) -> bool:
    """Whether a weight of the model has no gradient, so that no optimizer writes it."""
    weight = dict(engine.module.named_parameters()).get(name)
    return weight is not None and not weight.requires_grad


@torch.no_grad()
def zero_over_zero(engine: Any) -> int:
    """How many elements of the weights that the optimizer writes on this rank are bad, if its eps is 0 there and every one of
    them has a second moment of 0: its step made 0 / 0 of it. Else 0."""
    found = 0
    for weight, moment in _stepped(engine):
        for part, squares in zip(weight.split(PART), moment.split(PART), strict=True):
            bad = ~torch.isfinite(part)
            number = int(bad.sum())
            if number != int((bad & (squares == 0)).sum()):
                return 0
            found += number
    return found


def _stepped(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    eps = [group.get("eps") for group in groups(engine)]
    if not eps or not all(isinstance(each, int | float) for each in eps):
        return
    for weight, state in getattr(inner, "state", {}).items():
        moment = next((state[name] for name in SECOND_MOMENTS if isinstance(state.get(name), Tensor)), None)
        if moment is None or not isinstance(weight, Tensor) or moment.shape != weight.shape:
            continue
        # in a half precision 1e-8 is 0 too
        if all(float(torch.tensor(each, dtype=weight.dtype)) == 0 for each in eps):
            yield weight.detach().reshape(-1), moment.reshape(-1)
