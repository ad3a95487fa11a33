"""The parameters of a tag against a model: frozen ones and buffers, names and shapes, and what a run must have beside the files.

As real ranks of DeepSpeed 0.19.8 did: ``load_module_state_dict`` is called for no universal checkpoint (engine.py,
``_load_checkpoint``), and of its folder ``zero/`` the optimizer reads what it trains, whatever else the converter put there.
"""

import _compat_pickle
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.checkpoint.facts import PARTITIONED, Examined, Shapes, buffers_of, shapes_of
from dsdoctor.checkpoint.folder import Part, Shard
from dsdoctor.checkpoint.inert_pickle import ODDLY, Call, Tensor, at, is_loadable
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more, counted
from dsdoctor.rules import book

NOTES = 2
"""The stage from which on save_checkpoint notes frozen parameters: engine.py, zero_optimization_partition_gradients."""
ADAPTER = re.compile(r"(.+)\.lora_(?:embedding_)?A(?:\.|$)")
"""A LoRA parameter of PEFT: group 1 is the layer that it adapts, whose own weight is called base_layer.weight, or weight."""
MAX_SHOWN = 4
OLD_NAMES = {name.partition(".")[0] for name in _compat_pickle.IMPORT_MAPPING}
"""Modules by the names that they had in Python 2, under which torch.save writes them: __builtin__.set."""
AT_HAND = {"torch", "deepspeed", "numpy", *sys.stdlib_module_names, *OLD_NAMES} - {"__main__"}
"""Packages that every run with DeepSpeed has."""
MAX_SHAPES_NAMED = 6
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "model.", "transformer.")
"""What wrappers of a model (compile, LoRA, a class of one's own) put before the names."""


def only_in_module(examined: Examined, shard: Shard) -> list[str]:
    """The frozen parameters that stand in the module only: below stage 2 DeepSpeed saves no other record of them."""
    content = shard.file.content
    module, shared = at(content, "module"), at(content, "shared_params")
    if not isinstance(module, dict) or shapes_of(content) is None:
        return []
    known = {
        *examined.parameters,
        *examined.frozen,
        *(shared if isinstance(shared, dict) else ()),
        *buffers_of(content),
    }
    return [str(name) for name in module if name not in known and "expert" not in str(name)]


def frozen_names(examined: Examined) -> tuple[str, ...]:
    """The frozen parameters that are in a tag, as far as its files tell them from others: without ZeRO they do not."""
    found = dict.fromkeys(examined.frozen)
    if (examined.facts.stage or PARTITIONED) < PARTITIONED:
        found.update(
            dict.fromkeys(name for shard in examined.tag.of(Part.MODEL) for name in only_in_module(examined, shard))
        )
    return tuple(found)


def names_in_module(examined: Examined) -> set[str]:
    """Every name in the module of a tag, and every parameter that is saved beside it."""
    modules = [at(shard.file.content, "module") for shard in examined.tag.of(Part.MODEL)]
    names = {str(name) for module in modules if isinstance(module, Mapping) for name in module}
    return names | {*examined.parameters, *examined.frozen}


def without_frozen(examined: Examined) -> bool:
    """Whether frozen parameters were excluded when it was saved: by DeepSpeed's note, or because what must be there is not."""
    models = [shard.file.content for shard in examined.tag.of(Part.MODEL)]
    if (examined.facts.stage or 0) >= NOTES:
        return any(_says_nothing_of_frozen(content) for content in models)
    return any(_lacks_a_base(at(content, "module"), at(content, "shared_params")) for content in models)


def says_nothing(examined: Examined) -> bool:
    """Whether no file says if frozen parameters were excluded: below stage 2, where none is seen."""
    facts = examined.facts
    below = facts.stage is not None and facts.stage < NOTES and not facts.layers
    return below and not without_frozen(examined) and not frozen_names(examined)


def _says_nothing_of_frozen(content: object) -> bool:
    """DeepSpeed writes an empty dictionary for a model without frozen parameters, and None where they are excluded."""
    items = content.items if isinstance(content, Call) else content
    return isinstance(items, dict) and "frozen_param_shapes" in items and at(content, "frozen_param_shapes") is None


