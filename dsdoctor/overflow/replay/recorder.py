"""Keeps what it takes to run a step's micro-batches again: references, generator states, outputs' gradients.

No copy of a tensor, no kernel, no wait for a device; some thirty calls of Python per micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.hooks.engine_facts import is_pipeline
from dsdoctor.overflow.hooks.module_hooks import Hook
from dsdoctor.overflow.measure.tensor_paths import leaves
from dsdoctor.overflow.replay.rerun import gathers_so_far, gathers_weights
from dsdoctor.overflow.replay.restore import Randomness, device_random

INPUT_LIMIT = 1 << 30
"""Bytes of inputs that a step may keep alive. Token batches are kilobytes; a pipeline stage's inputs are activations."""

GRADIENT_LIMIT = 64 << 20
"""Bytes of outputs' gradients that a step may keep alive. A loss' gradient has 4; that of logits may have gigabytes."""


WAITING_LIMIT = 64
"""Forwards kept that no backward has followed yet: a validation loop without ``no_grad`` must not fill the memory."""


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One live forward of the engine's module under grad mode. ``args`` and ``kwargs`` are the caller's own objects;
    ``None`` when they exceeded the limit. ``gradients`` and ``dropped`` are keyed by the output tensor's
    number; ``starts``: those of them with which the backward begins, known from the first replay on."""

    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    random: Randomness
    training: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caching: bool
    micro_offset: int | None
    gathers: int | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    starts: tuple[int, ...] | None = None


class BatchRecorder:
    """Keeps the micro-batches since the last ``forget``, from hooks on the engine and its module."""

    def __init__(self, engine: Any, *, input_limit: int = INPUT_LIMIT, gradient_limit: int = GRADIENT_LIMIT) -> None:
        self.engine = engine
        self.batches: list[MicroBatch] = []
        self.outputs: list[Tensor] | None = None
        self._waiting: dict[int, MicroBatch] = {}
        self.replaying = False
        self._input_limit, self._gradient_limit = input_limit, gradient_limit
        self._input_bytes = self._gradient_bytes = 0
        self._pipeline = is_pipeline(engine)
        self._gathers = gathers_weights(engine)
        self._device = device_random(engine.device)
        self._devices = tuple(dict.fromkeys(("cpu", engine.device.type)))
        self._module = module = engine.module
        self._handles = [
            module.register_forward_pre_hook(Hook(self._before_module), prepend=True, with_kwargs=True),
            module.register_forward_hook(Hook(self._after_module)),
            engine.register_forward_pre_hook(Hook(self._before_engine), prepend=True, with_kwargs=True),
            engine.register_forward_hook(Hook(self._after_engine)),
        ]

    def forget(self) -> None:
        """Drop everything that is kept. To be called at every step boundary."""
        self.batches = []
        self._waiting = {}
        self._input_bytes = self._gradient_bytes = 0

    def detach(self) -> None:
        """Take the hooks away and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()

    def _before_module(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # under torch.compile the engine's hooks stand in: these would be traced
        if not torch.compiler.is_compiling() and self._module._compiled_call_impl is None:
            self._before(args, kwargs)

    def _after_module(self, _: Any, __: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and (self.replaying or self._module._compiled_call_impl is None):
            self._after(output)

    def _before_engine(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._module._compiled_call_impl is not None:
            self._before(args, kwargs)

    def _after_engine(self, _: Any, __: Any, output: Any) -> None:
        if self._module._compiled_call_impl is not None:
            self._after(output)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.replaying or not torch.is_grad_enabled():
            return
        inputs = leaves((args, kwargs))
        size = sum([tensor.nbytes for tensor in inputs])
        fits = self._input_bytes + size <= self._input_limit
        self._input_bytes += size if fits else 0
        module = self._module
        batch = MicroBatch(
            args=args if fits else None,
            kwargs=kwargs if fits else {},
            versions=versions(inputs),
            random=Randomness(self._device),
            training=module.training,
            autocast=tuple(
                [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._devices]
            ),
            caching=torch.is_autocast_cache_enabled(),
            micro_offset=module.__dict__.get("micro_offset"),
        )
        self.batches.append(batch)
        self._waiting[id(batch)] = batch
        if len(self._waiting) > WAITING_LIMIT:
            self._give_up(next(iter(self._waiting.values())))

    def _give_up(self, batch: MicroBatch) -> None:
        del self._waiting[id(batch)]
        self.batches.remove(batch)
        self._input_bytes -= sum(tensor.nbytes for tensor in leaves((batch.args, batch.kwargs)))

    def _after(self, output: Any) -> None:
        if self.replaying:
            self.outputs = leaves(output)
            return
        if not torch.is_grad_enabled() or not self.batches:
            return
        if self._gathers:
            self.batches[-1].gathers = gathers_so_far(self.engine)
        for number, tensor in enumerate(leaves(output)):
            node = tensor.grad_fn
            if node is not None:
                # on the node, not on the tensor: after whatever hooks DeepSpeed puts on the tensor to scale gradients
                node.register_prehook(self._keeper(self.batches[-1], number, tensor.output_nr))

    def _keeper(self, batch: MicroBatch, number: int, position: int) -> Callable[[tuple[Any, ...]], None]:
        def keep(arrived: tuple[Any, ...]) -> None:
            gradient = arrived[position]
            if self.replaying or gradient is None or number in batch.gradients:
                return
            self._waiting.pop(id(batch), None)
            self._gradient_bytes += gradient.nbytes
            if self._gradient_bytes > self._gradient_limit:
                self._gradient_bytes -= gradient.nbytes
                batch.dropped[number] = gradient.nbytes
            else:
                # a pipeline receives every micro-batch's gradient into the same buffer
                batch.gradients[number] = gradient.clone() if self._pipeline else gradient

        return keep


def versions(inputs: list[Tensor]) -> tuple[int, ...]:
    """How often each tensor was written in place so far."""
    # as ``version_of``, of which each call is paid in every step
    return tuple([-1 if tensor.is_inference() else tensor._version for tensor in inputs])
