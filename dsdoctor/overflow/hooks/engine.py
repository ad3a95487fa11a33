"""Calls back from inside a DeepSpeed engine: when it has decided on a step's gradients, when a step ends, at a backward.

Judges nothing, prints nothing, communicates with no other rank.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.hooks import engine_facts


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
    """Calls back from inside one engine, once attached; ``detach`` leaves the engine as it was.

    ``on_decision`` is called exactly once in every optimizer step of every rank, in the middle of the step.
    ``on_step`` is called when the optimizer step has ended, also by an exception.
    ``on_backward`` gets the loss of each ``engine.backward(loss)``, before it is scaled; a pipeline's last stage and a
    script that calls ``loss.backward()`` itself do not call that.
    ``on_load`` gets the folder from which ``engine.load_checkpoint`` loaded nothing.
    """

    def __init__(
        self,
        engine: Any,
        *,
        on_decision: Callable[[Decision], None],
        on_step: Callable[[], None] | None = None,
        on_backward: Callable[[Tensor], None] | None = None,
        on_load: Callable[[str], None] | None = None,
    ) -> None:
        self.engine = engine
        self._on_decision = on_decision
        self._on_step = on_step
        self._on_backward = on_backward
        self._on_load = on_load
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
        self._looks = engine_facts.looks(engine)
        self._replicated = engine_facts.replicated(engine)
        self._floor = engine_facts.loss_scale_floor(engine)
        self._dynamic = engine_facts.is_dynamic(engine)
        self._scaler = engine_facts.torch_scaler(engine)
        self._scale = None if self._dynamic else engine_facts.loss_scale(engine)
        self._at_once = engine_facts.is_plain(engine) or (engine_facts.keeps_whole_sums(engine) and not self._looks)

    def _attach(self) -> None:
        optimizer = self.engine.optimizer
        self._wrap(self.engine, "_take_model_step", self._around_step)
        self._wrap(self.engine, "load_checkpoint", self._around_load)
        if self._on_backward is not None:
            self._wrap(self.engine, "backward", self._around_backward)
        if engine_facts.is_plain(self.engine):
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
        """Shadow a method on the instance; a wrapper that someone put over ours later keeps working after the undo."""
        original = getattr(owner, name, None)
        if original is None:
            return
        before = vars(owner).get(name)
        attached = True

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if attached else original(*args, **kwargs)

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
                overflow=overflow if self._looks else None,
                replicated=self._replicated,
                loss_scale=None if waits else self._scale or engine_facts.loss_scale(self.engine),
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