def _lacks_a_base(module: Any, shared: Any) -> bool:
    """Whether an adapter stands there without the layer that it adapts, or a parameter's second name without the first."""
    if not isinstance(module, Mapping):
        return False
    if isinstance(shared, Mapping) and any(name in module and first not in module for name, first in shared.items()):
        return True
    layers = {found[1] for name in module if (found := ADAPTER.match(str(name)))}
    return any(not _has_base(module, layer) for layer in layers)


def _has_base(module: Mapping[Any, Any], layer: str) -> bool:
    return any(f"{layer}.{name}" in module for name in ("base_layer.weight", "weight", "base_layer.qweight", "qweight"))


def buffer_names(examined: Examined) -> tuple[str, ...]:
    """The buffers that are in a tag."""
    for shard in examined.tag.of(Part.MODEL)[:1]:
        module, names = at(shard.file.content, "module"), at(shard.file.content, "buffer_names")
        if isinstance(module, Mapping) and isinstance(names, list):
            there = (name for name in names if isinstance(name, str))
            return tuple(name for name in there if isinstance(module.get(name), Tensor))
    return ()


def left_by_universal(examined: Examined) -> str:
    """What a universal load leaves as the model was made, as words; "" for nothing."""
    frozen, buffers = frozen_names(examined), buffer_names(examined)
    told = [
        *([book.phrase("checkpoint", "frozen-excluded")] if without_frozen(examined) else []),
        *([f"{counted(len(frozen), 'frozen parameter')} ({and_more(frozen, MAX_SHOWN)})"] if frozen else []),
        *([f"{counted(len(buffers), 'buffer')} ({and_more(buffers, MAX_SHOWN)})"] if buffers else []),
    ]
    return " and ".join(told)


def judge_universal_load(examined: Examined) -> Iterator[Finding]:
    """A universal load that succeeds. Buffers alone are a note: most are constants that every model is made with."""
    left = left_by_universal(examined)
    if not examined.facts.universal or not left:
        return
    tag = examined.tag.folder
    has_frozen = bool(frozen_names(examined)) or without_frozen(examined)
    converted_from = tag.name.removesuffix("_universal")
    yield book.finding(
        "checkpoint-universal-leaves",
        Severity.WARNING if has_frozen else Severity.NOTE,
        case="" if converted_from != tag.name and not without_frozen(examined) else "without-source",
        evidence=("from a universal checkpoint, engine.py loads only the trained parameters, from its folder zero/",),
        left=left,
        tag=tag.name,
        folder=str(examined.folder.path),
        source=converted_from,
    )


def judge_conditions(examined: Examined) -> tuple[Finding, ...]:
    """What load_checkpoint asks for that the files do not have."""
    return (*_foreign_classes(examined), *_frozen_excluded(examined))


def _foreign_classes(examined: Examined) -> Iterator[Finding]:
    needed: dict[str, str] = {}
    for shard in examined.tag.shards:
        for name in sorted(shard.file.names):
            if name.partition(".")[0] not in AT_HAND and not name.endswith(ODDLY):
                needed.setdefault(name, shard.file.path.name)
    if needed:
        yield book.finding(
            "checkpoint-needs-classes",
            Severity.WARNING,
            evidence=[f"{name} in {file}" for name, file in list(needed.items())[:6]],
            tag=examined.tag.folder.name,
            classes=and_more(tuple(needed), 3),
        )


def doubts(examined: Examined) -> str:
    """Why torch.load may refuse a file of a tag: it calls or fills something in another form than its makers, or names something of
    torch, DeepSpeed, numpy or Python that is not known to be there. "" for no reason."""
    for file in examined.tag.files:
        found = [name for name in sorted(file.names) if name.endswith(ODDLY)]
        at_hand = (name for name in sorted(file.names) if name not in found and name.partition(".")[0] in AT_HAND)
        found += [name for name in at_hand if not is_loadable(name)]
        if found:
            return f"torch.load may refuse {file.path.name}, which holds {and_more(found, 3)}"
    return ""


