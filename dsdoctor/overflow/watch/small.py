"""Now and then a step without an overflow is looked at for what became too small: gradients in float16, updates of weights that
are kept in a half precision alone. Changes nothing; between the checks it costs nothing.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.hooks import engine_facts
from dsdoctor.overflow.watch.steps import is_power_of_two

EVERY = 100
"""Steps from check to check; the first ones are looked at after 1, 2, 4, 8 and so on."""
HALVES = (torch.float16, torch.bfloat16)
MOST_WEIGHTS = 64
SAMPLE = 4096
MOST_NAMES = 4


def is_due(step: int) -> bool:
    """Whether a step is one that is looked at.

    >>> [step for step in range(401) if is_due(step)]
    [0, 1, 3, 7, 15, 31, 63, 99, 199, 299, 399]
    """
    number = step + 1
    return number % EVERY == 0 or (number < EVERY and is_power_of_two(number))


def may_underflow(engine: Any) -> bool:
    """Whether gradients go through float16."""
    return engine_facts.dtype(engine) is torch.float16


class Updates:
    """A sample of the weights that the optimizer writes in a half precision, before and after one step."""

    def __init__(self, engine: Any) -> None:
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._before = [(parameter, *sample) for parameter in _stepped(engine) if (sample := _sampled(parameter))]
        self._rates = any(group.get("lr", 0) for group in groups(engine))

    @torch.no_grad()
    def unchanged(self) -> tuple[tuple[str, float], ...]:
        """Names and the share of the weights with a gradient that the step left as they were, the largest first."""
        found = []
        for parameter, before, moves in self._before if self._rates else ():
            after = _part(parameter)
            asked = int(moves.sum())
            if asked:
                same = int(((after == before) & moves).sum())
                found.append((self._names.get(id(parameter), f"a weight {tuple(parameter.shape)}"), same / asked))
        return tuple(sorted(found, key=lambda pair: -pair[1])[:MOST_NAMES]) if _is_most(found) else ()


def _is_most(found: list[tuple[str, float]]) -> bool:
    """Whether it is so in most weights: a single layer that has converged is none of our business."""
    return sum(share > 0.5 for _, share in found) > len(found) / 2


def groups(engine: Any) -> list[dict[str, Any]]:
    """The parameter groups of the innermost optimizer."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return getattr(inner, "param_groups", None) or []


def _stepped(engine: Any) -> Iterator[Tensor]:
    """The weights that the innermost optimizer writes, if they are halves: with float32 copies it writes those."""
    number = 0
    for group in groups(engine):
        for parameter in group["params"]:
            if isinstance(parameter, Tensor) and parameter.dtype in HALVES and number < MOST_WEIGHTS:
                number += 1
                yield parameter


@torch.no_grad()
def _sampled(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    gradient = parameter.grad
    if gradient is None or gradient.shape != parameter.shape or gradient.is_sparse or not parameter.numel():
        return None
    return _part(parameter).clone(), _part(gradient) != 0


def _part(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]
