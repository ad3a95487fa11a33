"""What the optimizer does to the weights: updates that change nothing, its learning rates, a weight that its step made 0 / 0.

Reads samples in a few steps, and the whole of the weights only where one became bad. Changes nothing.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
MAX_WEIGHTS = 64
"""Weights of which a sample is kept over a step."""
MAX_SAMPLE_ELEMENTS = 4096
MAX_NAMES = 4
MAX_RATES = 64
"""Steps whose learning rate is kept."""
MIN_RATE_JUMP = 5.0
"""A learning rate that becomes so many times larger from one step to the next is worth a word."""
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""What Adam and its kin, RMSprop and Adagrad divide by the root of, with eps added."""
CHUNK_ELEMENTS = 1 << 24
"""Elements that are looked at together: a partition may have billions."""


class WeightUpdates:
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
            after = _sample_of(parameter)
            moving = int(moves.sum())
            if moving:
                same = int(((after == before) & moves).sum())
                found.append((self._names.get(id(parameter), f"a weight {tuple(parameter.shape)}"), same / moving))
        return tuple(sorted(found, key=lambda pair: -pair[1])[:MAX_NAMES]) if _is_majority(found) else ()


def _is_majority(found: list[tuple[str, float]]) -> bool:
    """Whether it is so in most weights: a single layer that has converged is none of our business."""
    return sum(share > 0.5 for _, share in found) > len(found) / 2


def _stepped(engine: Any) -> Iterator[Tensor]:
    """The weights that the innermost optimizer writes, if they are halves: with float32 copies it writes those."""
    number = 0
    for group in groups(engine):
        for parameter in group["params"]:
            if isinstance(parameter, Tensor) and parameter.dtype in HALVES and number < MAX_WEIGHTS:
                number += 1
                yield parameter


@torch.no_grad()
def _sampled(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    gradient = parameter.grad
    if gradient is None or gradient.shape != parameter.shape or gradient.is_sparse or not parameter.numel():
        return None
    return _sample_of(parameter).clone(), _sample_of(gradient) != 0


def _sample_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // MAX_SAMPLE_ELEMENTS)]


class LearningRates:
    """The learning rates of the last steps."""

    def __init__(self) -> None:
        self._known: deque[tuple[int, float]] = deque(maxlen=MAX_RATES)

    def note(self, engine: Any, step: int) -> None:
        """The largest of the groups' rates; one that lies on a device is left out, since reading it waits."""
        found = [rate for group in groups(engine) if isinstance(rate := group.get("lr"), int | float)]
        if found:
            self._known.append((step, float(max(found, key=lambda rate: rate if math.isfinite(rate) else math.inf))))

    def jumps(self) -> tuple[tuple[int, float, float], ...]:
        """The steps in which the rate became many times larger, or no number, with what it was before and since."""
        pairs = zip(self._known, list(self._known)[1:], strict=False)
        return tuple((step, before, since) for (_, before), (step, since) in pairs if _is_jump(before, since))


def _is_jump(before: float, since: float) -> bool:
    return math.isfinite(before) and (not math.isfinite(since) or 0 < before * MIN_RATE_JUMP < since)


def is_frozen(engine: Any, name: str) -> bool:
    """Whether a weight of the model has no gradient, so that no optimizer writes it."""
    weight = dict(engine.module.named_parameters()).get(name)
    return weight is not None and not weight.requires_grad


@torch.no_grad()
def zero_over_zero(engine: Any) -> int:
    """How many elements of the weights that the optimizer writes on this rank are bad, if its eps is 0 there and every one of
    them has a second moment of 0: its step made 0 / 0 of it. Else 0."""
    found = 0
    for weight, moment in _stepped_with_moments(engine):
        for part, squares in zip(weight.split(CHUNK_ELEMENTS), moment.split(CHUNK_ELEMENTS), strict=True):
            bad = ~torch.isfinite(part)
            number = int(bad.sum())
            if number != int((bad & (squares == 0)).sum()):
                return 0
            found += number
    return found


def _stepped_with_moments(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
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


def groups(engine: Any) -> list[dict[str, Any]]:
    """The parameter groups of the innermost optimizer."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return getattr(inner, "param_groups", None) or []
