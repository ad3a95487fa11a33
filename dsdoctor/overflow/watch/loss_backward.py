"""The backward of what a script computes between the model and its loss -> the operation that makes a finite gradient nan or inf.

A value that a mask keeps out of the loss is finite there, and its gradient is not: `torch.where(p > 0, torch.log(p), 0)` gives
0 times inf. Each operation gets a hook that reads its gradients, which waits for the device: so this is on only after a step whose
loss was finite and whose backward came to the model with a bad gradient.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.frames.first_bad import Cure, Origin
from dsdoctor.overflow.measure.readings import leaves
from dsdoctor.overflow.replay.operations import made_at
from dsdoctor.overflow.watch.graph_nodes import kind_of, snake

MAX_OPERATIONS, MAX_OUTPUTS = 256, 16


class LossBackward:
    """The hooks on one loss after the other. ``made``: the first operation whose backward made a bad gradient of finite ones."""

    def __init__(self) -> None:
        self.made: Origin | None = None
        self._outputs: dict[Any, None] = {}
        self._handles: list[Any] = []

    def forward_ends(self, output: Any) -> None:
        """The model's output, where what the script computes begins."""
        self._outputs |= {tensor.grad_fn: None for tensor in leaves(output) if tensor.grad_fn is not None}
        # a script that evaluates without no_grad makes graphs that no backward ends: only the last are kept
        for old in list(self._outputs)[:-MAX_OUTPUTS]:
            del self._outputs[old]

    def begin(self, loss: Tensor) -> None:
        """The loss is known, and its backward is about to begin."""
        for node in self._between(loss.grad_fn):
            self._handles.append(node.register_hook(self._reader(node)))

    def forget(self) -> None:
        """The step is over."""
        for handle in self._handles:
            handle.remove()
        self.made, self._outputs, self._handles = None, {}, []

    def _between(self, last: Any) -> Iterable[Any]:
        """The operations behind the model's outputs; none where those are not known."""
        waiting = [last] if self._outputs and last is not None else []
        found: dict[Any, None] = {}
        while waiting and len(found) < MAX_OPERATIONS:
            node = waiting.pop()
            if node in found or node in self._outputs or type(node).__name__ == "AccumulateGrad":
                continue
            found[node] = None
            waiting += [before for before, _ in node.next_functions if before is not None]
        return found

    def _reader(self, node: Any) -> Any:
        def read(below: tuple[Tensor | None, ...], above: tuple[Tensor | None, ...]) -> None:
            if self.made is None:
                # a sparse, nested or float8 gradient cannot be asked whether it is finite, and no backward may fail of that
                with contextlib.suppress(Exception), torch.no_grad():
                    self.made = made_by(node, below, above)

        return read


def made_by(node: Any, below: tuple[Tensor | None, ...], above: tuple[Tensor | None, ...]) -> Origin | None:
    """An operation whose backward was given finite gradients and gave a bad one; None where it is not that."""
    bad = next((each for each in below if each is not None and not _is_finite(each)), None)
    if bad is None or not all(_is_finite(each) for each in above if each is not None):
        return None
    name = snake(kind_of(node)) or type(node).__name__.removesuffix("Backward")
    how, cure = f"the derivative of {name} is not finite there", Cure("derivative", name)
    given = next((each for each in above if each is not None and each.shape == bad.shape), None)
    if given is not None and not bool(given[~torch.isfinite(bad)].any()):
        how = f"a gradient of 0, of what was masked behind it, times a derivative of {name} that is not finite"
        cure = Cure("mask-before", name)
    elif given is None and not any(bool(each.any()) for each in above if each is not None):
        how = "it was given gradients of 0 alone, and its derivative is not finite"
    line = made_at(node.metadata.get("traceback_") or [])
    return Origin(op=f"the backward of {name}", line=line or "", how=how, cure=cure)


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())
