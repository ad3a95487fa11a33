"""A file of a tag -> which elements of which entry belong to which parameter. What is padding belongs to none."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.checkpoint.contents import STATE, shapes_of
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.inert import Call, Tensor, count_of
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.walk import Way, at, tensors

FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")
STATES = ("base_optimizer_state", STATE)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements of an entry of a file: ``what`` they are ("first.weight", "exp_avg of first.weight")."""

    key: str
    dtype: str
    start: int
    count: int
    what: str


def spans_of(examined: Examined, shard: Shard) -> Iterator[Span]:
    """The weights and the optimizer's states of one file. Buffers, which may be inf in health, are not among them."""
    content = shard.file.content
    if shard.part is Part.OPTIMIZER:
        yield from _of_flat(examined, shard)
        return
    if shard.part is Part.LAYER:
        yield from _of_layer(examined, shard)
        return
    buffers = at(content, "buffer_names") or ()
    for way, tensor in tensors(content):
        inside = shard.part is Part.EXPERT or (way and way[0] in {"module", "optimizer", "frozen_param_fragments"})
        if inside and tensor.in_one_piece and way[-1] not in buffers:
            yield _span(tensor, 0, tensor.count, _said(way))


def _of_layer(examined: Examined, shard: Shard) -> Iterator[Span]:
    """A pipeline's layer: no file says which of its tensors are buffers, so those that are trained are taken."""
    for way, tensor in tensors(shard.file.content):
        name = f"{shard.name.layer}.{'.'.join(map(str, way))}"
        if name in examined.parameters and tensor.in_one_piece:
            yield _span(tensor, 0, tensor.count, name)


def spans_of_universal(tensor_name: str, content: Any) -> Iterator[Span]:
    """The one tensor in a file of a universal checkpoint."""
    for _, tensor in tensors(content):
        if tensor.in_one_piece:
            yield _span(tensor, 0, tensor.count, tensor_name)


def _of_flat(examined: Examined, shard: Shard) -> Iterator[Span]:
    """Flat weights, and states of the same length beside them, by parameter."""
    layout = _layout(examined, shard)
    for way, tensor in tensors(at(shard.file.content, STATE)):
        state, group = _place(way)
        if state is None or not tensor.in_one_piece:
            continue
        known = layout.get(group, [])
        fits = known and max(start + count for start, count, _ in known) <= tensor.count
        for start, count, name in known if fits else [(0, 0 if tensor.count == 1 else tensor.count, f"group {group}")]:
            if count:
                yield _span(tensor, start, count, f"{state} of {name}")


def _place(way: Way) -> tuple[str | None, int]:
    """What a tensor of an optimizer's states is, and of which group."""
    if len(way) >= 2 and way[0] in FLAT and isinstance(way[1], int):
        return "fp32 weights", way[1]
    if len(way) == 4 and way[0] in STATES and way[1] == "state" and isinstance(way[2], int):
        return str(way[3]), way[2]
    return None, 0


Pieces = dict[int, list[tuple[int, int, str]]]


def _layout(examined: Examined, shard: Shard) -> Pieces:
    """For each group (start, elements, name) of the parameters in this rank's flat weights."""
    if examined.facts.stage is not None and examined.facts.stage >= PARTITIONED:
        return _layout3(examined, shard)
    mappings = at(shard.file.content, STATE, "param_slice_mappings")
    pieces: Pieces = {}
    for group, mapping in enumerate(mappings if isinstance(mappings, list) else ()):
        addresses = (
            [(_address(value), str(name)) for name, value in mapping.items()] if isinstance(mapping, dict) else []
        )
        pieces[group] = [(start, count, name) for (start, count), name in addresses]
    return pieces


def _address(value: Any) -> tuple[int, int]:
    """(start, elements) of DeepSpeed's fragment_address."""
    state = value.state if isinstance(value, Call) else None
    start, count = at(state, "start"), at(state, "numel")
    return (start, count) if isinstance(start, int) and isinstance(count, int) else (0, 0)


def _layout3(examined: Examined, shard: Shard) -> Pieces:
    """Stage 3: this rank's piece of each parameter after the other; the groups go on where the one before ends."""
    models = [each for each in examined.tag.of(Part.MODEL) if (each.name.model or 0) == (shard.name.model or 0)]
    shapes = shapes_of(models[0].file.content) if models else None
    groups = at(shard.file.content, STATE, "fp32_flat_groups")
    world, rank = examined.facts.partitions, shard.name.data
    if shapes is None or not isinstance(groups, list) or not world or rank is None:
        return {}
    pieces: Pieces = {number: [] for number in range(len(groups))}
    ends = _ends(groups)
    offset = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        whole = count_of(shape)
        share = math.ceil(whole / world)
        mine = max(0, min(share, whole - rank * share))
        for number, (begin, end) in enumerate(ends):
            low, high = max(offset, begin), min(offset + mine, end)
            if low < high:
                pieces[number].append((low - begin, high - low, name))
        offset += share
    return pieces


def _ends(groups: list[Any]) -> list[tuple[int, int]]:
    made, offset = [], 0
    for group in groups:
        count = group.count if isinstance(group, Tensor) else 0
        made.append((offset, offset + count))
        offset += count
    return made


def _span(tensor: Tensor, start: int, count: int, what: str) -> Span:
    return Span(key=tensor.storage.key, dtype=tensor.dtype, start=tensor.start + start, count=count, what=what)


def _said(way: Way) -> str:
    if way[0] in {"module", "frozen_param_fragments"}:
        return ".".join(map(str, way[1:]))
    return ".".join(map(str, way))