def _frozen_excluded(examined: Examined) -> Iterator[Finding]:
    if without_frozen(examined) and not examined.facts.universal:
        yield book.finding(
            "checkpoint-frozen-excluded",
            Severity.WARNING,
            evidence=(
                f"it holds {len(examined.parameters)} trained parameters",
                "load_checkpoint raises 'Missing key(s) in state_dict' if the model has frozen parameters",
                "with load_module_strict=False it loads silently, and frozen parameters are random unless a base model was loaded",
            ),
            tag=examined.tag.folder.name,
        )


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """A model: its class, and the shape of each parameter, those of a second name too."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]


def not_comparable(examined: Examined) -> str:
    """Why the names or shapes of a tag are others than the model's, "" where they are not."""
    facts = examined.facts
    if facts.layers or (facts.pipeline or 1) > 1:
        return "a pipeline's checkpoint names parameters by layer number"
    if (facts.tensor or 1) > 1:
        return "its tensors are sharded across ranks"
    return "its experts have DeepSpeed's own names" if facts.experts else ""


def judge_model(examined: Examined, model: ModelShapes) -> Iterator[Finding]:
    """What load_checkpoint would fail by, in a run with this model."""
    saved = shapes_in(examined)
    added, taken = _wrapper(saved, model.shapes)
    wanted = {f"{added}{each.removeprefix(taken)}": shape for each, shape in model.shapes.items()}
    lines = list(_differences(saved, wanted, examined))
    name = examined.tag.folder.name
    if lines:
        yield book.finding(
            "checkpoint-model-differs",
            Severity.ERROR,
            evidence=lines,
            tag=name,
            model=model.name,
            saved=f"{len(saved):,}",
            expected=f"{len(model.shapes):,}",
        )
    elif added or taken:
        yield book.finding(
            "checkpoint-model-differs",
            Severity.NOTE,
            case="prefix-added" if added else "prefix-missing",
            tag=name,
            model=model.name,
            prefix=repr(added or taken),
        )


def shapes_in(examined: Examined) -> dict[str, tuple[int, ...]]:
    """Every parameter that a tag holds or speaks of, buffers left out; second names too."""
    found = {**examined.parameters, **examined.frozen}
    for shard in examined.tag.of(Part.MODEL)[:1]:
        content = shard.file.content
        module, buffers = at(content, "module"), buffers_of(content)
        whole = (examined.facts.stage or 0) < PARTITIONED
        for name, tensor in module.items() if isinstance(module, dict) and whole else ():
            if isinstance(tensor, Tensor) and name not in buffers:
                found.setdefault(str(name), tensor.shape)
        shared = at(content, "shared_params")
        for copy, original in shared.items() if isinstance(shared, dict) else ():
            if original in found:
                found.setdefault(str(copy), found[original])
    return found


def _wrapper(saved: Shapes, wanted: Shapes) -> tuple[str, str]:
    """What stands before all names of the checkpoint and not before the model's ("module."), and the other way round."""
    if set(saved) & set(wanted):
        return "", ""
    for prefix in WRAPPERS:
        if any(f"{prefix}{name}" in saved for name in wanted):
            return prefix, ""
        if any(f"{prefix}{name}" in wanted for name in saved):
            return "", prefix
    return "", ""


def _differences(saved: Shapes, wanted: Shapes, examined: Examined) -> Iterator[str]:
    other = [
        f"{name} is {_shape(saved[name])} there and {_shape(shape)} in the model"
        for name, shape in wanted.items()
        if name in saved and saved[name] != tuple(shape)
    ]
    yield from other[:MAX_SHAPES_NAMED]
    if len(other) > MAX_SHAPES_NAMED:
        yield f"and {len(other) - MAX_SHAPES_NAMED} more have other shapes"
    lacking = tuple(name for name in wanted if name not in saved)
    if lacking and not without_frozen(examined):
        yield f"only the model has: {and_more(lacking, MAX_SHAPES_NAMED)}"
    more = tuple(name for name in saved if name not in wanted)
    if more:
        yield f"only the checkpoint has: {and_more(more, MAX_SHAPES_NAMED)}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
