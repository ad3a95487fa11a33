"""A DeepSpeed engine: how it is configured and where it is, its gradients in the middle of a step, and calls back from inside of
it.

Reads attributes only, because their names differ between releases of DeepSpeed, and what the engine's optimizer keeps. Judges
nothing, prints nothing, communicates with no other rank.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsdoctor.core.script import hook_method, standing_for


def is_plain(engine: Any) -> bool:
    """Whether the engine steps a torch optimizer as it is: ZeRO-0 in fp32 or under torch autocast."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def keeps_unsharded_gradients(engine: Any) -> bool:
    """BF16_Optimizer: every rank holds all gradients, summed in fp32."""
    return hasattr(engine.optimizer, "fp32_groups_gradients")


def checks_overflow(engine: Any) -> bool:
    """Whether this DeepSpeed looks for non-finite gradients in this configuration at all."""
    optimizer = engine.optimizer
    if is_plain(engine):
        return False
    if hasattr(optimizer, "overflow_checker"):
        return True
    # releases from 0.19.7 on have this function, and check the norm in every dtype
    checks_norm = hasattr(sys.modules.get(type(optimizer).__module__), "is_invalid_grad_norm")
    if keeps_unsharded_gradients(engine):
        return checks_norm
    kind = getattr(optimizer, "dtype", None)
    if kind == torch.float16:
        return True
    if zero_stage(engine) == 3:
        return checks_norm
    asked = bool(getattr(optimizer, "check_grad_overflow", False))
    norm = checks_norm and bool(getattr(optimizer, "compute_grad_norm", True))
    return asked or (norm and kind != torch.bfloat16)


def replicated(engine: Any) -> bool:
    """Whether all ranks of the world hold the same reduced gradients. Experts, pipeline stages, shards differ."""
    whole = zero_stage(engine) == 0 or keeps_unsharded_gradients(engine)
    split = is_pipeline(engine) or getattr(engine, "mpu", None) is not None or getattr(engine, "has_moe_layers", False)
    return whole and not split


def loss_scale(engine: Any) -> float | None:
    """The scale in force: 1.0 without one, ``None`` without an optimizer. Waits for the device under torch's scaler."""
    optimizer = engine.optimizer
    scaler = torch_scaler(engine)
    if scaler is not None:
        return float(scaler.get_scale())
    if optimizer is None or is_plain(engine):
        return None if optimizer is None else 1.0
    for owner, name in ((getattr(optimizer, "loss_scale_config", None), "cur_scale"), (optimizer, "loss_scale")):
        value = getattr(owner, name, None)
        if value is not None:
            return float(value)
    value = getattr(optimizer, "cur_scale", None)
    return 1.0 if value is None else float(value)


def loss_scale_floor(engine: Any) -> float | None:
    """The lowest scale that the dynamic scaler goes down to; ``None`` without one or where it has no bound."""
    if not is_dynamic(engine):
        return None
    optimizer = engine.optimizer
    for owner in (getattr(optimizer, "loss_scale_config", None), getattr(optimizer, "loss_scaler", None), optimizer):
        for name in ("min_loss_scale", "min_scale"):
            value = getattr(owner, name, None)
            if value is not None:
                return float(value)
    return None


def is_dynamic(engine: Any) -> bool:
    """Whether the loss scale moves by itself."""
    optimizer = engine.optimizer
    if torch_scaler(engine) is not None:
        return True
    for owner in (getattr(optimizer, "loss_scale_config", None), optimizer):
        value = getattr(owner, "dynamic_loss_scale", None)
        if value is not None:
            return bool(value)
    return bool(getattr(getattr(optimizer, "loss_scaler", None), "dynamic", False))


def torch_scaler(engine: Any) -> Any:
    """The GradScaler that scales the loss under torch autocast; None without one."""
    mine = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return mine if mine is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def gradient_accumulation(engine: Any) -> int:
    """Micro-batches in an optimizer step."""
    return int(engine.gradient_accumulation_steps())


def position(engine: Any) -> tuple[int, int]:
    """0-based optimizer step and the micro-step in it, of the micro-batch that runs now."""
    if is_pipeline(engine):
        return int(engine.global_steps), -1
    return int(engine.global_steps), int(engine.micro_steps) % max(1, gradient_accumulation(engine))


def zero_stage(engine: Any) -> int:
    """0 to 3, as configured."""
    return int(engine.zero_optimization_stage())


def dtype(engine: Any) -> torch.dtype:
    """What the engine made of the parameters: fp32, bf16 or fp16."""
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def is_compiled(engine: Any) -> bool:
    """Whether torch.compile was asked for: hooks that come later do not run inside its graphs."""
    return getattr(engine.module, "_compiled_call_impl", None) is not None


def is_pipeline(engine: Any) -> bool:
    """Whether this is a PipelineEngine: its ranks hold different layers, its forward is ``train_batch``."""
    return bool(getattr(engine, "is_pipe_parallel", False)) or hasattr(engine, "pipe_buffers")


