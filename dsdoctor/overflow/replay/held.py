"""What a model holds beside its inputs: its buffers, weights and plain attributes, by name, where something bad came out of one.

Nothing here is read or asked of a healthy step.
"""

import dataclasses
from collections.abc import Iterator

import msgspec
from torch import Tensor, nn

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Held
from dsdoctor.overflow.frames.frame import BUFFER, TensorStats
from dsdoctor.overflow.frames.masks import is_minus_inf_mask
from dsdoctor.overflow.measure.measure import flag
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.replay.operations import Operations

Named = tuple[str, str, Tensor]
"""Kind and name of a model's tensor, and the tensor."""
Names = dict[int, list[Named]]
"""By the number of their memory: DeepSpeed lays all weights of a group into one."""
OUTSIDE = (BadKind.DATA, BadKind.WEIGHT, BadKind.GRADIENT)
"""Kinds whose place is known already, or is no call of a module's forward."""


def names_of(model: nn.Module, operations: Operations) -> Names:
    """Before a replay: whose memory is whose. A forward may replace a buffer by another tensor."""
    found: Names = {}
    for named in _tensors_of(model):
        memory = operations.memory_of(named[2])
        if memory is not None:
            found.setdefault(memory, []).append(named)
    return found


def _tensors_of(model: nn.Module) -> Iterator[Named]:
    yield from (("weight", name, tensor) for name, tensor in model.named_parameters())
    yield from (("buffer", name, tensor) for name, tensor in model.named_buffers())
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield "attribute", f"{place}.{name}".lstrip("."), value


def of_the_model(found: FirstBad, held: Held, memory: int | None, names: Names) -> tuple[FirstBad, Held]:
    """The first bad value came out of ``held``: if that is the model's, it is what was bad first."""
    kind, name = _which(names.get(memory, []) if memory is not None else [], held.tensor.shape)
    held = msgspec.structs.replace(held, kind=kind, name=name)
    if not kind or found.kind in OUTSIDE:
        return found, held
    stats = msgspec.structs.replace(held.tensor, name=f"{kind} {name}")
    return dataclasses.replace(found, kind=BadKind.WEIGHT, frame=_with(found, (stats,)).frame, tensor=stats), held


def _which(together: list[Named], shape: tuple[int, ...]) -> tuple[str, str]:
    """Which of the tensors in one memory is meant: the only one, or one that is bad, of the same shape if there is such a one."""
    if len(together) > 1:
        together = [named for named in together if bool(flag(named[2]))]
        together.sort(key=lambda named: tuple(named[2].shape) != shape)
    return together[0][:2] if together else ("", "")


def with_buffers(model: nn.Module, found: FirstBad) -> FirstBad:
    """The first bad call with the buffers of its module that hold nan or inf now. Whether they did before is not known."""
    module = dict(model.named_modules()).get(found.frame.module)
    if found.kind in OUTSIDE or module is None:
        return found
    readings = Readings(Meters())
    seen = [(name, readings.look(tensor)) for name, tensor in module.named_buffers(recurse=False)]
    readings.settle()
    stats = [readings.stats(number, f"{BUFFER}{name}") for name, number in seen if isinstance(number, int)]
    return _with(found, tuple(tensor for tensor in stats if tensor.is_bad and not is_minus_inf_mask(tensor)))


def _with(found: FirstBad, tensors: tuple[TensorStats, ...]) -> FirstBad:
    frame = msgspec.structs.replace(found.frame, tensors=(*tensors, *found.frame.tensors))
    return dataclasses.replace(found, frame=frame)
