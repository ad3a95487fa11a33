"""A tag that was read -> the facts that a judgement needs, each None where the files do not say it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.checkpoint.archive import Archive
from dsdoctor.checkpoint.inert import Call, Tensor
from dsdoctor.checkpoint.look import Shard, Tag
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.values import number_of
from dsdoctor.checkpoint.walk import at

STATE = "optimizer_state_dict"
Shapes = Mapping[str, tuple[int, ...]]


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
    counts = [_count(at(state, "partition_count")) for state in optimizers]
    experts = _first(at(content, "num_experts") for content in models)
    return Facts(
        version=_text(_first(at(content, "ds_version") for content in models)),
        step=_number(_first(at(content, "global_steps") for content in models)),
        stage=_stage(tag, optimizers, config),
        dtype=_dtype(tag, config),
        data=_number(_first(at(content, "dp_world_size") for content in models)),
        model=_number(_first(at(content, "mp_world_size") for content in models)),
        pipeline=_number(_first(at(content, "checkpoint_parallel_dimensions", "pp_degree") for content in models)),
        tensor=_number(_first(at(content, "checkpoint_parallel_dimensions", "tp_degree") for content in models)),
        partitions=_first(iter(counts)),
        bf16=any(shard.name.bf16 for shard in tag.of(Part.OPTIMIZER)),
        sharded_optimizer=bool(tag.of(Part.OPTIMIZER)),
        layers=bool(tag.of(Part.LAYER)),
        experts=tuple(each for each in experts if isinstance(each, int)) if isinstance(experts, list) else (),
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
    return int(number) if isinstance(number, int | float) and math.isfinite(number) else None


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


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _is_shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and isinstance(shape, tuple)
        and all(isinstance(size, int) and size >= 0 for size in shape)
        for name, shape in value.items()
    )
