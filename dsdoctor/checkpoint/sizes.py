"""Do the flat fp32 weights of all ranks together have the elements that the parameters have? DeepSpeed's own arithmetic."""

import math
from collections.abc import Iterator

from dsdoctor.checkpoint.contents import STATE, Shapes, groups_of, shapes_of
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.inert import count_of
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.walk import at


def size_problems(examined: Examined) -> Iterator[str]:
    """A line for each group whose sizes do not fit. Groups with experts, which not all ranks share, are left out."""
    facts = examined.facts
    if facts.universal or facts.experts or not facts.partitions:
        return
    for model in sorted({shard.name.model or 0 for shard in examined.tag.of(Part.OPTIMIZER)}):
        ranks = [shard for shard in examined.tag.of(Part.OPTIMIZER) if (shard.name.model or 0) == model]
        states = [shard for shard in examined.tag.of(Part.MODEL) if (shard.name.model or 0) == model]
        shapes = shapes_of(states[0].file.content) if states else None
        if shapes is not None and facts.stage is not None:
            check = _stage3 if facts.stage >= PARTITIONED else _stage12
            yield from check(ranks, shapes, facts.partitions)


def _stage12(ranks: list[Shard], shapes: list[Shapes], world: int) -> Iterator[str]:
    """The ranks' pieces follow each other; all of them together may be padded to a multiple of twice the ranks."""
    groups = [groups_of(shard) for shard in ranks]
    if any(each is None or len(each) != len(shapes) for each in groups):
        return
    paddings = at(ranks[0].file.content, STATE, "param_alignment_paddings")
    for number, group in enumerate(shapes):
        there = sum(each[number].count for each in groups if each)
        extra = at(paddings, number)
        wanted = sum(count_of(shape) for shape in group.values())
        wanted += sum(extra) if isinstance(extra, list) and all(isinstance(each, int) for each in extra) else 0
        if _padded(there, world) != _padded(wanted, world):
            yield f"group {number}: {len(ranks)} shards hold {there:,} elements, its {len(group)} parameters have {wanted:,}"


def _stage3(ranks: list[Shard], shapes: list[Shapes], world: int) -> Iterator[str]:
    """Each rank holds its piece of each parameter, padded to the same size on all ranks."""
    wanted = sum(math.ceil(count_of(shape) / world) for group in shapes for shape in group.values())
    for shard in ranks:
        groups = groups_of(shard)
        there = None if groups is None else sum(each.count for each in groups)
        if there is not None and there != wanted:
            yield f"{shard.file.path.name} holds {there:,} elements, its share of the parameters is {wanted:,}"


def _padded(count: int, world: int) -> int:
    return math.ceil(count / (2 * world)) * 2 * world
