"""A tag and a model's shapes -> parameters that one of them has and the other has not, and other shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsdoctor.checkpoint.contents import Shapes
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.frozen import without_frozen
from dsdoctor.checkpoint.inert import Tensor
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.walk import at
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more

MOST = 6
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "model.", "transformer.")
"""What wrappers of a model (compile, LoRA, a class of one's own) put before the names."""


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """A model: its class, and the shape of each parameter, those of a second name too."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]


def not_comparable(examined: Examined) -> str:
    """Why the names or shapes of a tag are others than the model's, "" where they are not."""
    facts = examined.facts
    if facts.layers or (facts.pipeline or 1) > 1:
        return "the names in a pipeline's checkpoint are numbers of layers"
    if (facts.tensor or 1) > 1:
        return "its tensors are cut over several ranks"
    return "its experts have names of DeepSpeed's own" if facts.experts else ""


def judge_model(examined: Examined, model: ModelShapes) -> Iterator[Finding]:
    """What load_checkpoint would fail by, in a run with this model."""
    saved = shapes_in(examined)
    added, taken = _wrapper(saved, model.shapes)
    wanted = {f"{added}{each.removeprefix(taken)}": shape for each, shape in model.shapes.items()}
    lines = list(_differences(saved, wanted, examined))
    name = examined.tag.folder.name
    if lines:
        yield Finding.error(
            "checkpoint-model-differs",
            f"{name} is not of this {model.name}: {len(saved):,} parameters there, {len(model.shapes):,} in the model",
            evidence=lines,
            fix="load it into the model that it was written from: the same layers, vocabulary and wrappers",
        )
    elif added or taken:
        told = f"with {added!r} before them" if added else f"without {taken!r} before them"
        yield Finding.note(
            "checkpoint-model-differs",
            f"all parameters of {name} are those of this {model.name}, {told}: the run needs the same wrapper",
        )


def shapes_in(examined: Examined) -> dict[str, tuple[int, ...]]:
    """Every parameter that a tag holds or speaks of, buffers left out; second names too."""
    found = {**examined.parameters, **examined.frozen}
    for shard in examined.tag.of(Part.MODEL)[:1]:
        content = shard.file.content
        module, buffers = at(content, "module"), at(content, "buffer_names") or ()
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
    yield from other[:MOST]
    if len(other) > MOST:
        yield f"and {len(other) - MOST} more have other shapes"
    lacking = tuple(name for name in wanted if name not in saved)
    if lacking and not without_frozen(examined):
        yield f"the model has, and it lacks: {and_more(lacking, MOST)}"
    more = tuple(name for name in saved if name not in wanted)
    if more:
        yield f"it has, and the model lacks: {and_more(more, MOST)}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
