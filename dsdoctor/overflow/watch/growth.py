"""How large weights and modules' inputs were in the steps before: a few numbers of each, to say whether one grew.

Weights are read in the steps that are due (history.py); inputs are known in these steps where the level takes frames.
"""

from collections.abc import Iterable
from typing import Any

import torch

from dsdoctor.overflow.frames.first_bad import FirstBad, Growth
from dsdoctor.overflow.frames.frame import CallPhase, Frame
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.verdict.evidence import EXTREME_WEIGHT

MAX_POINTS = 16
"""Readings of each weight that are kept: where there are more, every second one goes, but for the first."""


class PointsByName:
    """For each name a few steps with a value: the first, and of the others fewer and fewer."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}

    def add(self, name: str, step: int, value: float) -> None:
        """A value of a step that comes after all before."""
        points = self._points.setdefault(name, [])
        points.append((step, value))
        if len(points) > MAX_POINTS:
            points[:] = points[:1] + points[2::2]

    def with_now(self, name: str, step: int, value: float) -> Growth:
        """What is known of a name, and its value now."""
        before = (point for point in self._points.get(name, ()) if point[0] < step)
        return Growth(name=name, points=(*before, (step, value)))


class InputSizes:
    """The largest absolute value of what each module was given, on this rank, in some steps."""

    def __init__(self) -> None:
        self._points = PointsByName()

    def note(self, step: int, frames: Iterable[Frame]) -> None:
        """The frames of a step's forwards."""
        largest: dict[str, float] = {}
        for frame in frames:
            for name, value in _given(frame):
                largest[name] = max(value, largest.get(name, 0.0))
        for name, value in largest.items():
            self._points.add(name, step, value)

    def of(self, found: FirstBad, step: int) -> tuple[Growth, ...]:
        """How what the first bad module was given grew up to now; only what was seen before."""
        seen = (self._points.with_now(name, step, value) for name, value in _given(found.frame))
        return tuple(growth for growth in seen if len(growth.points) > 1)


def _given(frame: Frame) -> Iterable[tuple[str, float]]:
    for tensor in frame.inputs:
        if frame.phase is CallPhase.FORWARD and tensor.absmax is not None and not tensor.is_bad:
            yield f"{tensor.name} of {frame.module or 'the model'}", tensor.absmax


class WeightSizes:
    """The largest absolute value of each weight, as far as this rank holds it, in some steps."""

    def __init__(self) -> None:
        self._points = PointsByName()

    def note(self, engine: Any, step: int) -> None:
        """Read all weights: one pass, one wait for the device. No memory is held for it from one reading to the next."""
        for name, value in _largest(dict(engine.module.named_parameters()), Meters()).items():
            self._points.add(name, step, value)

    def of(self, engine: Any, found: FirstBad, step: int, meters: Meters) -> tuple[Growth, ...]:
        """How the weights of the first bad module grew up to now."""
        module = found.frame.module
        mine = {
            f"{module}.{name}".lstrip("."): parameter
            for place, part in engine.module.named_modules()
            if place == module
            for name, parameter in part.named_parameters(recurse=False)
        }
        return self._grown(_largest(mine, meters), step)

    def extreme(self, engine: Any, step: int, meters: Meters) -> tuple[Growth, ...]:
        """The weights of the whole model that are larger than any of an ordinary one: their values may go bad modules later."""
        now = _largest(dict(engine.module.named_parameters()), meters)
        return self._grown({name: value for name, value in now.items() if value >= EXTREME_WEIGHT}, step)

    def _grown(self, now: dict[str, float], step: int) -> tuple[Growth, ...]:
        return tuple(self._points.with_now(name, step, value) for name, value in now.items())


@torch.no_grad()
def _largest(parameters: dict[str, Any], meters: Meters) -> dict[str, float]:
    readings = Readings(meters)
    held = {name: readings.look(getattr(each, "ds_tensor", each)) for name, each in parameters.items()}
    readings.settle()
    stats = {name: readings.stats(number, name) for name, number in held.items() if isinstance(number, int)}
    return {name: each.absmax for name, each in stats.items() if each.absmax is not None}
