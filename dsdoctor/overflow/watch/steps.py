"""The losses of the step that runs, and how many steps overflowed. Changes nothing that it is given."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_ALWAYS_REPLAYED = 3
"""So many overflows are always replayed, in a row or, with a dynamic loss scale, in all; after them only those whose number is
a power of two: a dynamic scale goes too high every thousand steps or so, and that is normal."""
MAX_LOSSES = 1024


class StepLosses:
    """The losses of a step: those that ``engine.backward`` was given, else those in the outputs of its forwards."""

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self._in_outputs: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """A loss that ``engine.backward`` was given."""
        self._given.append(loss.detach())
        del self._given[:-MAX_LOSSES]

    def add_output(self, output: Any) -> None:
        """The output of a forward, which may hold a loss."""
        loss = loss_in(output)
        if loss is not None:
            self._in_outputs.append(loss.detach())
            del self._in_outputs[:-MAX_LOSSES]

    def known(self) -> list[Tensor]:
        """The losses, one per micro-batch."""
        return self._given or self._in_outputs

    def any_bad(self) -> bool:
        """Whether a loss is not finite. Waits for the device, so only after DeepSpeed has waited for it itself."""
        return any(map(_is_bad, self.known()))

    def any_bad_output(self) -> bool:
        """Whether a loss that the model gave is not finite, whatever the script made of it. Waits for the device."""
        return any(map(_is_bad, self._in_outputs))

    def clear(self) -> None:
        """The step is over."""
        self._given, self._in_outputs = [], []


def _is_bad(loss: Tensor) -> bool:
    # one number is read, and judged here: cheaper than an operation whose result is read
    return not (math.isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all()))


def loss_in(output: Any) -> Tensor | None:
    """The loss in a model's output: a scalar, what is called so, or the first of a tuple if that is a scalar."""
    if isinstance(output, dict | Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple) and output:
        output = output[0]
    else:
        output = getattr(output, "loss", output)
    return output if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point() else None


class OverflowCount:
    """How many steps overflowed, in a row and in all, and how many in a row were skipped."""

    def __init__(self) -> None:
        self._in_a_row = self._in_all = self.skipped = 0

    def add(self, *, skipped: bool) -> None:
        """A step overflowed. ``skipped``: it is not applied."""
        self._in_a_row += 1
        self._in_all += 1
        self.skipped += skipped

    def clean_step(self) -> None:
        """A step did not overflow."""
        self._in_a_row = self.skipped = 0

    def is_replayed(self, *, dynamic: bool) -> bool:
        """Whether the overflow that was added last is replayed. ``dynamic``: the loss scale is.

        >>> count, replays = OverflowCount(), []
        >>> for _ in range(9):
        ...     count.add(skipped=True)
        ...     replays.append(count.is_replayed(dynamic=False))
        >>> [number for number, replay in enumerate(replays, start=1) if replay]
        [1, 2, 3, 4, 8]
        """
        often = self._in_all if dynamic else self._in_a_row
        return (
            often <= MAX_ALWAYS_REPLAYED
            or is_power_of_two(often)
            or (self._in_a_row > 1 and is_power_of_two(self._in_a_row))
        )


def is_power_of_two(number: int) -> bool:
    """1, 2, 4, 8 and so on."""
    return number & (number - 1) == 0
