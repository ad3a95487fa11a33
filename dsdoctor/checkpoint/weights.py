"""A whole tag -> each tensor of the merged model, and where its pieces lie in the ranks' files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.checkpoint.archive import Archive
from dsdoctor.checkpoint.contents import frozen_of
from dsdoctor.checkpoint.convert import can_convert, float_types
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.experts import expert_weights
from dsdoctor.checkpoint.flat_weights import Found, NotMerged, trained, whole
from dsdoctor.checkpoint.inert import ITEM_SIZES, Tensor, count_of
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.open_files import Piece
from dsdoctor.checkpoint.pipeline import pipeline_weights
from dsdoctor.checkpoint.walk import at, tensors


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor of the merged model. ``dtype``: as it is saved; ``made``: as it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    made: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes that it takes in the merged model."""
        return count_of(self.shape) * ITEM_SIZES[self.made]


def sources_of(examined: Examined, dtype: str) -> tuple[Source, ...]:
    """Every tensor of the model, floating-point ones in ``dtype`` ("F32" or "BF16"). Raises NotMerged."""
    _check_layout(examined)
    found: dict[str, Source] = {}
    for name, shape, tensor_dtype, pieces in _tensors(examined):
        there = sum(piece.count for piece in pieces)
        if there != count_of(shape):
            raise NotMerged(f"{name} has {count_of(shape):,} elements, and its pieces {there:,}")
        made = dtype if tensor_dtype in float_types() else tensor_dtype
        if not can_convert(tensor_dtype, made):
            raise NotMerged(f"{name} is of a type that is not converted: {tensor_dtype or 'unknown'}")
        found[name] = Source(name=name, shape=shape, dtype=tensor_dtype, made=made, pieces=pieces)
    for copy, original in _shared(examined):
        if original in found and copy not in found:
            same = found[original]
            found[copy] = Source(name=copy, shape=same.shape, dtype=same.dtype, made=same.made, pieces=same.pieces)
    if not found:
        raise NotMerged("it holds no weights")
    return tuple(found.values())


def _check_layout(examined: Examined) -> None:
    """Raises NotMerged for what is merged by nothing here."""
    facts = examined.facts
    if facts.stage is None:
        raise NotMerged("no file says at which ZeRO stage it was saved")
    if not facts.universal and facts.layers and (facts.tensor is None or facts.tensor > 1):
        raise NotMerged("a pipeline whose tensors are cut too is put together by nothing here")
    if not facts.universal and not facts.layers and (facts.model or 1) > 1:
        raise NotMerged(
            "its tensors are cut over several ranks: make it universal first (--universal), and merge what that makes"
        )
    if facts.experts and facts.stage >= PARTITIONED:
        raise NotMerged("experts at stage 3 are put together by nothing here")


def _tensors(examined: Examined) -> Iterator[Found]:
    if examined.facts.layers and not examined.facts.universal:
        yield from pipeline_weights(examined)
        return
    models = examined.tag.of(Part.MODEL)
    first = models[0].file
    buffers = at(first.content, "buffer_names") or ()
    yield from _of_module(examined, first)
    if examined.facts.universal:
        # the converter makes floating-point numbers of buffers; the module has them as they were
        kept = at(first.content, "module")
        yield from (found for found in _universal(examined) if found[0] not in buffers or not at(kept, found[0]))
    elif examined.facts.stage != 0:
        stage3 = (examined.facts.stage or 0) >= PARTITIONED
        yield from _frozen3(models) if stage3 else _frozen2(first)
        yield from trained(examined)
    if examined.facts.experts:
        yield from expert_weights(examined)


def _of_module(examined: Examined, first: Archive) -> Iterator[Found]:
    """Buffers, and weights that no optimizer trains; without ZeRO all of them."""
    buffers = at(first.content, "buffer_names") or ()
    module, copies = at(first.content, "module"), dict(_shared(examined))
    for name, tensor in module.items() if isinstance(module, dict) else ():
        # at stage 3 the module's weights are empty here; below, those that no optimizer trains stand here only
        alone = name not in examined.parameters and name not in examined.frozen
        here = examined.facts.stage == 0 or (alone and (examined.facts.stage or 0) < PARTITIONED)
        if isinstance(tensor, Tensor) and (name in buffers or here) and name not in copies:
            yield str(name), tensor.shape, tensor.dtype, (whole(first, str(name), tensor),)


def _frozen2(model: Archive) -> Iterator[Found]:
    for name, shape in frozen_of(model.content).items():
        tensor = at(model.content, "frozen_param_fragments", name)
        if isinstance(tensor, Tensor):
            yield name, shape, tensor.dtype, (whole(model, name, tensor),)


def _frozen3(models: tuple[Shard, ...]) -> Iterator[Found]:
    for name, shape in frozen_of(models[0].file.content).items():
        left, found, dtype = count_of(shape), [], ""
        for shard in models:
            tensor = at(shard.file.content, "frozen_param_fragments", name)
            if isinstance(tensor, Tensor):
                dtype = tensor.dtype
                piece = whole(shard.file, name, tensor)
                found.append(Piece(file=piece.file, key=piece.key, start=piece.start, count=min(left, piece.count)))
                left -= found[-1].count
        yield name, shape, dtype, tuple(found)


def _universal(examined: Examined) -> Iterator[Found]:
    # DeepSpeed's converter writes a tied weight twice: the copy as the model holds it, rounded to 16 bits
    copies = dict(_shared(examined))
    for parameter in examined.tag.parameters or ():
        if parameter.name in copies:
            continue
        for file in parameter.files:
            if file.path.name == "fp32.pt":
                held = [tensor for _, tensor in tensors(file.content)]
                if len(held) != 1:
                    raise NotMerged(f"{file.path.name} of {parameter.name} holds {len(held)} tensors, not one")
                whole_shape = (examined.facts.model or 1) == 1
                shape = examined.parameters.get(parameter.name, held[0].shape) if whole_shape else held[0].shape
                yield parameter.name, shape, held[0].dtype, (whole(file, parameter.name, held[0]),)


def _shared(examined: Examined) -> Iterator[tuple[str, str]]:
    """Names of parameters that are another one's: (the name, the other's)."""
    models = examined.tag.of(Part.MODEL)
    shared: Any = at(models[0].file.content, "shared_params") if models else None
    yield from ((str(copy), str(name)) for copy, name in shared.items()) if isinstance(shared, dict) else ()
