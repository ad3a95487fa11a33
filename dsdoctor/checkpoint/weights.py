"""Where each weight of a tag lies in the ranks' files: which elements of which entry belong to which parameter.

The flat weights and optimizer states are divided by DeepSpeed's own arithmetic, and what is padding belongs to none. A pipeline's
tag has its layers by the names that PipelineModule gives them ("3.weight"). Each rank trains some experts and numbers them from 0;
the experts' files have their numbers in the model. Ranks r, r + e, r + 2e ... of e expert-parallel ones share the optimizer's
states of the same experts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.checkpoint.facts import PARTITIONED, STATE, Examined, buffers_of, frozen_of, groups_of, shapes_of
from dsdoctor.checkpoint.folder import Part, Shard
from dsdoctor.checkpoint.inert_pickle import ITEM_SIZES, Call, KeyPath, Tensor, at, count_of, tensors
from dsdoctor.checkpoint.tensor_bytes import Piece, can_convert, float_types
from dsdoctor.checkpoint.torch_file import Archive

FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups")
STATES = ("base_optimizer_state", STATE)
Pieces = dict[int, list[tuple[int, int, str]]]
Found = tuple[str, tuple[int, ...], str, tuple[Piece, ...]]
"""A tensor: its name, shape, type as it is saved, and its pieces in order."""
WEIGHTS = "fp32"
TIED = "tied_modules."
"""Layers that several stages share stand under this name, and in the file of each layer that uses them."""
NUMBERED = re.compile(r"(?P<before>.*\.deepspeed_experts\.)(?P<number>\d{1,7})(?P<after>\..*)")
Held = dict[str, dict[int, Piece]]
"""A parameter's name on its ranks -> rank -> its piece."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements of an entry of a file: ``what`` they are ("first.weight", "exp_avg of first.weight")."""

    key: str
    dtype: str
    start: int
    count: int
    what: str


def spans_of(examined: Examined, shard: Shard) -> Iterator[Span]:
    """The weights and the optimizer's states of one file. Buffers, which may be inf in health, are not among them."""
    content = shard.file.content
    if shard.part is Part.OPTIMIZER:
        yield from _of_flat(examined, shard)
        return
    if shard.part is Part.LAYER:
        yield from _of_layer(examined, shard)
        return
    buffers = buffers_of(content)
    for way, tensor in tensors(content):
        inside = shard.part is Part.EXPERT or (way and way[0] in {"module", "optimizer", "frozen_param_fragments"})
        if inside and way and tensor.in_one_piece and way[-1] not in buffers:
            yield _span(tensor, 0, tensor.count, _said(way))


def _of_layer(examined: Examined, shard: Shard) -> Iterator[Span]:
    """A pipeline's layer: no file says which of its tensors are buffers, so those that are trained are taken."""
    for way, tensor in tensors(shard.file.content):
        name = f"{shard.name.layer}.{'.'.join(map(str, way))}"
        if name in examined.parameters and tensor.in_one_piece:
            yield _span(tensor, 0, tensor.count, name)


def spans_of_universal(tensor_name: str, content: Any) -> Iterator[Span]:
    """The one tensor in a file of a universal checkpoint."""
    for _, tensor in tensors(content):
        if tensor.in_one_piece:
            yield _span(tensor, 0, tensor.count, tensor_name)


def _of_flat(examined: Examined, shard: Shard) -> Iterator[Span]:
    """Flat weights, and states of the same length beside them, by parameter."""
    layout = _layout(examined, shard)
    for way, tensor in tensors(at(shard.file.content, STATE)):
        state, group = _place(way)
        if state is None or not tensor.in_one_piece:
            continue
        known = layout.get(group, [])
        fits = known and max(start + count for start, count, _ in known) <= tensor.count
        for start, count, name in known if fits else [(0, 0 if tensor.count == 1 else tensor.count, f"group {group}")]:
            if count:
                yield _span(tensor, start, count, f"{state} of {name}")


def _place(way: KeyPath) -> tuple[str | None, int]:
    """What a tensor of an optimizer's states is, and of which group."""
    if len(way) >= 2 and way[0] in FLAT and isinstance(way[1], int):
        return "fp32 weights", way[1]
    if len(way) == 4 and way[0] in STATES and way[1] == "state" and isinstance(way[2], int):
        return str(way[3]), way[2]
    return None, 0


