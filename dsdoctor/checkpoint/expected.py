"""The facts of a tag -> the names of the files that it must have, and what its universal folder must hold."""

from collections import Counter
from collections.abc import Iterator

from dsdoctor.checkpoint.contents import shapes_of
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.look import GROUPS, UNIVERSAL
from dsdoctor.checkpoint.names import Part, expert_name, layer_name, model_name, optimizer_name


def missing_files(examined: Examined) -> tuple[str, ...]:
    """Files that are not there and must be, each once, in order."""
    there = set(examined.tag.folder.files)
    wanted = _universal(examined) if examined.facts.universal else _sharded(examined)
    return tuple(dict.fromkeys(name for name in wanted if name not in there))


def _sharded(examined: Examined) -> Iterator[str]:
    facts = examined.facts
    ranks = range(facts.partitions or facts.data or 0)
    for model in _model_ranks(examined):
        if facts.stage is not None and facts.stage >= PARTITIONED:
            yield from (model_name(data, model) for data in ranks)
        else:
            yield model_name(None, model)
        if examined.optimizer and (facts.sharded_optimizer or (facts.stage or 0) > 0):
            bf16 = facts.bf16 if facts.sharded_optimizer else facts.dtype == "bf16"
            names = (optimizer_name(data, model, bf16=bf16) for data in ranks)
            yield from (name for name in names if name.replace("_optim", "optim") not in examined.tag.folder.files)
    yield from _experts(examined)
    yield from _layers(examined)


def _model_ranks(examined: Examined) -> range:
    if examined.facts.model is not None:
        return range(examined.facts.model)
    seen = [shard.name.model for shard in examined.tag.shards if shard.name.model is not None]
    return range(max(seen, default=0) + 1)


def _experts(examined: Examined) -> Iterator[str]:
    """Each expert of each MoE layer; where tensors are cut up too, only what the other experts have."""
    seen = {shard.name.model or 0 for shard in examined.tag.of(Part.EXPERT)} or {0}
    for layer, count in enumerate(examined.facts.experts):
        yield from (expert_name(layer, expert, model) for expert in range(count) for model in sorted(seen))
    ranks = {shard.name.expert or 0 for shard in examined.tag.of(Part.EXPERT_OPTIMIZER)}
    without = examined.facts.experts and examined.facts.stage == 0
    for rank in range(max(ranks, default=0) + 1 if ranks or without else 0):
        yield f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def _layers(examined: Examined) -> Iterator[str]:
    """A pipeline's layers, by the numbers that its trainable parameters begin with."""
    if not examined.facts.layers:
        return
    models = sorted(
        {shard.name.model for shard in examined.tag.of(Part.LAYER)}, key=lambda each: -1 if each is None else each
    )
    first = {name.partition(".")[0] for name in examined.parameters}
    for layer in sorted(int(each) for each in first if each.isdecimal()):
        yield from (layer_name(layer, model) for model in models)


def _universal(examined: Examined) -> Iterator[str]:
    """The states of a universal tag: of stage 3 the first rank's are read, whatever there are."""
    if examined.facts.stage is not None and examined.facts.stage >= PARTITIONED:
        yield from (model_name(0, model) for model in _model_ranks(examined))
    else:
        yield from (model_name(None, model) for model in _model_ranks(examined))


def missing_states(examined: Examined) -> tuple[str, ...]:
    """Files that a universal tag lacks: the optimizer's groups, and of a trainable parameter what most others have."""
    without = examined.facts.universal and examined.tag.groups is None
    return (*((f"{UNIVERSAL}/{GROUPS}",) if without else ()), *_missing_of_parameters(examined))


def _missing_of_parameters(examined: Examined) -> tuple[str, ...]:
    folders = {
        parameter.name: {file.path.name for file in parameter.files} for parameter in examined.tag.parameters or ()
    }
    groups = [group for shard in examined.tag.of(Part.MODEL) for group in shapes_of(shard.file.content) or ()]
    trained = list(dict.fromkeys(name for group in groups for name in group))
    counted = Counter(file for name in trained for file in folders.get(name, ()))
    usual = sorted(file for file, times in counted.items() if times * 2 > len(trained))
    if not usual:
        return ()
    return tuple(f"zero/{name}/{file}" for name in trained for file in usual if file not in folders.get(name, ()))
