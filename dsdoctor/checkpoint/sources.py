"""A whole tag -> each tensor of the merged model, and where its pieces lie in the ranks' files. DeepSpeed's own arithmetic."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.checkpoint.archive import Archive
from dsdoctor.checkpoint.contents import STATE, frozen_of, groups_of, shapes_of
from dsdoctor.checkpoint.convert import can_convert, float_types
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.pickles import ITEM_SIZES, Tensor, count_of
from dsdoctor.checkpoint.walk import at, tensors


class NotMerged(Exception):
    """What cannot be merged, and why."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements of one entry of one file."""

    file: Archive
    key: str
    start: int
    count: int


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
    facts = examined.facts
    if facts.experts or facts.layers or (facts.model or 1) > 1:
        raise NotMerged("experts, pipelines and tensor-parallel models are not merged: neither does zero_to_fp32.py")
    if facts.stage is None:
        raise NotMerged("no file says at which ZeRO stage it was saved")
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


Found = tuple[str, tuple[int, ...], str, tuple[Piece, ...]]


def _tensors(examined: Examined) -> Iterator[Found]:
    models, ranks = examined.tag.of(Part.MODEL), examined.tag.of(Part.OPTIMIZER)
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
        yield from _trained3(models, ranks) if stage3 else _trained12(first, ranks)


def _of_module(examined: Examined, first: Archive) -> Iterator[Found]:
    """Buffers, and weights that no optimizer trains; without ZeRO all of them."""
    buffers = at(first.content, "buffer_names") or ()
    module, copies = at(first.content, "module"), dict(_shared(examined))
    for name, tensor in module.items() if isinstance(module, dict) else ():
        # at stage 3 the module's weights are empty here; below, those that no optimizer trains stand here only
        alone = name not in examined.parameters and name not in examined.frozen
        whole = examined.facts.stage == 0 or (alone and (examined.facts.stage or 0) < PARTITIONED)
        if isinstance(tensor, Tensor) and (name in buffers or whole) and name not in copies:
            yield str(name), tensor.shape, tensor.dtype, (_whole(first, str(name), tensor),)


def _trained12(model: Archive, ranks: tuple[Shard, ...]) -> Iterator[Found]:
    """Stages 1 and 2: the ranks' flat weights follow each other, and the parameters lie in them one after the other."""
    groups = [_groups(shard) for shard in ranks]
    paddings = at(ranks[0].file.content, STATE, "param_alignment_paddings")
    for number, shapes in enumerate(shapes_of(model.content) or ()):
        flat = [(shard.file, group[number]) for shard, group in zip(ranks, groups, strict=True)]
        offset = 0
        for place, (name, shape) in enumerate(shapes.items()):
            count = count_of(shape)
            yield name, shape, flat[0][1].dtype, tuple(_within(flat, offset, count))
            padding = at(paddings, number, place)
            offset += count + (padding if isinstance(padding, int) else 0)


def _trained3(models: tuple[Shard, ...], ranks: tuple[Shard, ...]) -> Iterator[Found]:
    """Stage 3: each rank holds its share of each parameter; the last one is padded."""
    shapes = {name: shape for group in shapes_of(models[0].file.content) or () for name, shape in group.items()}
    flats = [[(shard.file, tensor) for tensor in _groups(shard)] for shard in ranks]
    offset = 0
    for name, shape in shapes.items():
        count = count_of(shape)
        share = math.ceil(count / len(ranks))
        found: list[Piece] = []
        for rank, flat in enumerate(flats):
            found += _within(flat, offset, max(0, min(share, count - rank * share)))
        yield name, shape, flats[0][0][1].dtype, tuple(found)
        offset += share


def _frozen2(model: Archive) -> Iterator[Found]:
    for name, shape in frozen_of(model.content).items():
        tensor = at(model.content, "frozen_param_fragments", name)
        if isinstance(tensor, Tensor):
            yield name, shape, tensor.dtype, (_whole(model, name, tensor),)


def _frozen3(models: tuple[Shard, ...]) -> Iterator[Found]:
    for name, shape in frozen_of(models[0].file.content).items():
        left, found, dtype = count_of(shape), [], ""
        for shard in models:
            tensor = at(shard.file.content, "frozen_param_fragments", name)
            if isinstance(tensor, Tensor):
                dtype = tensor.dtype
                piece = _whole(shard.file, name, tensor)
                found.append(Piece(file=piece.file, key=piece.key, start=piece.start, count=min(left, piece.count)))
                left -= found[-1].count
        yield name, shape, dtype, tuple(found)


def _universal(examined: Examined) -> Iterator[Found]:
    for parameter in examined.tag.parameters or ():
        for file in parameter.files:
            if file.path.name == "fp32.pt":
                held = [tensor for _, tensor in tensors(file.content)]
                if len(held) != 1:
                    raise NotMerged(f"{file.path.name} of {parameter.name} holds {len(held)} tensors, not one")
                shape = examined.parameters.get(parameter.name, held[0].shape)
                yield parameter.name, shape, held[0].dtype, (_whole(file, parameter.name, held[0]),)


def _within(flat: list[tuple[Archive, Tensor]], offset: int, count: int) -> Iterator[Piece]:
    """So many elements from an offset on, of tensors that follow each other."""
    begin = 0
    for file, tensor in flat:
        low, high = max(offset, begin), min(offset + count, begin + tensor.count)
        if low < high:
            yield Piece(file=file, key=tensor.storage.key, start=tensor.start + low - begin, count=high - low)
        begin += tensor.count


def _whole(file: Archive, name: str, tensor: Tensor) -> Piece:
    if not tensor.in_one_piece:
        raise NotMerged(f"{name} does not lie in one piece in {file.path.name}")
    return Piece(file=file, key=tensor.storage.key, start=tensor.start, count=tensor.count)


def _groups(shard: Shard) -> list[Tensor]:
    groups = groups_of(shard)
    if not groups or not all(tensor.in_one_piece for tensor in groups):
        raise NotMerged(f"{shard.file.path.name} has no fp32 weights where DeepSpeed writes them")
    return groups


def _shared(examined: Examined) -> Iterator[tuple[str, str]]:
    """Names of parameters that are another one's: (the name, the other's)."""
    models = examined.tag.of(Part.MODEL)
    shared: Any = at(models[0].file.content, "shared_params") if models else None
    yield from ((str(copy), str(name)) for copy, name in shared.items()) if isinstance(shared, dict) else ()
