"""Every byte of a tag: are the zips' checksums right, are weights and optimizer states finite, does agree what is saved twice.

At stages 1 and 2 the model's weights are the optimizer's fp32 weights, rounded: a file of another training, of the same step and
the same shapes, is told from its place by nothing else. At stage 3 each weight is saved once, and with fp16 nothing is said.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dsdoctor.checkpoint.facts import PARTITIONED, Examined, buffers_of
from dsdoctor.checkpoint.folder import Part
from dsdoctor.checkpoint.inert_pickle import ITEM_SIZES, Tensor, at, count_of, tensors
from dsdoctor.checkpoint.tensor_bytes import (
    Damaged,
    OpenFiles,
    Piece,
    can_convert,
    converted,
    not_finite,
    pieces,
)
from dsdoctor.checkpoint.torch_file import Archive
from dsdoctor.checkpoint.weights import NotMerged, Span, expert_weights, spans_of, spans_of_universal, trained, whole
from dsdoctor.core.files import open_regular
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more_lines, counted
from dsdoctor.core.zip_file import Entry
from dsdoctor.rules import book

MAX_LINES = 12
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
                differ.append(f"{weight.name} in {weight.file.path.name} differs from that of {other.path.name}")
            read(weight.size)
    if differ:
        yield book.finding(
            "checkpoint-values-disagree",
            Severity.ERROR,
            evidence=and_more_lines(differ, MAX_LINES),
            weights=counted(len(differ), "weight"),
            tag=examined.tag.folder.name,
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


def judge_values(examined: Examined, read: Read) -> Iterator[Finding]:
    """Findings about the bytes themselves. What the quick look could not read is left out."""
    changed: list[str] = []
    bad: list[str] = []
    for file, spans in _files(examined):
        try:
            for entry, hit in _of_file(file, spans, read):
                (bad if hit else changed).append(f"{_short(examined, file)}: {hit or entry}")
        except (OSError, Damaged) as error:
            changed.append(f"{_short(examined, file)}: {error}")
    name = examined.tag.folder.name
    if changed:
        yield book.finding(
            "checkpoint-bytes-changed", Severity.ERROR, evidence=and_more_lines(changed, MAX_LINES), tag=name
        )
    if bad:
        yield book.finding(
            "checkpoint-not-finite",
            Severity.ERROR,
            evidence=and_more_lines(bad, MAX_LINES),
            tensors=counted(len(bad), "tensor"),
            tag=name,
        )
    if not changed:
        yield from judge_agreement(examined, read)


def bytes_of(examined: Examined) -> int:
    """How much there is to read."""
    whole = sum(entry.size for file, _ in _files(examined) for entry in file.entries.values())
    return whole + sum(weight.size for weight in weights_saved_twice(examined))


def _files(examined: Examined) -> Iterator[tuple[Archive, list[Span]]]:
    """Each file that the quick look understood, with what is to be finite in it."""
    for shard in examined.tag.shards:
        if not shard.file.problem and not shard.file.unknown:
            yield shard.file, list(spans_of(examined, shard))
    buffers = frozenset().union(*(buffers_of(shard.file.content) for shard in examined.tag.shards))
    for parameter in examined.tag.parameters or ():
        for file in parameter.files:
            if not file.problem and not file.unknown:
                judged = () if parameter.name in buffers else spans_of_universal(parameter.name, file.content)
                yield file, list(judged)


def _of_file(file: Archive, spans: list[Span], read: Read) -> Iterator[tuple[str, str]]:
    """What is wrong in a file: an entry whose checksum is another one, or a tensor with what is wrong in it."""
    by_key: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_key[f"data/{span.key}"].append(span)
    with open_regular(file.path) as opened:
        for name, entry in file.entries.items():
            right, hits = _of_entry(opened, entry, by_key.get(name, []), read)
            if right:
                yield from ((name, hit) for hit in hits)
            else:
                # values that were not written are not judged
                tensors = ", ".join(span.what for span in by_key.get(name, [])[:3])
                yield f"{name}{f' ({tensors})' if tensors else ''} has another checksum", ""


def _of_entry(file: BinaryIO, entry: Entry, spans: list[Span], read: Read) -> tuple[bool, list[str]]:
    """Whether the checksum is right, and each span that is not finite with its first such element."""
    checksum, place = 0, 0
    hits: list[str] = []
    waiting = list(spans)
    for piece in pieces(file, entry.start, entry.size):
        checksum = zlib.crc32(piece, checksum)
        if waiting and next(not_finite(piece, waiting[0].dtype), None) is not None:
            found = {span: hit for span in waiting if (hit := _first_in(piece, place, span))}
            hits += found.values()
            waiting = [span for span in waiting if span not in found]
        place += len(piece)
        read(len(piece))
    return checksum == entry.crc, hits


def _first_in(piece: bytes, place: int, span: Span) -> str:
    """The first element of a span that is not finite in a piece that begins at a place of the entry; "" for none."""
    width = ITEM_SIZES[span.dtype]
    begin, end = max(span.start * width, place), min((span.start + span.count) * width, place + len(piece))
    if begin >= end:
        return ""
    hit = next(not_finite(piece[begin - place : end - place], span.dtype), None)
    return (
        ""
        if hit is None
        else f"{span.what}: {hit[1]} at element {begin // width + hit[0] - span.start:,} of {span.count:,}"
    )


def _short(examined: Examined, file: Archive) -> str:
    folder: Path = examined.tag.folder.path
    return file.path.relative_to(folder).as_posix()
