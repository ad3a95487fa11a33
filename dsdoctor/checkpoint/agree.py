"""Values that a tag holds twice -> do they agree? The model's weights are the optimizer's fp32 weights, rounded, at stages 1 and 2.

A file of another training, of the same step and the same shapes, is told from its place by nothing else. At stage 3 each weight is
saved once, and with fp16 nothing is said.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsdoctor.checkpoint.archive import Archive
from dsdoctor.checkpoint.convert import can_convert, converted
from dsdoctor.checkpoint.examine import PARTITIONED, Examined
from dsdoctor.checkpoint.experts import expert_weights
from dsdoctor.checkpoint.finite import not_finite
from dsdoctor.checkpoint.flat_weights import NotMerged, trained, whole
from dsdoctor.checkpoint.inert import ITEM_SIZES, Tensor, count_of
from dsdoctor.checkpoint.names import Part
from dsdoctor.checkpoint.open_files import OpenFiles, Piece
from dsdoctor.checkpoint.values import Damaged
from dsdoctor.checkpoint.walk import at, tensors
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more_lines

MOST = 12
SINGLE = "F32"
Read = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Twice:
    """A weight as the model has it, and where its fp32 elements lie."""

    name: str
    file: Archive
    tensor: Tensor
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of the fp32 elements."""
        return sum(piece.count for piece in self.pieces) * ITEM_SIZES[SINGLE]


def judge_agreement(examined: Examined, read: Read) -> Iterator[Finding]:
    """Weights of the model that are not those of the optimizer."""
    differ = []
    with OpenFiles() as files:
        for weight in weights_saved_twice(examined):
            other = _differs(files, weight)
            if other is not None:
                differ.append(f"{weight.name} in {weight.file.path.name} is not that of {other.path.name}")
            read(weight.size)
    if differ:
        yield Finding.warning(
            "checkpoint-values-disagree",
            f"{len(differ)} weight{'s' * (len(differ) > 1)} of {examined.tag.folder.name} "
            f"{'are' if len(differ) > 1 else 'is'} not the optimizer's fp32 weights, rounded",
            evidence=and_more_lines(differ, MOST),
            fix="where no script changed weights behind DeepSpeed's back, its files are of two trainings: take a tag whose files "
            "are of one",
        )


def tells_trainings(examined: Examined) -> bool:
    """Whether a file of another training shows in the values, as far as weights are saved twice."""
    return next(weights_saved_twice(examined), None) is not None


def weights_saved_twice(examined: Examined) -> Iterator[Twice]:
    """Those that can be compared. Nothing where a layout is not understood, or a file could not be read."""
    facts = examined.facts
    readable = not any(file.problem or file.unknown for file in examined.tag.files)
    if facts.universal or not facts.stage or facts.stage >= PARTITIONED or (facts.tensor or 1) > 1 or not readable:
        return
    try:
        found = {name: (dtype, pieces) for name, _, dtype, pieces in trained(examined)}
        if facts.experts:
            found.update({name: (dtype, pieces) for name, _, dtype, pieces in expert_weights(examined)})
    except (NotMerged, IndexError, ValueError):
        return
    for name, file, tensor in _of_the_model(examined):
        dtype, pieces = found.get(_original(examined, name), ("", ()))
        whole_there = sum(piece.count for piece in pieces) == count_of(tensor.shape) and tensor.in_one_piece
        if dtype == SINGLE and whole_there and can_convert(SINGLE, tensor.dtype):
            yield Twice(name=name, file=file, tensor=tensor, pieces=pieces)


def _of_the_model(examined: Examined) -> Iterator[tuple[str, Archive, Tensor]]:
    for shard in examined.tag.of(Part.MODEL):
        module = at(shard.file.content, "module")
        yield from (
            (str(name), shard.file, tensor)
            for name, tensor in (module.items() if isinstance(module, dict) else ())
            if isinstance(tensor, Tensor)
        )
    for part, prefix in ((Part.EXPERT, False), (Part.LAYER, True)):
        for shard in examined.tag.of(part):
            for way, tensor in tensors(shard.file.content):
                name = ".".join(map(str, way))
                yield f"{shard.name.layer}.{name}" if prefix else name, shard.file, tensor


def _original(examined: Examined, name: str) -> str:
    """The parameter that a second name is of."""
    for shard in examined.tag.of(Part.MODEL)[:1]:
        shared = at(shard.file.content, "shared_params", name)
        return shared if isinstance(shared, str) else name
    return name


def _differs(files: OpenFiles, weight: Twice) -> Archive | None:
    """The first file whose fp32 weights are other ones; what is not finite is told elsewhere."""
    own = whole(weight.file, weight.name, weight.tensor)
    place, width = own.start, ITEM_SIZES[weight.tensor.dtype]
    try:
        for piece in weight.pieces:
            for content in files.read(piece, ITEM_SIZES[SINGLE]):
                count = len(content) // ITEM_SIZES[SINGLE]
                there = b"".join(files.read(Piece(file=own.file, key=own.key, start=place, count=count), width))
                rounded = converted(content, SINGLE, weight.tensor.dtype)
                if there != rounded and next(not_finite(content, SINGLE), None) is None:
                    return piece.file
                place += count
    except (OSError, Damaged):
        # told by the checksums
        return None
    return None