def pipeline_stage(engine: Any) -> tuple[int, int]:
    """This rank's stage and the number of stages; (0, 1) without a pipeline."""
    with contextlib.suppress(AttributeError):
        return int(engine.stage_id), int(engine.num_stages)
    return 0, 1


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


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What DeepSpeed made of one optimizer step's gradients, before they are cleared and before weights are written.

    ``overflow`` is the same on every rank that shares the optimizer step; ``None`` when DeepSpeed does not look at the
    gradients in this configuration. Then ``replicated`` says whether every rank holds the same reduced gradients, so
    that what one rank finds holds for all, or whether ranks hold different pieces and have to agree.
    ``loss_scale`` is the factor in these gradients: 1.0 without scaling; ``None`` under torch's GradScaler unless there is
    an overflow, since reading it waits for the device (the function ``loss_scale`` reads it). ``floor`` is the lowest
    scale the dynamic scaler may reach. ``late`` is True when the step ended without a verdict (its optimizer is unknown):
    the gradients may be gone by then.
    """

    overflow: bool | None
    replicated: bool
    loss_scale: float | None
    floor: float | None
    dynamic: bool
    step: int
    late: bool = False


class EngineAdapter:
    """Calls back from inside one engine, once attached, as long as somebody holds this; ``detach`` leaves the engine as it was.

    ``on_decision`` is called exactly once in every optimizer step of every rank, in the middle of the step.
    ``on_step`` is called when the optimizer step has ended, also by an exception.
    ``on_backward`` gets the loss of each ``engine.backward(loss)``, before it is scaled; a pipeline's last stage and a
    script that calls ``loss.backward()`` itself do not call that.
    ``on_load`` gets the folder from which ``engine.load_checkpoint`` loaded nothing.
    ``on_destroy`` is called after ``engine.destroy()``.
    """

    def __init__(
        self,
        engine: Any,
        *,
        on_decision: Callable[[Decision], None],
        on_step: Callable[[], None] | None = None,
        on_backward: Callable[[Tensor], None] | None = None,
        on_load: Callable[[str], None] | None = None,
        on_destroy: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self._on_decision = on_decision
        self._on_step = on_step
        self._on_backward = on_backward
        self._on_load = on_load
        self._on_destroy = on_destroy
        self._armed = False
        self._ask()
        self._undo: list[Callable[[], None]] = []
        self._attach()

    def detach(self) -> None:
        """Give the engine its own methods back. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _ask(self) -> None:
        """What only a load of a checkpoint changes: not to be asked in every step, since an engine looks for what it does not have
        in its model too."""
        engine = self.engine
        self._checks_overflow = checks_overflow(engine)
        self._replicated = replicated(engine)
        self._floor = loss_scale_floor(engine)
        self._dynamic = is_dynamic(engine)
        self._scaler = torch_scaler(engine)
        self._scale = None if self._dynamic else loss_scale(engine)
        self._at_once = is_plain(engine) or (keeps_unsharded_gradients(engine) and not self._checks_overflow)

    def _attach(self) -> None:
        optimizer = self.engine.optimizer
        self._wrap(self.engine, "_take_model_step", self._around_step)
        self._wrap(self.engine, "load_checkpoint", self._around_load)
        self._wrap(self.engine, "destroy", self._around_destroy)
        if self._on_backward is not None:
            self._wrap(self.engine, "backward", self._around_backward)
        if is_plain(self.engine):
            return
        self._wrap(optimizer, "_update_scale", self._around_update_scale)
        self._wrap(optimizer, "_skip_invalid_grad_norm", self._around_skip)
        self._wrap(optimizer, "clear_hp_grads", self._around_clear)
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            # BF16_Optimizer and the fused FP16_Optimizer on bf16 report nothing while gradients are finite: their own optimizer's
            # step is the last moment before weights are written
            handle = inner.register_step_pre_hook(lambda *_: self._decide(False))
            self._undo.append(handle.remove)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Hook a method of the class for this instance alone, and shadow one that is the instance's own: a wrapper that someone put
        over ours later keeps working after the undo."""
        original = getattr(owner, name, None)
        if original is None:
            return
        if (unhook := hook_method(owner, name, around)) is not None:
            self._undo.append(unhook)
            return
        before = vars(owner).get(name)
        attached = True

        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if attached else original(*args, **kwargs)

        wrapper = standing_for(original, call)

        def undo() -> None:
            nonlocal attached
            attached = False
            if vars(owner).get(name) is not wrapper:
                return
            if before is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before

        vars(owner)[name] = wrapper
        self._undo.append(undo)

    def _decide(self, overflow: bool | None, *, late: bool = False) -> None:
        if not self._armed:
            return
        self._armed = False
        # a scale that lies on the device is read only when it matters: reading waits for the device
        waits = self._scaler is not None and not overflow
        self._on_decision(
            Decision(
                overflow=overflow if self._checks_overflow else None,
                replicated=self._replicated,
                loss_scale=None if waits else self._scale or loss_scale(self.engine),
                floor=self._floor,
                dynamic=self._dynamic,
                step=int(self.engine.global_steps),
                late=late,
            )
        )

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._armed = True
        try:
            if self._at_once:
                # before clipping, which turns one inf into nan everywhere, and before old releases assert a finite norm
                self._decide(None)
            result = original(*args, **kwargs)
            self._decide(getattr(self.engine.optimizer, "overflow", None), late=True)
            return result
        finally:
            self._armed = False
            if self._on_step is not None:
                self._on_step()

    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = args[0] if args else kwargs.get("loss")
        if self._on_backward is not None and isinstance(loss, Tensor):
            self._on_backward(loss)
        return original(*args, **kwargs)

    def _around_destroy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if self._on_destroy is not None:
                self._on_destroy()

    def _around_load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        self._ask()
        if self._on_load is not None and isinstance(loaded, tuple) and loaded and loaded[0] is None:
            self._on_load(str(args[0] if args else kwargs.get("load_dir", "")))
        return loaded

    def _around_update_scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        self._decide(bool(given[0]) if given else False)
        return original(*args, **kwargs)

    def _around_skip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._decide(True)
        return original(*args, **kwargs)

    def _around_clear(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # BF16_Optimizer has raised its flag when it clears the gradients of a step that it skips
        if getattr(self.engine.optimizer, "overflow", False):
            self._decide(True)
        return original(*args, **kwargs)
