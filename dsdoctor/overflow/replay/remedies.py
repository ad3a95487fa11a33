"""Is float32 in a module a remedy? The bad micro-batch is replayed with it, on all ranks together, before it is advised."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Tried, first_bad
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.batch_record import BatchRecord
from dsdoctor.overflow.hooks.module_hooks import Hooks
from dsdoctor.overflow.replay.recorder import BatchRecorder, MicroBatch
from dsdoctor.overflow.replay.remedy import Fp32Forward, has_forward
from dsdoctor.overflow.replay.replay import replay

MOST_PLACES = 4


def places(model: nn.Module, found: FirstBad) -> tuple[str, ...]:
    """The modules in which float32 may help, from the inside out; the last is the whole model. A list of modules is none: it is
    never called."""
    module = found.frame.module
    parts = module.split(".") if module else []
    around = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    around = [name for name in around if has_forward(model.get_submodule(name))]
    if found.kind is not BadKind.MODULE:  # what made it stands in the module around the one that was given it
        around = [name for name in around if name != module]
    return (*around[: MOST_PLACES - 1], "") if found.kind is not BadKind.LOSS else ("",)


def tried(
    engine: Any, recorder: BatchRecorder, *, number: int, modules: Sequence[str], factor: float
) -> tuple[Tried, ...]:
    """Float32 in one module after the other, until the micro-batch ``number`` is finite on all ranks. ``factor``: for the
    gradients with which the backward begins. All ranks call it with the same arguments."""
    done = []
    for name in modules:
        attempt = _try(engine, recorder, number, name, factor)
        done.append(attempt)
        fails = not attempt.forward or attempt.backward is False
        if not ranks.any_rank(fails, engine.device):
            break
    return tuple(done)


def _try(engine: Any, recorder: BatchRecorder, number: int, name: str, factor: float) -> Tried:
    found: list[FirstBad | None] = []

    @contextmanager
    def around(_: int) -> Iterator[None]:
        records: list[BatchRecord] = []
        hooks = Hooks(engine.module, on_record=records.append, gradients=True)
        try:
            # another rank's expert or layer is none of this one's
            with Fp32Forward([module for place, module in engine.module.named_modules() if place == name]):
                yield
        finally:
            hooks.detach()
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            for record in records:
                record.settle()
                found.append(first_bad(record.frames()))

    (done,) = replay(recorder, around=around, which=(number,), factor=factor)
    bad = next((each for each in found if each is not None), None)
    forward = done.forward and bool(found) and (bad is None or bad.kind is BadKind.GRADIENT)
    starts_well = done.backward and _starts_well(recorder.batches[number])
    return Tried(
        module=name,
        forward=forward,
        backward=(bad is None) if forward and starts_well else None,
        why_not="" if done.forward else done.why_not or "nothing was measured",
    )


def _starts_well(batch: MicroBatch) -> bool:
    """Whether the gradients that were kept are finite: a loss outside of the model that was nan gave nan."""
    began = (gradient for number, gradient in batch.gradients.items() if number in (batch.starts or ()))
    return all(bool(torch.isfinite(gradient).all()) for gradient in began)
