"""A tag that was read -> the facts that a judgement needs, each None where the files do not say it.

What is judged together: the folder, one tag of it with its facts, and the trainable parameters.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsdoctor.checkpoint.folder import Folder, Part, Shard, Tag
from dsdoctor.checkpoint.inert_pickle import Call, Tensor, at, is_shape
from dsdoctor.checkpoint.tensor_bytes import number_of
from dsdoctor.checkpoint.torch_file import Archive

STATE = "optimizer_state_dict"
MAX_RANKS = 100_000
Shapes = Mapping[str, tuple[int, ...]]
PARTITIONED = 3
"""The stage from which on the weights are cut up too."""
RANKS, STAGE, TYPE = "ranks", "a stage", "a type"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a tag says of the run that wrote it.

    ``data``: data-parallel ranks, ``model``: model-parallel ones (``pipeline`` x ``tensor`` where both are known).
    ``partitions``: how many ranks share the optimizer's states. ``bf16``: whether the names of the optimizer's files say so.
    ``cut_by_deepspeed``: whether its tensors were cut by DeepSpeed itself (``tensor_parallel.autotp_size``), not by the model.
    ``without_step``: whether ``elastic_checkpoint`` left the optimizer's step out. ``trained``: whether the
    engine had an optimizer. ``experts``: how many each MoE layer has, () for none.
    ``frozen``: whether frozen parameters are saved beside the trained ones, as from stage 2 on.
    ``dtype``: of the training, "" where nothing says it.
    """

    version: str | None = None
    step: int | None = None
    stage: int | None = None
    dtype: str = ""
    data: int | None = None
    model: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    partitions: int | None = None
    bf16: bool = False
    sharded_optimizer: bool = False
    layers: bool = False
    experts: tuple[int, ...] = ()
    universal: bool = False
    injected: bool = False
    cut_by_deepspeed: bool = False
    trained: bool = True
    without_step: bool = False
    frozen: bool = False

    @property
    def world(self) -> int | None:
        """All ranks."""
        return None if self.data is None or self.model is None else self.data * self.model


def facts_of(tag: Tag) -> Facts:
    """The facts, of whatever files can be read: a shard that is gone takes none with it that another one has."""
    models = [shard.file.content for shard in tag.of(Part.MODEL)]
    optimizers = [at(shard.file.content, STATE) for shard in tag.of(Part.OPTIMIZER)]
    config = _first(at(content, "ds_config") for content in models)
    counts = [_ranks(_count(at(state, "partition_count"))) for state in optimizers]
    experts = _first(at(content, "num_experts") for content in models)
    return Facts(
        version=_text(_first(at(content, "ds_version") for content in models)),
        step=_number(_first(at(content, "global_steps") for content in models)),
        stage=_stage(tag, optimizers, config),
        dtype=_dtype(tag, config),
        data=_ranks(_first(at(content, "dp_world_size") for content in models)),
        model=_ranks(_first(at(content, "mp_world_size") for content in models)),
        pipeline=_ranks(_first(at(content, "checkpoint_parallel_dimensions", "pp_degree") for content in models)),
        tensor=_ranks(_first(at(content, "checkpoint_parallel_dimensions", "tp_degree") for content in models)),
        partitions=_first(iter(counts)),
        bf16=any(shard.name.bf16 for shard in tag.of(Part.OPTIMIZER)),
        sharded_optimizer=bool(tag.of(Part.OPTIMIZER)),
        layers=bool(tag.of(Part.LAYER)),
        experts=tuple(_ranks(each) or 0 for each in experts) if isinstance(experts, list) else (),
        universal=tag.parameters is not None,
        injected=any(at(content, "universal_checkpoint_info") is not None for content in models),
        cut_by_deepspeed=(_number(at(config, "tensor_parallel", "autotp_size")) or 1) > 1,
        trained=not any(_says_no_optimizer(content) for content in models) or bool(tag.of(Part.OPTIMIZER)),
        frozen=any(frozen_of(content) for content in models),
        without_step=any(_says_no_step(state) for state in optimizers),
    )


def _says_no_step(state: Any) -> bool:
    """With elastic_checkpoint the optimizer's states are a list, and its step stands beside them where each group has one."""
    return isinstance(at(state, "base_optimizer_state"), list) and at(state, "base_optimizer_state_step") is None


