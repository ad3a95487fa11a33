"""A tag -> which frozen parameters and buffers are in it, and which of them a load that succeeds leaves as the model was made.

As real ranks of DeepSpeed 0.19.8 did: ``load_module_state_dict`` is called for no universal checkpoint (engine.py,
``_load_checkpoint``), and of its folder ``zero/`` the optimizer reads what it trains, whatever else the converter put there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsdoctor.checkpoint.contents import shapes_of
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.inert import Call, Tensor
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.walk import at
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.text import and_more

NOTES = 2
"""The stage from which on save_checkpoint notes frozen parameters: engine.py, zero_optimization_partition_gradients."""
ADAPTER = re.compile(r"(.+)\.lora_(?:embedding_)?A(?:\.|$)")
"""A LoRA parameter of PEFT: group 1 is the layer that it adapts, whose own weight is called base_layer.weight, or weight."""
MOST = 4


def only_in_module(examined: Examined, shard: Shard) -> list[str]:
    """The frozen parameters that stand in the module only: below stage 2 DeepSpeed saves no other record of them."""
    content = shard.file.content
    module, shared, buffers = (at(content, name) for name in ("module", "shared_params", "buffer_names"))
    if not isinstance(module, dict) or shapes_of(content) is None:
        return []
    known = {*examined.parameters, *examined.frozen, *(shared or ()), *(buffers or ())}
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
            return tuple(str(name) for name in names if isinstance(module.get(name), Tensor))
    return ()


def left_by_universal(examined: Examined) -> str:
    """What a universal load leaves as the model was made, as words; "" for nothing."""
    frozen, buffers = frozen_names(examined), buffer_names(examined)
    told = [
        *(
            ["any frozen parameters of the model, which were excluded when it was saved,"]
            if without_frozen(examined)
            else []
        ),
        *([f"{_many(frozen, 'frozen parameter')} ({and_more(frozen, MOST)})"] if frozen else []),
        *([f"{_many(buffers, 'buffer')} ({and_more(buffers, MOST)})"] if buffers else []),
    ]
    return " and ".join(told)


def judge_universal_load(examined: Examined) -> Iterator[Finding]:
    """A universal load that succeeds. Buffers alone are a note: most are constants that every model is made with."""
    left = left_by_universal(examined)
    if not examined.facts.universal or not left:
        return
    tag = examined.tag.folder
    has_frozen = bool(frozen_names(examined)) or without_frozen(examined)
    yield (Finding.warning if has_frozen else Finding.note)(
        "checkpoint-universal-leaves",
        f"a universal load of {tag.name} leaves {left} as the model was made",
        evidence=(
            "engine.py loads the module of no universal checkpoint, and of its folder zero/ what the optimizer trains alone",
        ),
        fix="load them into the model before deepspeed.initialize: of the base model, or of the tag that it was made of",
        steps=(
            step(
                "python -m dsdoctor checkpoint {folder} --tag {tag} --merge OUT",
                folder=str(examined.folder.path),
                tag=made_of,
            ),
        )
        if (made_of := tag.name.removesuffix("_universal")) != tag.name and not without_frozen(examined)
        else (),
    )


def _many(names: tuple[str, ...], what: str) -> str:
    return f"{len(names):,} {what}{'s' * (len(names) > 1)}"
