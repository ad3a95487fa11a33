"""How much of a step's gradients is flushed to zero: the step is replayed as it was and with gradients that many times larger.

A larger factor stands for a wider format: what is nothing at first and something then has underflowed. All ranks together.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsdoctor.overflow.frames.dtypes import LIMITS, SMALLEST_NORMAL
from dsdoctor.overflow.frames.first_bad import Flushed
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.hooks import engine_gradients, ranks
from dsdoctor.overflow.hooks.batch_record import BatchRecord
from dsdoctor.overflow.hooks.module_hooks import Hooks
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.replay.investigate import local_gradients
from dsdoctor.overflow.replay.recorder import BatchRecorder
from dsdoctor.overflow.replay.replay import replay

SUSPECT = 0.25
"""The share of a rank's gradient elements that are zero or denormal from which it is worth a replay: dead units and words that
did not occur are zero too, and only the replay tells those apart."""
MARGIN_BITS = 2
"""Room that is left below the limit when a loss scale is advised: the next batches may have larger gradients."""
MOST_BITS = 24
MOST_NAMES = 6


@torch.no_grad()
def is_suspect(engine: Any, meters: Meters) -> bool:
    """Whether many of the gradient elements that this rank holds are zero or denormal in float16. One wait for the device."""
    readings = Readings(meters)
    numbers = [readings.look(piece) for piece in engine_gradients.pieces(engine)]
    readings.settle()
    stats = [readings.stats(number, "") for number in numbers if isinstance(number, int)]
    count = sum(each.count for each in stats)
    return count > 0 and sum(map(_tiny, stats)) > SUSPECT * count


def _tiny(stats: TensorStats) -> int:
    """Elements that are zero or denormal in float16; of a wider format only whole tensors are known to be."""
    if (stats.absmax or 0.0) < SMALLEST_NORMAL["float16"]:
        return stats.count
    return stats.zeros + (stats.subnormal if stats.dtype == "float16" else 0)


def flushed(engine: Any, recorder: BatchRecorder, scale: float) -> Flushed | None:
    """What underflows on this rank at a loss scale, and the scale that fits; None: nothing, or it could not be replayed."""
    now = _gradients(engine, recorder, 1.0)
    largest = max((each.absmax or 0.0 for each in now), default=0.0)
    room = LIMITS["float16"] / 16 / largest if largest else 2.0**MOST_BITS
    bits = max(0, min(MOST_BITS, math.floor(math.log2(room)), _room_of_starts(recorder)))
    factor = 2.0 ** min(ranks.gather(bits))
    wide = _gradients(engine, recorder, factor)
    if factor == 1.0 or len(now) != len(wide) or any(each.is_bad for each in wide):
        return None
    return _compared(now, wide, scale, factor)


def _compared(now: list[TensorStats], wide: list[TensorStats], scale: float, factor: float) -> Flushed | None:
    lost: dict[str, tuple[int, int]] = {}
    for before, after in zip(now, wide, strict=True):
        gone, count = lost.get(before.name, (0, 0))
        lost[before.name] = gone + max(0, _nothing(before) - _nothing(after)), count + before.count
    total = sum(count for _, count in lost.values())
    largest = max((each.absmax or 0.0 for each in wide), default=0.0) / factor
    if not total or not largest:
        return None
    worst = sorted(lost, key=lambda name: -lost[name][0] / max(1, lost[name][1]))[:MOST_NAMES]
    fits = 2.0 ** (math.floor(math.log2(LIMITS["float16"] * scale / largest)) - MARGIN_BITS)
    return Flushed(
        share=sum(gone for gone, _ in lost.values()) / total,
        worst=tuple((name, lost[name][0] / max(1, lost[name][1])) for name in worst),
        scale=scale,
        fits=fits,
    )


def _nothing(stats: TensorStats) -> int:
    return stats.zeros + stats.subnormal


def _room_of_starts(recorder: BatchRecorder) -> int:
    """By how many bits the gradients that the backward begins with may grow."""
    found = MOST_BITS
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

    @contextmanager
    def around(_: int) -> Iterator[None]:
        records: list[BatchRecord] = []
        hooks = Hooks(engine.module, on_record=records.append, gradients=True)
        try:
            yield
        finally:
            hooks.detach()
            for record in records:
                record.settle()
                found.extend(sorted(local_gradients(record.frames()), key=lambda each: each.name))

    replay(recorder, around=around, factor=factor)
    return found
