"""Flat weights and optimizer states in the ranks' files -> the pieces of each trained parameter. DeepSpeed's own arithmetic."""

import math
from collections.abc import Iterator

from dsdoctor.checkpoint.archive import Archive
from dsdoctor.checkpoint.contents import STATE, groups_of, shapes_of
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.inert import Tensor, count_of
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.open_files import Piece
from dsdoctor.checkpoint.walk import at

Found = tuple[str, tuple[int, ...], str, tuple[Piece, ...]]
"""A tensor: its name, shape, type as it is saved, and its pieces in order."""
WEIGHTS = "fp32"


class NotMerged(Exception):
    """What cannot be merged, and why."""


def trained(examined: Examined, state: str = WEIGHTS) -> Iterator[Found]:
    """Every trained parameter's weights, or a state of its optimizer ("exp_avg"). Experts are left out. Raises NotMerged."""
    for model in sorted({shard.name.model or 0 for shard in examined.tag.of(Part.MODEL)}):
        models = [shard for shard in examined.tag.of(Part.MODEL) if (shard.name.model or 0) == model]
        ranks = [shard for shard in examined.tag.of(Part.OPTIMIZER) if (shard.name.model or 0) == model]
        if (examined.facts.stage or 0) >= PARTITIONED:
            yield from _partitioned(models, ranks, state)
        else:
            yield from _flat(models[0].file, ranks, state)


def _flat(model: Archive, ranks: list[Shard], state: str) -> Iterator[Found]:
    """Stages 1 and 2: the ranks' flat weights follow each other, and the parameters lie in them one after the other."""
    groups = [flats_of(shard, state) for shard in ranks]
    paddings = at(ranks[0].file.content, STATE, "param_alignment_paddings")
    for number, shapes in enumerate(shapes_of(model.content) or ()):
        if is_of_experts(ranks[0], number):
            continue
        flat = [(shard.file, group[number]) for shard, group in zip(ranks, groups, strict=True)]
        offset = 0
        for place, (name, shape) in enumerate(shapes.items()):
            count = count_of(shape)
            yield name, shape, flat[0][1].dtype, tuple(within(flat, offset, count))
            padding = at(paddings, number, place)
            offset += count + (padding if isinstance(padding, int) else 0)


def _partitioned(models: list[Shard], ranks: list[Shard], state: str) -> Iterator[Found]:
    """Stage 3: each rank holds its share of each parameter; the last one is padded."""
    shapes = {name: shape for group in shapes_of(models[0].file.content) or () for name, shape in group.items()}
    flats = [[(shard.file, tensor) for tensor in flats_of(shard, state)] for shard in ranks]
    offset = 0
    for name, shape in shapes.items():
        count = count_of(shape)
        share = math.ceil(count / len(ranks))
        found: list[Piece] = []
        for rank, flat in enumerate(flats):
            found += within(flat, offset, max(0, min(share, count - rank * share)))
        yield name, shape, flats[0][0][1].dtype, tuple(found)
        offset += share


def is_of_experts(shard: Shard, group: int) -> bool:
    """Whether a group of flat weights is of experts, which not all ranks share."""
    return at(_base(shard), "param_groups", group, "moe") is True


def flats_of(shard: Shard, state: str = WEIGHTS) -> list[Tensor]:
    """The flat tensors of a rank, one a group. Raises NotMerged."""
    found = groups_of(shard) if state == WEIGHTS else [at(group, state) for group in _states(shard)]
    if not found or not all(isinstance(tensor, Tensor) and tensor.in_one_piece for tensor in found):
        what = "fp32 weights" if state == WEIGHTS else state
        raise NotMerged(f"{shard.file.path.name} has no {what} where DeepSpeed writes them")
    return found


def _base(shard: Shard) -> object:
    state = at(shard.file.content, STATE)
    return at(state, "base_optimizer_state") or at(state, STATE)


def _states(shard: Shard) -> list[object]:
    states = at(_base(shard), "state")
    return [states[key] for key in sorted(states)] if isinstance(states, dict) else []


def within(flat: list[tuple[Archive, Tensor]], offset: int, count: int) -> Iterator[Piece]:
    """So many elements from an offset on, of tensors that follow each other."""
    begin = 0
    for file, tensor in flat:
        low, high = max(offset, begin), min(offset + count, begin + tensor.count)
        if low < high:
            yield Piece(file=file, key=tensor.storage.key, start=tensor.start + low - begin, count=high - low)
        begin += tensor.count


def whole(file: Archive, name: str, tensor: Tensor) -> Piece:
    """All elements of a tensor. Raises NotMerged."""
    if not tensor.in_one_piece:
        raise NotMerged(f"{name} does not lie in one piece in {file.path.name}")
    return Piece(file=file, key=tensor.storage.key, start=tensor.start, count=tensor.count)
