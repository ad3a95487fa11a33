"""What a forward outside of ``engine.forward`` needs: no compiler, checkpointing that autograd.grad supports, and ZeRO-3's
weights gathered by all ranks together, even when one of them fails on the way.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

COORDINATOR = "_PartitionedParameterCoordinator__"


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules uncompiled: hooks added since would not run otherwise."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with stance("force_eager"):
        yield


class _Plain:
    """Replaces an autograd function that checkpoints by a backward within the backward, which autograd.grad refuses.

    torch's non-reentrant checkpointing computes the same and saves the same memory.
    """

    used = False

    def __init__(self, adapt: Callable[..., Any]) -> None:
        self.apply = adapt


@contextlib.contextmanager
def plain_checkpointing() -> Iterator[None]:
    """Reentrant activation checkpointing, torch's and DeepSpeed's, is of the non-reentrant kind inside."""
    names: dict[str, Callable[..., Any]] = {
        "torch.utils.checkpoint": _like_torch,
        "deepspeed.runtime.activation_checkpointing.checkpointing": _like_deepspeed,
    }
    with contextlib.ExitStack() as stack:
        for name, adapt in names.items():
            home: Any = sys.modules.get(name)
            original = getattr(home, "CheckpointFunction", None)
            if original is not None:
                home.CheckpointFunction = _Plain(adapt)
                stack.callback(setattr, home, "CheckpointFunction", original)
        _Plain.used = False
        yield


def _like_torch(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        # as the reentrant kind: no gradient in, no gradient out
        with torch.no_grad():
            return function(*args)
    _Plain.used = True
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _like_deepspeed(function: Callable[..., Any], outputs: list[Any], *args: Any) -> Any:
    result = _like_torch(function, True, *args)
    outputs.extend([result] if isinstance(result, Tensor) else result)
    return result


@contextlib.contextmanager
def external_parameters(engine: Any) -> Iterator[None]:
    """ZeRO-3 before 0.17 marks its modules in ``engine.forward``; later ones do it in a hook of the module."""
    dictionaries: list[Any] = []
    if int(engine.zero_optimization_stage()) == 3 and not hasattr(engine, "module_forward_pre_hook"):
        mine = (module._parameters for module in engine.module.modules())
        dictionaries = [each for each in mine if hasattr(each, "_in_forward")]
    for each in dictionaries:
        each._in_forward = True
    try:
        yield
    finally:
        for each in dictionaries:
            each._in_forward = False


def settle(engine: Any) -> None:
    """ZeRO-3, after each micro-batch: release weights whose last hook never ran. Elsewhere nothing."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    release = getattr(offload, "release_backward_leftovers", None)
    if release is not None:
        release()


def gathers_weights(engine: Any) -> bool:
    """ZeRO-3: modules' hooks gather weights from all ranks, in the order of the modules."""
    return hasattr(engine.optimizer, "parameter_offload")


def gathers_so_far(engine: Any) -> int | None:
    """ZeRO-3: how many modules' weights were requested since this forward began. Elsewhere ``None``."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    return None if offload is None else getattr(offload.get_param_coordinator(), COORDINATOR + "step_id", None)


def finish_gathering(engine: Any, gathers: int | None) -> bool:
    """When a forward (of ``gathers`` modules) or a backward (``None``) failed on this rank: join the gathers that the
    other ranks still do, by the trace that DeepSpeed has of a healthy step. False when they cannot be known.
    """
    if not gathers_weights(engine):
        return True
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_complete_trace() or (gathers is None and _Plain.used):
        # checkpoints of the other kind do not follow the trace in a backward
        return False
    order = getattr(coordinator, COORDINATOR + "submodule_order")
    end = len(order) if gathers is None else gathers
    while coordinator.is_complete_trace() and (at := gathers_so_far(engine)) is not None and at < end:
        coordinator.fetch_sub_module(order[at], forward=gathers is not None)
        coordinator.release_sub_module(order[at], forward=gathers is not None)
    return True
