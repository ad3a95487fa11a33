"""A pipeline's tag -> the weights of all its layers, by the names that PipelineModule gives them ("3.weight")."""

from collections.abc import Iterator

from dsdoctor.checkpoint.examine import Examined
from dsdoctor.checkpoint.flat_weights import Found, trained, whole
from dsdoctor.checkpoint.inert import Tensor
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.walk import tensors

TIED = "tied_modules."
"""Layers that several stages share stand under this name, and in the file of each layer that uses them."""


def pipeline_weights(examined: Examined) -> Iterator[Found]:
    """fp32 weights of the optimizer where it has them, and of the layers' files what else they hold: buffers, frozen ones."""
    known: dict[str, tuple[int, ...]] = {}
    for name, shape, dtype, pieces in trained(examined) if examined.facts.stage else ():
        # a tied layer is trained in each stage that has it, and is the same there
        if name not in known:
            yield name, shape, dtype, pieces
        known[name] = shape
    for shard in examined.tag.of(Part.LAYER):
        for name, tensor in _of_layer(shard):
            if name not in known and not _is_tied(name, tensor, known):
                yield name, tensor.shape, tensor.dtype, (whole(shard.file, name, tensor),)


def _of_layer(shard: Shard) -> Iterator[tuple[str, Tensor]]:
    for way, tensor in tensors(shard.file.content):
        yield f"{shard.name.layer}.{'.'.join(map(str, way))}", tensor


def _is_tied(name: str, tensor: Tensor, known: dict[str, tuple[int, ...]]) -> bool:
    inner = name.partition(".")[2]
    return any(
        other.startswith(TIED) and other.endswith(f".{inner}") and shape == tensor.shape
        for other, shape in known.items()
    )
