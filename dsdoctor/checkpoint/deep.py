"""Every byte of a tag: are the zips' checksums right, are weights and optimizer states finite, does agree what is saved twice."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dsdoctor.checkpoint.agree import judge_agreement, weights_saved_twice
from dsdoctor.checkpoint.archive import Archive, Entry
from dsdoctor.checkpoint.examine import Examined
from dsdoctor.checkpoint.finite import not_finite
from dsdoctor.checkpoint.inert import ITEM_SIZES
from dsdoctor.checkpoint.spans import Span, spans_of, spans_of_universal
from dsdoctor.checkpoint.values import Damaged, pieces, start_of
from dsdoctor.checkpoint.walk import at
from dsdoctor.core.files import open_regular
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more_lines

MOST = 12
Read = Callable[[int], None]
"""Called with the bytes of each piece that was read, for those who wait."""


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
        yield Finding.error(
            "checkpoint-bytes-changed",
            f"{name} holds other bytes than were written: torch loads them without a word",
            evidence=and_more_lines(changed, MOST),
            fix="copy the files anew from where they are right, or take an older tag; then look at the disk",
        )
    if bad:
        yield Finding.error(
            "checkpoint-not-finite",
            f"{len(bad)} weights or optimizer states of {name} hold nan or inf",
            evidence=and_more_lines(bad, MOST),
            fix="take an older tag: a training that goes on from this one stays nan",
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
    models = [shard.file.content for shard in examined.tag.shards]
    buffers = {name for content in models for name in at(content, "buffer_names") or ()}
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
    for piece in pieces(file, start_of(file, entry), entry.size):
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
