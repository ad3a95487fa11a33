"""Trains twice from the same seed, with a replay in every step and without one, and compares both bit for bit."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import engines
import torch
from adapter_cases import PLANTED
from torch import Tensor

from dsdoctor.overflow.hooks.engine import EngineAdapter
from dsdoctor.overflow.replay.replay import BatchRecorder, Replayed, replay

STEPS, BAD_STEP = 10, 4


class Watch:
    """Replays every micro-batch of every step; keeps losses and local gradients of the live and the second run."""

    def __init__(self, engine: Any, case: dict[str, Any]) -> None:
        self.engine, self.case = engine, case
        self.recorder = BatchRecorder(engine, **case.get("limits", {}))
        self.adapter = EngineAdapter(engine, on_decision=lambda _: self.replay(), on_step=self.recorder.forget)
        self.live: dict[str, list[Tensor]] = {}
        self.again: dict[str, list[Tensor]] = {}
        self.seen = self.live
        self.results: list[Replayed] = []
        self.different: list[str] = []
        self.compared = 0
        self.seconds = 0.0
        self.handles = [
            parameter.register_hook(lambda gradient, name=name: self._look(name, gradient))
            for name, parameter in engine.module.named_parameters()
        ]
        self.handles += [each.register_forward_hook(self._look_at_output) for each in (engine.module,)]

    def _look(self, name: str, gradient: Tensor) -> None:
        self.seen.setdefault(name, []).append(gradient.detach().clone())

    def _look_at_output(self, _: Any, __: Any, output: Any) -> None:
        self._look("output", output["loss"] if isinstance(output, dict) else output)

    def replay(self) -> None:
        started = time.perf_counter()
        self.seen = self.again
        self.results += replay(self.recorder, around=self._around, backward=self.case.get("backward", True))
        self.seen = self.live
        self.seconds += time.perf_counter() - started
        for name in self.again:
            self.compared += len(self.again[name])
            if not engines.same(self.again[name], self.live.get(name, [])):
                self.different.append(name)
        self.live.clear()
        self.again.clear()

    @contextlib.contextmanager
    def _around(self, number: int) -> Iterator[None]:
        if self.case.get("fails") == torch.distributed.get_rank():
            handle = self.engine.module.blocks[1].register_forward_hook(_fail)
            try:
                yield
            finally:
                handle.remove()
            return
        yield

    def detach(self) -> None:
        self.adapter.detach()
        self.recorder.detach()
        for handle in self.handles:
            handle.remove()


def _fail(*_: Any) -> None:
    raise RuntimeError("planted")


def train(case: dict[str, Any], rank: int, *, watched: bool) -> tuple[list[list[Tensor]], Watch | None]:
    engine = engines.build(case)
    if case.get("compile"):
        engine.compile(backend="eager")
    watch = Watch(engine, case) if watched else None
    states = []
    engines.seed(rank)
    for step in range(case.get("steps", STEPS)):
        handle = _poison(engine) if step == BAD_STEP and rank == 1 and case.get("poison") else None
        if case.get("pipeline"):
            batches = [
                engines.batch_of(step, micro, 0, engines.live_dtype(case)) for micro in range(case.get("gas", 1))
            ]
            engine.train_batch(iter(batches))
        for micro in range(0 if case.get("pipeline") else case.get("gas", 1)):
            x, labels = engines.batch_of(step, micro, rank, engines.live_dtype(case))
            loss = engines.loss_of(engine, x, labels)
            if case.get("validates"):
                engine.module(x, labels=labels)
            if case.get("torch_style"):
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            if case.get("writes_inputs"):
                x.add_(1)
            engine.step()
        if handle is not None:
            handle.remove()
        states.append([*engines.states(engine), torch.get_rng_state(), torch.rand(2)])
    if watch is not None:
        watch.detach()
    engines.close(engine)
    return states, watch


def _poison(engine: Any) -> Any:
    parameters = dict(engine.module.named_parameters())
    parameter = parameters.get(PLANTED, next(iter(parameters.values())))
    return parameter.register_hook(lambda gradient: gradient * float("inf"))


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    plain, _ = train(case, rank, watched=False)
    watched, watch = train(case, rank, watched=True)
    assert watch is not None
    apart = [
        step
        for step, (without, with_replay) in enumerate(zip(plain, watched, strict=True))
        if not engines.same(without, with_replay)
    ]
    return {
        "first_step_apart": apart[0] if apart else None,
        "replayed": len(watch.results),
        "forward": sum(each.forward for each in watch.results),
        "backward": sum(each.backward for each in watch.results),
        "why_not": sorted({each.why_not for each in watch.results if each.why_not}),
        "changed_inputs": sorted({number for each in watch.results for number in each.changed_inputs}),
        "different": sorted(set(watch.different)),
        "compared": watch.compared,
        "seconds": watch.seconds,
        "moved": not engines.same(plain[0], plain[-1]),
    }


if __name__ == "__main__":
    engines.main(run)