def _layout(examined: Examined, shard: Shard) -> Pieces:
    """For each group (start, elements, name) of the parameters in this rank's flat weights."""
    if examined.facts.stage is not None and examined.facts.stage >= PARTITIONED:
        return _layout3(examined, shard)
    mappings = at(shard.file.content, STATE, "param_slice_mappings")
    pieces: Pieces = {}
    for group, mapping in enumerate(mappings if isinstance(mappings, list) else ()):
        addresses = (
            [(_address(value), str(name)) for name, value in mapping.items()] if isinstance(mapping, dict) else []
        )
        pieces[group] = [(start, count, name) for (start, count), name in addresses]
    return pieces


def _address(value: Any) -> tuple[int, int]:
    """(start, elements) of DeepSpeed's fragment_address."""
    state = value.state if isinstance(value, Call) else None
    start, count = at(state, "start"), at(state, "numel")
    return (start, count) if isinstance(start, int) and isinstance(count, int) else (0, 0)


def _layout3(examined: Examined, shard: Shard) -> Pieces:
    """Stage 3: this rank's piece of each parameter after the other; the groups go on where the one before ends."""
    models = [each for each in examined.tag.of(Part.MODEL) if (each.name.model or 0) == (shard.name.model or 0)]
    shapes = shapes_of(models[0].file.content) if models else None
    groups = at(shard.file.content, STATE, "fp32_flat_groups")
    world, rank = examined.facts.partitions, shard.name.data
    if shapes is None or not isinstance(groups, list) or not world or rank is None:
        return {}
    pieces: Pieces = {number: [] for number in range(len(groups))}
    ends = _ends(groups)
    offset = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        whole = count_of(shape)
        share = -(-whole // world)
        mine = max(0, min(share, whole - rank * share))
        for number, (begin, end) in enumerate(ends):
            low, high = max(offset, begin), min(offset + mine, end)
            if low < high:
                pieces[number].append((low - begin, high - low, name))
        offset += share
    return pieces


def _ends(groups: list[Any]) -> list[tuple[int, int]]:
    made, offset = [], 0
    for group in groups:
        count = group.count if isinstance(group, Tensor) else 0
        made.append((offset, offset + count))
        offset += count
    return made


def _span(tensor: Tensor, start: int, count: int, what: str) -> Span:
    return Span(key=tensor.storage.key, dtype=tensor.dtype, start=tensor.start + start, count=count, what=what)


def _said(way: KeyPath) -> str:
    if way[0] in {"module", "frozen_param_fragments"}:
        return ".".join(map(str, way[1:]))
    return ".".join(map(str, way))


class NotMerged(Exception):
    """What cannot be merged, and why."""


def trained(examined: Examined, state: str = WEIGHTS) -> Iterator[Found]:
    """Every trained parameter's weights, or a state of its optimizer ("exp_avg"). Experts are left out. Raises NotMerged."""
    for model in sorted({shard.name.model or 0 for shard in examined.tag.of(Part.MODEL)}):
        models = [shard for shard in examined.tag.of(Part.MODEL) if (shard.name.model or 0) == model]
        ranks = [shard for shard in examined.tag.of(Part.OPTIMIZER) if (shard.name.model or 0) == model]
        if not ranks:
            raise NotMerged(f"no file has the optimizer's states of model-parallel rank {model}")
        if (examined.facts.stage or 0) >= PARTITIONED:
            yield from _partitioned(models, ranks, state)
        else:
            yield from _flat(models[0].file, ranks, state)


def _flat(model: Archive, ranks: list[Shard], state: str) -> Iterator[Found]:
    """Stages 1 and 2: the ranks' flat weights follow each other, and the parameters lie in them one after the other."""
    groups = [flats_of(shard, state) for shard in ranks]
    paddings = at(ranks[0].file.content, STATE, "param_alignment_paddings")
    for number, shapes in enumerate(shapes_of(model.content) or ()):
        if is_of_experts(ranks[0], number):
            continue
        if any(len(group) <= number for group in groups):
            raise NotMerged(f"a rank has no {state} of group {number}")
        flat = [(shard.file, group[number]) for shard, group in zip(ranks, groups, strict=True)]
        offset = 0
        for place, (name, shape) in enumerate(shapes.items()):
            count = count_of(shape)
            yield name, shape, flat[0][1].dtype, tuple(within(flat, offset, count))
            padding = at(paddings, number, place)
            offset += count + (padding if isinstance(padding, int) else 0)


def _partitioned(models: list[Shard], ranks: list[Shard], state: str) -> Iterator[Found]:
    """Stage 3: each rank holds its share of each parameter; the last one is padded."""
    shapes = {name: shape for group in shapes_of(models[0].file.content) or () for name, shape in group.items()}
    flats = [[(shard.file, tensor) for tensor in flats_of(shard, state)] for shard in ranks]
    offset = 0
    for name, shape in shapes.items():
        count = count_of(shape)
        share = -(-count // len(ranks))
        found: list[Piece] = []
        for rank, flat in enumerate(flats):
            found += within(flat, offset, max(0, min(share, count - rank * share)))
        yield name, shape, flats[0][0][1].dtype, tuple(found)
        offset += share


def is_of_experts(shard: Shard, group: int) -> bool:
    """Whether a group of flat weights is of experts, which not all ranks share."""
    return at(_base(shard), "param_groups", group, "moe") is True


def flats_of(shard: Shard, state: str = WEIGHTS) -> list[Tensor]:
    """The flat tensors of a rank, one a group. Raises NotMerged."""
    found = groups_of(shard) if state == WEIGHTS else [at(group, state) for group in _states(shard)]
    if not found or not all(isinstance(tensor, Tensor) and tensor.in_one_piece for tensor in found):
        what = "fp32 weights" if state == WEIGHTS else state
        raise NotMerged(f"{shard.file.path.name} has no {what} where DeepSpeed writes it")
    return found


def _base(shard: Shard) -> object:
    state = at(shard.file.content, STATE)
    return at(state, "base_optimizer_state") or at(state, STATE)


def _states(shard: Shard) -> list[object]:
    states = at(_base(shard), "state")
    return [states[key] for key in sorted(states)] if isinstance(states, dict) else []


def within(flat: list[tuple[Archive, Tensor]], offset: int, count: int) -> Iterator[Piece]:
    """So many elements from an offset on, of tensors that follow each other."""
    begin = 0
    for file, tensor in flat:
        low, high = max(offset, begin), min(offset + count, begin + tensor.count)
        if low < high:
            yield Piece(file=file, key=tensor.storage.key, start=tensor.start + low - begin, count=high - low)
        begin += tensor.count


def whole(file: Archive, name: str, tensor: Tensor) -> Piece:
    """All elements of a tensor. Raises NotMerged."""
    if not tensor.in_one_piece:
        raise NotMerged(f"{name} is not stored contiguously in {file.path.name}")
    return Piece(file=file, key=tensor.storage.key, start=tensor.start, count=tensor.count)


def pipeline_weights(examined: Examined) -> Iterator[Found]:
    """fp32 weights of the optimizer where it has them, and of the layers' files what else they hold: buffers, frozen ones."""
    known: dict[str, tuple[int, ...]] = {}
    for name, shape, dtype, pieces in trained(examined) if examined.facts.stage else ():
        # a tied layer is trained in each stage that has it, and is the same there
        if name not in known:
            yield name, shape, dtype, pieces
        known[name] = shape
    for shard in examined.tag.of(Part.LAYER):
        for name, tensor in _weights_of_layer(shard):
            if name not in known and not _is_tied(name, tensor, known):
                yield name, tensor.shape, tensor.dtype, (whole(shard.file, name, tensor),)


def _weights_of_layer(shard: Shard) -> Iterator[tuple[str, Tensor]]:
    for way, tensor in tensors(shard.file.content):
        yield f"{shard.name.layer}.{'.'.join(map(str, way))}", tensor


def _is_tied(name: str, tensor: Tensor, known: dict[str, tuple[int, ...]]) -> bool:
    inner = name.partition(".")[2]
    return any(
        other.startswith(TIED) and other.endswith(f".{inner}") and shape == tensor.shape
        for other, shape in known.items()
    )


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


def _held(examined: Examined) -> Held:
    models = examined.tag.of(Part.MODEL)
    if any(at(shard.file.content, "ds_config", "use_data_before_expert_parallelism") is True for shard in models):
        raise NotMerged("the ranks that share an expert are in another order (use_data_before_expert_parallelism)")
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
        raise NotMerged(f"{shard.file.path.name} does not show where its experts are")
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


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor of the merged model. ``dtype``: as it is saved; ``made``: as it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    made: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes that it takes in the merged model."""
        return count_of(self.shape) * ITEM_SIZES[self.made]


def sources_of(examined: Examined, dtype: str) -> tuple[Source, ...]:
    """Every tensor of the model, floating-point ones in ``dtype`` ("F32" or "BF16"). Raises NotMerged."""
    _check_layout(examined)
    found: dict[str, Source] = {}
    for name, shape, tensor_dtype, pieces in _tensors(examined):
        there = sum(piece.count for piece in pieces)
        if there != count_of(shape):
            raise NotMerged(f"{name} has {count_of(shape):,} elements, but its pieces have {there:,}")
        made = dtype if tensor_dtype in float_types() else tensor_dtype
        if not can_convert(tensor_dtype, made):
            raise NotMerged(f"{name} has a type that cannot be converted: {tensor_dtype or 'unknown'}")
        found[name] = Source(name=name, shape=shape, dtype=tensor_dtype, made=made, pieces=pieces)
    for copy, original in _shared(examined):
        if original in found and copy not in found:
            same = found[original]
            found[copy] = Source(name=copy, shape=same.shape, dtype=same.dtype, made=same.made, pieces=same.pieces)
    if not found:
        raise NotMerged("it holds no weights")
    return tuple(found.values())


def _check_layout(examined: Examined) -> None:
    """Raises NotMerged for what is merged by nothing here."""
    facts = examined.facts
    if facts.stage is None:
        raise NotMerged("no file records the ZeRO stage that it was saved at")
    if not facts.universal and facts.layers and (facts.tensor is None or facts.tensor > 1):
        raise NotMerged("a pipeline with sharded tensors cannot be merged")
    if not facts.universal and not facts.layers and (facts.model or 1) > 1:
        raise NotMerged("its tensors are sharded across ranks: convert it first (--universal), then merge the result")
    if facts.experts and facts.stage >= PARTITIONED:
        raise NotMerged("experts at stage 3 cannot be merged")


def _tensors(examined: Examined) -> Iterator[Found]:
    if examined.facts.layers and not examined.facts.universal:
        yield from pipeline_weights(examined)
        return
    models = examined.tag.of(Part.MODEL)
    first = models[0].file
    buffers = buffers_of(first.content)
    yield from _of_module(examined, first)
    if examined.facts.universal:
        # the converter makes floating-point numbers of buffers; the module has them as they were
        kept = at(first.content, "module")
        yield from (found for found in _universal(examined) if found[0] not in buffers or not at(kept, found[0]))
    elif examined.facts.stage != 0:
        stage3 = (examined.facts.stage or 0) >= PARTITIONED
        yield from _frozen3(models) if stage3 else _frozen2(first)
        yield from trained(examined)
    if examined.facts.experts:
        yield from expert_weights(examined)


def _of_module(examined: Examined, first: Archive) -> Iterator[Found]:
    """Buffers, and weights that no optimizer trains; without ZeRO all of them."""
    buffers = buffers_of(first.content)
    module, copies = at(first.content, "module"), dict(_shared(examined))
    for name, tensor in module.items() if isinstance(module, dict) else ():
        # at stage 3 the module's weights are empty here; below, those that no optimizer trains stand here only
        alone = name not in examined.parameters and name not in examined.frozen
        here = examined.facts.stage == 0 or (alone and (examined.facts.stage or 0) < PARTITIONED)
        if isinstance(tensor, Tensor) and (name in buffers or here) and name not in copies:
            yield str(name), tensor.shape, tensor.dtype, (whole(first, str(name), tensor),)


def _frozen2(model: Archive) -> Iterator[Found]:
    for name, shape in frozen_of(model.content).items():
        tensor = at(model.content, "frozen_param_fragments", name)
        if isinstance(tensor, Tensor):
            yield name, shape, tensor.dtype, (whole(model, name, tensor),)


def _frozen3(models: tuple[Shard, ...]) -> Iterator[Found]:
    for name, shape in frozen_of(models[0].file.content).items():
        left, found, dtype = count_of(shape), [], ""
        for shard in models:
            tensor = at(shard.file.content, "frozen_param_fragments", name)
            if isinstance(tensor, Tensor):
                dtype = tensor.dtype
                piece = whole(shard.file, name, tensor)
                found.append(Piece(file=piece.file, key=piece.key, start=piece.start, count=min(left, piece.count)))
                left -= found[-1].count
        yield name, shape, dtype, tuple(found)


def _universal(examined: Examined) -> Iterator[Found]:
    # DeepSpeed's converter writes a tied weight twice: the copy as the model holds it, rounded to 16 bits
    copies = dict(_shared(examined))
    for parameter in examined.tag.parameters or ():
        if parameter.name in copies:
            continue
        for file in parameter.files:
            if file.path.name == "fp32.pt":
                held = [tensor for _, tensor in tensors(file.content)]
                if len(held) != 1:
                    raise NotMerged(f"{file.path.name} of {parameter.name} holds {len(held)} tensors, not one")
                whole_shape = (examined.facts.model or 1) == 1
                shape = examined.parameters.get(parameter.name, held[0].shape) if whole_shape else held[0].shape
                yield parameter.name, shape, held[0].dtype, (whole(file, parameter.name, held[0]),)


def _shared(examined: Examined) -> Iterator[tuple[str, str]]:
    """Names of parameters that are another one's: (the name, the other's)."""
    models = examined.tag.of(Part.MODEL)
    shared: Any = at(models[0].file.content, "shared_params") if models else None
    yield from ((str(copy), str(name)) for copy, name in shared.items()) if isinstance(shared, dict) else ()
