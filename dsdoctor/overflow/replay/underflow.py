"""What float16 has nothing left of: gradients that are flushed to zero, and activations that are nothing.

The step is replayed as it was, and with gradients that many times larger, or with its forward in float32. A larger factor stands
for a wider format: what is nothing at first and something then has underflowed. All ranks together.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dsdoctor.overflow.frames.first_bad import Flushed, Vanished
from dsdoctor.overflow.frames.frame import LIMITS, SMALLEST_NORMAL, CallPhase, Frame, TensorStats
from dsdoctor.overflow.hooks import engine as deepspeed_engine
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Position
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.replay.investigate import local_gradients
from dsdoctor.overflow.replay.remedy import Fp32Forward
from dsdoctor.overflow.replay.replay import BatchRecorder, recorded, replay

MIN_LOST_SHARE = 0.5
"""The share of a tensor's elements that float16 must have made zero."""
NOTHING = 1e-12
"""A tensor whose largest value is below it is nothing in float32 either, beside activations of ordinary size: a closed gate."""
HALF = "float16"
Place = tuple[int, str, int, str]
"""Micro-batch, module, call and the tensor's name."""
MIN_SUSPECT_SHARE = 0.25
"""The share of a rank's gradient elements that are zero or denormal from which it is worth a replay: dead units and words that
did not occur are zero too, and only the replay tells those apart."""
MARGIN_BITS = 2
"""Room that is left below the limit when a loss scale is advised: the next batches may have larger gradients."""
MAX_BITS = 24
MAX_NAMES = 6


def has_lost_gradient(engine: Any, meters: Meters) -> bool:
    """Whether a whole gradient of this rank is below float16's normal numbers: what a layer behind activations of nothing has.

    So do modules that took no part in the step; a replay tells them apart. One wait for the device.
    """
    return any(
        each.count > 1 and (each.absmax or 0.0) < SMALLEST_NORMAL[HALF] for each in _pieces_of_gradients(engine, meters)
    )


@torch.no_grad()
def _pieces_of_gradients(engine: Any, meters: Meters) -> list[TensorStats]:
    """The figures of what this rank holds of the gradients."""
    readings = Readings(meters)
    numbers = [readings.look(piece) for piece in deepspeed_engine.pieces(engine)]
    readings.settle()
    return [readings.stats(number, "") for number in numbers if isinstance(number, int)]


def any_lost_activation(frames: Iterable[Frame]) -> bool:
    """Whether frames that were taken live show an output that is below float16's normal numbers as a whole."""
    return any(_is_lost(tensor) for frame in frames for tensor in frame.outputs)


def underflowed_activation(engine: Any, recorder: BatchRecorder) -> Vanished | None:
    """The first activation on this rank that is nothing in float16 and something in float32; None: none, or no replay."""
    narrow = _activations(engine, recorder, in_float32=False)
    here = any(_is_lost(tensor) for _, tensor in narrow.values())
    if not ranks.any_rank(here, engine.device):
        return None
    return first_underflow(narrow, _activations(engine, recorder, in_float32=True))


