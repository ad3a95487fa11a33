"""What is judged together: the folder, one tag of it with its facts, and the trainable parameters. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dsdoctor.checkpoint.contents import Facts, Shapes, facts_of, frozen_of, is_bf16, shapes_of
from dsdoctor.checkpoint.inert import Tensor
from dsdoctor.checkpoint.look import Folder, Shard, Tag
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.walk import at

PARTITIONED = 3
"""The stage from which on the weights are cut up too."""
RANKS, STAGE, TYPE = "ranks", "a stage", "a type"


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A tag in its folder. ``chosen``: whether the user named the tag, so that ``latest`` does not matter.

    ``optimizer``: whether its optimizer's files matter. ``leftovers``: files of another run, which are not among the tag's shards,
    and what that run had other than the one that saved the tag: RANKS, STAGE or TYPE.
    """

    folder: Folder
    tag: Tag
    facts: Facts
    chosen: bool = False
    parameters: Shapes = field(default_factory=dict)
    frozen: Shapes = field(default_factory=dict)
    leftovers: Mapping[str, str] = field(default_factory=dict)
    optimizer: bool = True


def examine(folder: Folder, tag: Tag, *, chosen: bool = False) -> Examined:
    """A tag with its facts."""
    tag, leftovers = without_leftovers(tag)
    trained: dict[str, tuple[int, ...]] = {}
    frozen: dict[str, tuple[int, ...]] = {}
    for shard in tag.of(Part.MODEL):
        for group in shapes_of(shard.file.content) or ():
            trained.update(group)
        frozen.update(frozen_of(shard.file.content))
    facts = facts_of(tag)
    if not trained and facts.stage == 0:
        trained = _whole(tag)
    return Examined(
        folder=folder, tag=tag, facts=facts, chosen=chosen, parameters=trained, frozen=frozen, leftovers=leftovers
    )


def without_leftovers(tag: Tag) -> tuple[Tag, Mapping[str, str]]:
    """The tag without the files of ranks beyond those that rank 0's own files speak of, and without model states that the stage
    or the type of its optimizer has under another name; and the names of these, each with why.

    Rank 0 is in every run, so its files are those of the last save; a larger run that saved under the same tag before leaves the
    files of its further ranks, and load_checkpoint opens none of them.
    """
    first = [shard.file for shard in tag.shards if not shard.name.data and shard.part in {Part.MODEL, Part.OPTIMIZER}]
    facts = facts_of(replace(tag, shards=tuple(shard for shard in tag.shards if shard.file in first)))
    if facts.data is None:
        return tag, {}
    ranks = max(facts.data, facts.partitions or 0)
    gone: dict[str, str] = {}
    for shard in tag.shards:
        if (shard.name.data or 0) >= ranks:
            gone[shard.file.path.name] = RANKS
        elif _of_another_stage(shard, tag, facts):
            gone[shard.file.path.name] = STAGE
        elif _of_another_type(shard, tag):
            gone[shard.file.path.name] = TYPE
    return replace(tag, shards=tuple(shard for shard in tag.shards if shard.file.path.name not in gone)), gone


def another_training(examined: Examined, other: Examined) -> str:
    """How a tag differs from one of the same training, "" where it does not."""
    if examined.parameters and other.parameters and examined.parameters != other.parameters:
        return "its parameters are other ones"
    stages = (other.facts.stage, examined.facts.stage)
    if None not in stages and stages[0] != stages[1]:
        return f"it was saved at stage {stages[0]}, and that one at stage {stages[1]}"
    return ""


def without_optimizer(examined: Examined) -> Examined:
    """The tag as a load sees it that leaves the optimizer's files alone."""
    shards = tuple(shard for shard in examined.tag.shards if shard.part is not Part.OPTIMIZER)
    return replace(examined, tag=replace(examined.tag, shards=shards), optimizer=False)


def _of_another_stage(shard: Shard, tag: Tag, facts: Facts) -> bool:
    """Whether these are model states as another stage names them, beside those of the tag's own."""
    if shard.part is not Part.MODEL or facts.stage is None:
        return False
    cut = facts.stage >= PARTITIONED
    return (shard.name.data is not None) != cut and any(
        (other.name.data is not None) == cut for other in tag.of(Part.MODEL)
    )


def _of_another_type(shard: Shard, tag: Tag) -> bool:
    """Whether this is a file of the optimizer as a run of another type names it, beside those of the one that saved the model."""
    configs = [at(model.file.content, "ds_config") for model in tag.of(Part.MODEL)]
    marks = {is_bf16(config) for config in configs if isinstance(config, dict)}
    return (
        shard.part is Part.OPTIMIZER
        and marks == {not shard.name.bf16}
        and any(other.name.bf16 != shard.name.bf16 for other in tag.of(Part.OPTIMIZER))
    )


def _whole(tag: Tag) -> dict[str, tuple[int, ...]]:
    """The weights of a run without ZeRO, buffers left out."""
    found: dict[str, tuple[int, ...]] = {}
    for shard in tag.of(Part.MODEL):
        module, buffers = at(shard.file.content, "module"), at(shard.file.content, "buffer_names")
        known = buffers if isinstance(buffers, list) else []
        if isinstance(module, dict):
            found.update({str(n): t.shape for n, t in module.items() if isinstance(t, Tensor) and n not in known})
    return found
