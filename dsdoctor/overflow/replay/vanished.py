"""Which activations float16 has nothing left of: a step's forward is replayed as it was and in float32. All ranks together."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dsdoctor.overflow.frames.dtypes import SMALLEST_NORMAL
from dsdoctor.overflow.frames.first_bad import Vanished
from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats
from dsdoctor.overflow.hooks import engine_gradients, ranks
from dsdoctor.overflow.hooks.batch_record import BatchRecord, Position
from dsdoctor.overflow.hooks.module_hooks import Hooks
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.replay.recorder import BatchRecorder
from dsdoctor.overflow.replay.remedy import Fp32Forward
from dsdoctor.overflow.replay.replay import replay

LOST = 0.5
"""The share of a tensor's elements that float16 must have made zero."""
NOTHING = 1e-12
"""A tensor whose largest value is below it is nothing in float32 either, beside activations of ordinary size: a closed gate."""
HALF = "float16"

Place = tuple[int, str, int, str]
"""Micro-batch, module, call and the tensor's name."""


@torch.no_grad()
def has_lost_gradient(engine: Any, meters: Meters) -> bool:
    """Whether a whole gradient of this rank is below float16's normal numbers: what a layer behind activations of nothing has.

    So do modules that took no part in the step; a replay tells them apart. One wait for the device.
    """
    readings = Readings(meters)
    numbers = [readings.look(piece) for piece in engine_gradients.pieces(engine)]
    readings.settle()
    stats = (readings.stats(number, "") for number in numbers if isinstance(number, int))
    return any(each.count > 1 and (each.absmax or 0.0) < SMALLEST_NORMAL[HALF] for each in stats)


def any_lost_activation(frames: Iterable[Frame]) -> bool:
    """Whether frames that were taken live show an output that is below float16's normal numbers as a whole."""
    return any(_is_lost(tensor) for frame in frames for tensor in frame.outputs)


def vanished(engine: Any, recorder: BatchRecorder) -> Vanished | None:
    """The first activation on this rank that is nothing in float16 and something in float32; None: none, or no replay."""
    narrow = _activations(engine, recorder, in_float32=False)
    here = any(_is_lost(tensor) for _, tensor in narrow.values())
    if not ranks.any_rank(here, engine.device):
        return None
    return first_vanished(narrow, _activations(engine, recorder, in_float32=True))


def first_vanished(
    narrow: dict[Place, tuple[Frame, TensorStats]], wide: dict[Place, tuple[Frame, TensorStats]]
) -> Vanished | None:
    """The first tensor of ``narrow``, in order, that is something in ``wide``. A tensor that is not in both decides nothing."""
    for place, (frame, tensor) in narrow.items():
        if not _is_lost(tensor) or place not in wide:
            continue
        other = wide[place][1]
        gone = tensor.zeros - other.zeros
        if not other.is_bad and (other.absmax or 0.0) > NOTHING and gone > LOST * tensor.count:
            return Vanished(
                frame=frame,
                name=tensor.name,
                share=gone / tensor.count,
                largest=other.absmax or 0.0,
                dtype=tensor.dtype,
            )
    return None


def _is_lost(tensor: TensorStats) -> bool:
    return (
        tensor.dtype == HALF
        and tensor.count > 1
        and not tensor.is_bad
        and (tensor.absmax or 0.0) < SMALLEST_NORMAL[HALF]
    )


def _activations(engine: Any, recorder: BatchRecorder, *, in_float32: bool) -> dict[Place, tuple[Frame, TensorStats]]:
    """Inputs and outputs of every call in the step's forwards, in the order in which they are known."""
    found: dict[Place, tuple[Frame, TensorStats]] = {}

    @contextmanager
    def around(number: int) -> Iterator[None]:
        records: list[BatchRecord] = []
        place = Position(step=int(engine.global_steps), micro=number)
        hooks = Hooks(engine.module, on_record=records.append, position=lambda: place, rank=ranks.rank())
        try:
            with Fp32Forward([engine.module]) if in_float32 else nullcontext():
                yield
        finally:
            hooks.detach()
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            for record in records:
                record.settle()
                found.update(placed(record.frames()))

    replay(recorder, around=around, backward=False)
    return found


def placed(frames: Iterable[Frame]) -> Iterator[tuple[Place, tuple[Frame, TensorStats]]]:
    """Each tensor that goes into or comes out of a call, by its place."""
    for frame in frames:
        for tensor in (*frame.inputs, *frame.outputs) if frame.phase is CallPhase.FORWARD else ():
            yield (frame.micro, frame.module, frame.call, tensor.name), (frame, tensor)