def first_underflow(
    narrow: dict[Place, tuple[Frame, TensorStats]], wide: dict[Place, tuple[Frame, TensorStats]]
) -> Vanished | None:
    """The first tensor of ``narrow``, in order, that is something in ``wide``. A tensor that is not in both decides nothing."""
    for place, (frame, tensor) in narrow.items():
        if not _is_lost(tensor) or place not in wide:
            continue
        other = wide[place][1]
        lost = tensor.zeros - other.zeros
        if not other.is_bad and (other.absmax or 0.0) > NOTHING and lost > MIN_LOST_SHARE * tensor.count:
            return Vanished(
                frame=frame,
                name=tensor.name,
                share=lost / tensor.count,
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
        place = Position(step=int(engine.global_steps), micro=number)
        records = recorded(
            engine,
            lambda record: found.update(placed(record.frames())),
            position=lambda: place,
            rank=ranks.this_rank(),
        )
        with records, Fp32Forward([engine.module]) if in_float32 else nullcontext():
            yield

    replay(recorder, around=around, backward=False)
    return found


def placed(frames: Iterable[Frame]) -> Iterator[tuple[Place, tuple[Frame, TensorStats]]]:
    """Each tensor that goes into or comes out of a call, by its place."""
    for frame in frames:
        for tensor in (*frame.inputs, *frame.outputs) if frame.phase is CallPhase.FORWARD else ():
            yield (frame.micro, frame.module, frame.call, tensor.name), (frame, tensor)


def is_suspect(engine: Any, meters: Meters) -> bool:
    """Whether many of the gradient elements that this rank holds are zero or denormal in float16. One wait for the device."""
    stats = _pieces_of_gradients(engine, meters)
    count = sum(each.count for each in stats)
    return count > 0 and sum(map(_tiny, stats)) > MIN_SUSPECT_SHARE * count


def all_zero(engine: Any, meters: Meters) -> bool:
    """Whether every gradient element that this rank holds is exactly zero. One wait for the device."""
    return all(each.absmax == 0.0 for each in _pieces_of_gradients(engine, meters))


def _tiny(stats: TensorStats) -> int:
    """Elements that are zero or denormal in float16; of a wider format only whole tensors are known to be."""
    if (stats.absmax or 0.0) < SMALLEST_NORMAL["float16"]:
        return stats.count
    return stats.zeros + (stats.subnormal if stats.dtype == "float16" else 0)


def underflow_share(engine: Any, recorder: BatchRecorder, scale: float) -> Flushed | None:
    """What underflows on this rank at a loss scale, and the scale that fits; None: nothing, or it could not be replayed."""
    now = _gradients(engine, recorder, 1.0)
    largest = max((each.absmax or 0.0 for each in now), default=0.0)
    room = LIMITS["float16"] / 16 / largest if largest else 2.0**MAX_BITS
    bits = max(0, min(MAX_BITS, math.floor(math.log2(room)), _room_of_starts(recorder)))
    factor = 2.0 ** min(ranks.gather(bits))
    wide = _gradients(engine, recorder, factor)
    if factor == 1.0 or len(now) != len(wide) or any(each.is_bad for each in wide):
        return None
    return _compared(now, wide, scale, factor)


def _compared(now: list[TensorStats], wide: list[TensorStats], scale: float, factor: float) -> Flushed | None:
    lost: dict[str, tuple[int, int]] = {}
    for before, after in zip(now, wide, strict=True):
        number, count = lost.get(before.name, (0, 0))
        lost[before.name] = number + max(0, _nothing(before) - _nothing(after)), count + before.count
    total = sum(count for _, count in lost.values())
    largest = max((each.absmax or 0.0 for each in wide), default=0.0) / factor
    if not total or not largest:
        return None
    worst = sorted(lost, key=lambda name: -lost[name][0] / max(1, lost[name][1]))[:MAX_NAMES]
    fits = 2.0 ** (math.floor(math.log2(LIMITS["float16"] * scale / largest)) - MARGIN_BITS)
    return Flushed(
        share=sum(number for number, _ in lost.values()) / total,
        worst=tuple((name, lost[name][0] / max(1, lost[name][1])) for name in worst),
        scale=scale,
        fits=fits,
    )


def _nothing(stats: TensorStats) -> int:
    return stats.zeros + stats.subnormal


def _room_of_starts(recorder: BatchRecorder) -> int:
    """By how many bits the gradients that the backward begins with may grow."""
    found = MAX_BITS
    for batch in recorder.batches:
        for gradient in batch.gradients.values():
            limit = torch.finfo(gradient.dtype).max
            largest = float(gradient.detach().abs().max()) if gradient.numel() else 0.0
            if 0 < largest < limit:
                found = min(found, math.floor(math.log2(limit / largest)) - 1)
    return found


def _gradients(engine: Any, recorder: BatchRecorder, factor: float) -> list[TensorStats]:
    """This rank's gradients of the step's micro-batches, each parameter's once a micro-batch, always in the same order."""
    found: list[TensorStats] = []

    def take(record: BatchRecord) -> None:
        found.extend(sorted(local_gradients(record.frames()), key=lambda each: each.name))

    replay(recorder, around=lambda _: recorded(engine, take, gradients=True), factor=factor)
    return found
