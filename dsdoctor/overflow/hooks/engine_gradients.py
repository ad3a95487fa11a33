"""A DeepSpeed engine, in the middle of its step -> each parameter's gradient, as far as this rank holds it.

Reads what the engine's optimizer keeps; computes nothing and communicates with no other rank.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def gradients(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and this rank's piece of its gradient, as it is inside ``on_decision``.

    The pieces are reduced over data-parallel ranks, carry the loss scale, are detached and of any shape: whole and the
    same everywhere under ZeRO-0 and BF16_Optimizer, this rank's partition (often one-dimensional, padded with zeros)
    under ZeRO-1 to 3. No communication. Gradients swapped out to NVMe are not seen.
    """
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for parameter, gradient in _pieces(engine, optimizer):
        if isinstance(gradient, Tensor):
            dense = gradient._values() if gradient.is_sparse else gradient
            yield names.get(id(parameter), f"parameter {tuple(parameter.shape)}"), dense.detach()


def pieces(engine: Any) -> Iterator[Tensor]:
    """The gradients of ``gradients``, without their names: for a quick look at all of them."""
    for _, gradient in _pieces(engine, engine.optimizer):
        if isinstance(gradient, Tensor):
            yield gradient


def _pieces(engine: Any, optimizer: Any) -> Iterator[tuple[Any, Any]]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _pieces_of_stage_3(optimizer)
    if hasattr(optimizer, "averaged_gradients"):
        return _pieces_of_stages_1_and_2(optimizer)
    if hasattr(optimizer, "fp32_groups_gradients"):
        return _pairs(optimizer.bf16_groups, optimizer.fp32_groups_gradients)
    if hasattr(optimizer, "fp32_groups_flat"):
        return _pieces_of_fused(optimizer)
    return ((parameter, parameter.grad) for parameter in engine.module.parameters())


def _pairs(groups: Any, gradients: Any) -> Iterator[tuple[Any, Any]]:
    for parameters, pieces in zip(groups, gradients, strict=False):
        yield from zip(parameters, pieces, strict=False)


def _pieces_of_stage_3(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    for index, parameters in enumerate(optimizer.fp16_groups):
        if not getattr(optimizer, "offload_optimizer", False):
            yield from zip(parameters, optimizer.averaged_gradients.get(index) or (), strict=False)
            continue
        flat = optimizer.fp32_partitioned_groups_flat[index]
        for parameter in parameters:
            _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            if flat is not None and flat.grad is not None and flat.grad.numel() >= offset + numel:
                yield parameter, flat.grad.narrow(0, offset, numel)


def _pieces_of_stages_1_and_2(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    for index, parameters in enumerate(optimizer.params_in_partition):
        if not getattr(optimizer, "cpu_offload", False):
            pieces = optimizer.averaged_gradients.get(index) or ()
            real = (piece for piece in pieces if not getattr(piece, "_zero_padding", False))
            yield from zip(parameters, real, strict=False)
            continue
        flat = optimizer.single_partition_of_fp32_groups[index].grad
        for parameter in parameters if flat is not None else ():
            # a parameter that took no part in this step has no place yet
            place = optimizer.grad_position.get(optimizer.get_param_id(parameter))
            if place is not None:
                yield parameter, flat.view(-1).narrow(0, int(place[2]), int(place[3]))


def _pieces_of_fused(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=False):
        offset = 0
        for parameter in parameters:
            # the second check, of the norm, comes after the gradients moved into the flat buffer
            moved = None if flat.grad is None else flat.grad.narrow(0, offset, parameter.numel())
            yield parameter, moved if parameter.grad is None else parameter.grad
            offset += parameter.numel()