def _says_no_optimizer(content: Any) -> bool:
    """Without ZeRO the model's file has the optimizer's states. Experts have files of their own for them."""
    none = isinstance(content, dict) and "optimizer" in content and content["optimizer"] is None
    return none and content.get("param_shapes") is None and not content.get("num_experts")


def groups_of(shard: Shard) -> list[Tensor] | None:
    """The flat fp32 weights in a rank's optimizer states; None where they are not what DeepSpeed writes."""
    state = at(shard.file.content, STATE)
    groups = at(state, "single_partition_of_fp32_groups") or at(state, "fp32_flat_groups")
    if isinstance(groups, list) and all(isinstance(each, Tensor) for each in groups):
        return groups
    return None


def shapes_of(content: Any) -> list[Shapes] | None:
    """The trainable parameters of each group, in the order in which the flat weights hold them."""
    groups = at(content, "param_shapes")
    return [dict(group) for group in groups] if isinstance(groups, list) and all(map(_is_shapes, groups)) else None


def frozen_of(content: Any) -> Shapes:
    """The frozen parameters that are saved beside them."""
    shapes = at(content, "frozen_param_shapes")
    return shapes if _is_shapes(shapes) else {}


def buffers_of(content: Any) -> frozenset[str]:
    """The names of the model's buffers."""
    names = at(content, "buffer_names")
    return (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list | tuple) else frozenset()
    )


def optimizer_steps(file: Archive) -> int | None:
    """How many steps an optimizer has made, by its own count; the largest where parameters differ."""
    state = at(file.content, STATE)
    base = at(state, "base_optimizer_state") or at(state, STATE)
    found = [_step_value(file, at(each, "step")) for each in _states(base)]
    return max((each for each in found if each is not None), default=None)


def _states(base: Any) -> Iterator[Any]:
    states = at(base, "state")
    yield from states.values() if isinstance(states, dict) else ()
    groups = at(base, "param_groups")
    yield from groups if isinstance(groups, list) else ()


def _step_value(file: Archive, value: Any) -> int | None:
    number = number_of(file, value) if isinstance(value, Tensor) else value
    if isinstance(number, float):
        return int(number) if math.isfinite(number) else None
    return _number(number)


def _stage(tag: Tag, optimizers: list[Any], config: Any) -> int | None:
    """By the optimizer's own word, the configuration's, and for the rest by which files there are."""
    saved: int | None = _first(_enum(at(state, "zero_stage")) for state in optimizers)
    if saved is not None:
        return saved
    named = at(config, "zero_optimization", "stage")
    if isinstance(named, int):
        return named
    if any(shard.name.data is not None for shard in tag.of(Part.MODEL)):
        return 3
    whole = any(at(shard.file.content, "optimizer") is not None for shard in tag.of(Part.MODEL))
    return 0 if whole and not optimizers else None


def _dtype(tag: Tag, config: Any) -> str:
    if any(shard.name.bf16 for shard in tag.of(Part.OPTIMIZER)):
        return "bf16"
    if is_bf16(config):
        return "bf16"
    if at(config, "fp16", "enabled") is True:
        return "fp16"
    return "fp32" if isinstance(config, dict) else ""


def is_bf16(config: Any) -> bool:
    """Whether a configuration trains in bf16, which the names of the optimizer's files then say."""
    return any(at(config, section, "enabled") is True for section in ("bf16", "bfloat16"))


def _first(values: Iterator[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _enum(value: Any) -> int | None:
    if isinstance(value, Call):
        value = value.arguments[0] if value.arguments else None
    return _number(value)


def _count(value: Any) -> int | None:
    if isinstance(value, list):
        return max((each for each in value if isinstance(each, int)), default=None)
    return _number(value)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ranks(value: Any) -> int | None:
    """A number of ranks or experts; None for one that no run can have."""
    number = _number(value)
    return number if number is not None and 0 < number <= MAX_RANKS else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _is_shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and is_shape(shape) for name, shape in value.items())


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
        return "its parameters differ"
    stages = (other.facts.stage, examined.facts.stage)
    if None not in stages and stages[0] != stages[1]:
        return f"it was saved at stage {stages[0]}, and the other one at stage {stages[1]}"
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
        module, buffers = at(shard.file.content, "module"), buffers_of(shard.file.content)
        if isinstance(module, dict):
            found.update({str(n): t.shape for n, t in module.items() if isinstance(t, Tensor) and n not in buffers})
    return found
