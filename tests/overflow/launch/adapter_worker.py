"""Plants an overflow in one parameter's gradient on one rank, and writes down what the adapter says in each step."""

from typing import Any

import engines
import torch
from adapter_cases import PLANTED
from torch import Tensor

from dsdoctor.overflow.hooks.engine import Decision, EngineAdapter, dtype, gradients, zero_stage

STEPS = 3


class Listener:
    """What one rank hears, as JSON takes it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.decisions: list[dict[str, Any]] = []
        self.ended: list[int] = []
        self.losses: list[float] = []
        self.before_step: list[Tensor] = []

    def decide(self, decision: Decision) -> None:
        bad = [name for name, piece in gradients(self.engine) if not bool(torch.isfinite(piece).all())]
        unwritten = engines.same(engines.weights(self.engine), self.before_step)
        self.decisions.append({**vars(decision), "bad": bad, "unwritten": unwritten})


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    engine = engines.build(case)
    methods = _methods(engine)
    heard = Listener(engine)
    adapter = EngineAdapter(
        engine,
        on_decision=heard.decide,
        on_step=lambda: heard.ended.append(len(heard.decisions)),
        on_backward=lambda loss: heard.losses.append(float(loss)),
    )
    for step in range(STEPS):
        heard.before_step = engines.weights(engine)
        handle = _plant(engine, case.get("planted", PLANTED)) if step == 1 and rank == 1 else None
        _step(engine, case, step, rank)
        if handle is not None:
            handle.remove()
    adapter.detach()
    adapter.detach()
    _step(engine, case, STEPS, rank)
    result = {
        "optimizer": type(engine.optimizer).__name__,
        "decisions": heard.decisions,
        "ended": heard.ended,
        "losses": len(heard.losses),
        "restored": _methods(engine) == methods,
        "stage": zero_stage(engine),
        "dtype": str(dtype(engine)),
    }
    engines.close(engine)
    return result


def _step(engine: Any, case: dict[str, Any], step: int, rank: int) -> None:
    numbers = range(case.get("gas", 1))
    if case.get("pipeline"):
        engine.train_batch(iter([engines.batch_of(step, micro, 0, engines.live_dtype(case)) for micro in numbers]))
        return
    for micro in numbers:
        x, labels = engines.batch_of(step, micro, rank, engines.live_dtype(case))
        engine.backward(engines.loss_of(engine, x, labels))
        engine.step()


def _methods(engine: Any) -> list[Any]:
    """What an engine and its optimizers shadow or hook."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found: list[Any] = [sorted(inner._optimizer_step_pre_hooks)]
    for owner in (engine, engine.optimizer, inner):
        mine = {name: id(value) for name, value in vars(owner).items() if callable(value)}
        mine.pop("_exec_instr", None)  # a pipeline's instruction of the moment
        found.append(sorted(mine.items()))
    return found


def _plant(engine: Any, name: str) -> Any:
    def poison(gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        poisoned.view(-1)[7] = float("inf")
        return poisoned

    return dict(engine.module.named_parameters())[name].register_hook(poison)


if __name__ == "__main__":
    engines.main(run)
