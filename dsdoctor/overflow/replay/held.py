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
from dsdoctor.overflow.replay.operations import Operations, Value, extent_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """A model's tensor, with its place in its memory before the replay: a forward may put other data into it."""

    kind: str
    name: str
    tensor: Tensor
    extent: tuple[int, int]


Names = dict[int, list[Named]]
"""By the number of their memory: DeepSpeed lays all weights of a group into one."""
MOST_TENSORS = 8
"""Bad tensors that a report names."""
OUTSIDE = (BadKind.DATA, BadKind.WEIGHT, BadKind.GRADIENT)
"""Kinds whose place is known already, or is no call of a module's forward."""


def names_of(model: nn.Module, operations: Operations) -> Names:
    """Before a replay: whose memory is whose. A forward may replace a buffer by another tensor."""
    found: Names = {}
    for kind, name, tensor in _tensors_of(model):
        memory = operations.memory_of(tensor)
        if memory is not None:
            named = Named(kind=kind, name=name, tensor=tensor, extent=extent_of(tensor))
            found.setdefault(memory, []).append(named)
    return found


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("weight", name, tensor) for name, tensor in model.named_parameters())
    yield from (("buffer", name, tensor) for name, tensor in model.named_buffers())
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield "attribute", f"{place}.{name}".lstrip("."), value


def of_the_model(found: FirstBad, held: Held, value: Value | None, names: Names) -> tuple[FirstBad, Held]:
    """The first bad value came out of ``held``: if that is the model's, it is what was bad first."""
    kind, name = _which(names.get(value.memory, []), value.extent) if value is not None else ("", "")
    held = msgspec.structs.replace(held, kind=kind, name=name)
    if not kind or found.kind in OUTSIDE:
        return found, held
    stats = msgspec.structs.replace(held.tensor, name=f"{kind} {name}")
    return dataclasses.replace(found, kind=BadKind.WEIGHT, frame=_with(found, (stats,)).frame, tensor=stats), held


def _which(together: list[Named], extent: tuple[int, int]) -> tuple[str, str]:
    """Which of the tensors in one memory is meant: the only one that lies there, or the only bad one. Of two, none is named."""
    met = [named for named in together if named.extent[0] < extent[1] and extent[0] < named.extent[1]]
    if len({named.extent for named in met}) > 1:
        met = [named for named in met if named.extent == extent] or [named for named in met if bool(flag(named.tensor))]
    return (met[0].kind, met[0].name) if len({named.extent for named in met}) == 1 else ("", "")


def bad_tensors(model: nn.Module) -> tuple[TensorStats, ...]:
    """What a model holds that is nan or inf now, on this rank: whether a forward reads it is not known."""
    readings = Readings(Meters())
    seen = [
        (f"{kind} {name}", readings.look(getattr(each, "ds_tensor", each))) for kind, name, each in _tensors_of(model)
    ]
    readings.settle()
    stats = [readings.stats(number, name) for name, number in seen if isinstance(number, int)]
    return tuple(tensor for tensor in stats if tensor.is_bad and not is_minus_inf_mask(tensor))[:MOST_TENSORS]


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
