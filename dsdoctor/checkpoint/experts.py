"""A tag with experts -> each expert's weights by the name that it has in the whole model, with the pieces that hold them.

Each rank trains some experts and numbers them from 0; the experts' files have their numbers in the model. Ranks r, r + e, r + 2e
... of e expert-parallel ones share the optimizer's states of the same experts.
"""

import re
from collections.abc import Iterable, Iterator

from dsdoctor.checkpoint.contents import STATE
from dsdoctor.checkpoint.examine import Examined
from dsdoctor.checkpoint.flat_weights import Found, NotMerged, flats_of, is_of_experts, whole
from dsdoctor.checkpoint.inert import Call, Tensor
from dsdoctor.checkpoint.look import Shard
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.open_files import Piece
from dsdoctor.checkpoint.walk import at, tensors

NUMBERED = re.compile(r"(?P<before>.*\.deepspeed_experts\.)(?P<number>\d{1,7})(?P<after>\..*)")


def expert_weights(examined: Examined) -> Iterator[Found]:
    """Every tensor of every expert's file: its fp32 weights where the optimizer has them, else as it is saved. Raises NotMerged."""
    files = examined.tag.of(Part.EXPERT)
    held = _held(examined)
    saved = [(shard, ".".join(map(str, way)), tensor) for shard in files for way, tensor in tensors(shard.file.content)]
    experts = _counted(name for _, name, _ in saved)
    ours = _counted(held)
    for shard, name, tensor in saved:
        pieces = _pieces(name, held, ours, experts) if held else ()
        if pieces:
            yield name, tensor.shape, "F32", pieces
        else:
            yield name, tensor.shape, tensor.dtype, (whole(shard.file, name, tensor),)


def _counted(names: Iterable[str]) -> dict[str, int]:
    """How many experts each layer has, by the numbers in the names."""
    counts: dict[str, int] = {}
    for name in names:
        found = NUMBERED.fullmatch(name)
        if not found:
            raise NotMerged(f"{name} has no expert's number in its name")
        counts[found["before"]] = max(counts.get(found["before"], 0), int(found["number"]) + 1)
    return counts


Held = dict[str, dict[int, Piece]]
"""A parameter's name on its ranks -> rank -> its piece."""


def _held(examined: Examined) -> Held:
    models = examined.tag.of(Part.MODEL)
    if any(at(shard.file.content, "ds_config", "use_data_before_expert_parallelism") is True for shard in models):
        raise NotMerged("which ranks share an expert is turned round (use_data_before_expert_parallelism)")
    found: Held = {}
    for shard in examined.tag.of(Part.OPTIMIZER):
        mappings = at(shard.file.content, STATE, "param_slice_mappings")
        for group, mapping in enumerate(mappings if isinstance(mappings, list) else ()):
            if is_of_experts(shard, group) and isinstance(mapping, dict):
                flat = flats_of(shard)[group]
                for name, place in mapping.items():
                    found.setdefault(str(name), {})[shard.name.data or 0] = _piece(shard, flat, place)
    return found


def _piece(shard: Shard, flat: Tensor, place: object) -> Piece:
    state = place.state if isinstance(place, Call) else None
    start, count = at(state, "start"), at(state, "numel")
    if not isinstance(start, int) or not isinstance(count, int) or not 0 <= start <= start + count <= flat.count:
        raise NotMerged(f"{shard.file.path.name} does not say where its experts lie")
    return Piece(file=shard.file, key=flat.storage.key, start=flat.start + start, count=count)


def _pieces(name: str, held: Held, ours: dict[str, int], experts: dict[str, int]) -> tuple[Piece, ...]:
    """The pieces of an expert of the whole model; () where no optimizer trains it."""
    before, number, after = NUMBERED.fullmatch(name).groups()  # type: ignore[union-attr]
    if before not in ours:
        return ()
    expert_rank, local = divmod(int(number), ours[before])
    parallel = experts[before] // ours[before]
    there = held.get(f"{before}{local}{after}", {})
    return tuple(there[rank] for rank in sorted(there) if rank % parallel == expert_rank)
