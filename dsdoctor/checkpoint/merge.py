"""checkpoint --merge: the weights of a whole tag -> one model in files of safetensors with Hugging Face's index, written piece by
piece; resumable.

A file has its name only when it is whole. Which checkpoint it was made of stands in its header, by the checksums that the zips
hold: one of another checkpoint is not taken for a part of this one.
"""

import contextlib
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dsdoctor.checkpoint.inert_pickle import ITEM_SIZES
from dsdoctor.checkpoint.judge import GIB, CheckpointOrder, Judged, judge_checkpoint
from dsdoctor.checkpoint.tensor_bytes import Damaged, OpenFiles, converted
from dsdoctor.checkpoint.weights import NotMerged, Source, sources_of
from dsdoctor.core.errors import DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.files import (
    check_folder,
    is_this_user,
    made_folder,
    open_regular,
    read_limited,
    replacing,
    write_text,
)
from dsdoctor.core.finding import has_error
from dsdoctor.core.host import LocalHost

MAX_FILE_BYTES = 5_000_000_000
"""Bytes of a file of weights, as Hugging Face cuts them."""
INDEX = "model.safetensors.index.json"
OF_A_RUN = {"checkpoint-cannot-load", "checkpoint-needs-universal", "checkpoint-load-not-known"}
"""Rules that speak of a run which would load the tag."""
STALE = 60.0
"""Seconds without a byte, after which a hidden file is taken for one that a killed merge left."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file that is to be written: its tensors in order, and its header."""

    name: str
    sources: tuple[Source, ...]
    header: bytes

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(source.size for source in self.sources)


def outputs_of(sources: tuple[Source, ...], *, largest: int = MAX_FILE_BYTES) -> tuple[Output, ...]:
    """The files of a model."""
    parts: list[list[Source]] = [[]]
    for source in sources:
        if parts[-1] and sum(each.size for each in parts[-1]) + source.size > largest:
            parts.append([])
        parts[-1].append(source)
    origin = _origin(sources)
    total = len(parts)
    names = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
    return tuple(
        _output(name if total > 1 else "model.safetensors", part, origin)
        for name, part in zip(names, parts, strict=True)
    )


def _output(name: str, part: list[Source], origin: str) -> Output:
    # the widest first: each tensor then begins at a multiple of its width
    ordered = tuple(sorted(part, key=lambda source: -ITEM_SIZES[source.made]))
    table: dict[str, object] = {"__metadata__": {"format": "pt", "dsdoctor": origin}}
    place = 0
    for source in ordered:
        table[source.name] = {"dtype": source.made, "shape": source.shape, "data_offsets": (place, place + source.size)}
        place += source.size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * (-len(text) % 8)
    return Output(name=name, sources=ordered, header=struct.pack("<Q", len(text)) + text)


def _origin(sources: tuple[Source, ...]) -> str:
    """What the weights are made of, by names, places and the checksums in the zips."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.name}\0{source.shape}\0{source.made}\0".encode("utf-8", "backslashreplace"))
        for piece in source.pieces:
            entry = piece.file.entries[f"data/{piece.key}"]
            digest.update(f"{piece.file.path.name} {entry.crc} {piece.start} {piece.count}\0".encode())
    return digest.hexdigest()


def is_written(folder: Path, output: Output) -> bool:
    """Whether a file is there and whole, and of the same checkpoint."""
    try:
        with open_regular(folder / output.name) as file:
            return os.fstat(file.fileno()).st_size == output.size and file.read(len(output.header)) == output.header
    except OSError:
        return False


def foreign_files(folder: Path, outputs: tuple[Output, ...]) -> tuple[str, ...]:
    """Weights in a folder that are not of this merge: they are not written over."""
    known = {output.name for output in outputs if is_written(folder, output)}
    weights = sorted(path.name for path in folder.glob("model*.safetensors"))
    index = [INDEX] if (folder / INDEX).exists() and read_limited(folder / INDEX) != _index(outputs).encode() else []
    return (*(name for name in weights if name not in known), *index)


def write_output(folder: Path, output: Output, read: Callable[[int], None]) -> None:
    """Write one file. Raises OSError, and Damaged for a file of the checkpoint that is shorter than its zip says."""
    with OpenFiles() as files, replacing(folder / output.name) as made:
        made.write(output.header)
        for source in output.sources:
            for piece in source.pieces:
                for content in files.read(piece, ITEM_SIZES[source.dtype]):
                    made.write(converted(content, source.dtype, source.made))
                    read(len(content))


def write_index(folder: Path, outputs: tuple[Output, ...]) -> None:
    """The index that says in which file a tensor is, written when all of them are whole; a single file needs none."""
    if len(outputs) > 1:
        write_text(folder / INDEX, _index(outputs))


def _index(outputs: tuple[Output, ...]) -> str:
    where = {source.name: output.name for output in outputs for source in output.sources}
    total = sum(source.size for output in outputs for source in output.sources)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"


class Watching(Protocol):
    """Who is told how far a merge is."""

    def total(self, count: int) -> None:
        """So many bytes are to be read."""

    def read(self, count: int) -> None:
        """So many were read."""


@dataclass(frozen=True, kw_only=True)
class MergeOrder:
    """``out``: the folder of the merged model. ``dtype``: "fp32" or "bf16". ``largest``: bytes of a file of it."""

    out: Path
    dtype: str = "fp32"
    largest: int = MAX_FILE_BYTES


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was done: the files of the model, those that were there already, and its tensors and bytes."""

    out: str
    files: tuple[str, ...]
    kept: tuple[str, ...]
    tensors: int
    size: int


def merge_checkpoint(order: CheckpointOrder, merge: MergeOrder, watching: Watching) -> tuple[Judged, Merged | None]:
    """Write the weights of a tag as one model. None where the tag is not whole, which its findings tell.

    Raises UsageError for a folder that holds other weights, ImpossiblePlan where the disk is too small or the layout is not merged.
    """
    judged = whole_tag(judge_checkpoint(order)[0])
    if judged.examined is None or judged.outcome is None:
        return judged, None
    if any(file.unknown for file in judged.examined.tag.files):
        raise ImpossiblePlan("not all files of the tag could be read", hint="dsdoctor checkpoint DIR names them")
    outputs = _outputs(judged, merge)
    check_folder(merge.out, "--merge")
    with made_folder(merge.out):
        kept = _write_all(merge.out, outputs, watching)
    return judged, Merged(
        out=str(merge.out),
        files=tuple(output.name for output in outputs),
        kept=kept,
        tensors=sum(len(output.sources) for output in outputs),
        size=sum(output.size for output in outputs),
    )


def _write_all(out: Path, outputs: tuple[Output, ...], watching: Watching) -> tuple[str, ...]:
    """Write what is not there yet; the names of what is."""
    _clear(out)
    if foreign := foreign_files(out, outputs):
        raise UsageError(f"{out} holds other weights: {foreign[0]}", hint="name an empty folder: --merge OUT")
    kept = tuple(output.name for output in outputs if is_written(out, output))
    todo = [output for output in outputs if output.name not in kept]
    _check_space(out, sum(output.size for output in todo))
    watching.total(sum(output.size for output in todo))
    for output in todo:
        _write(out, output, watching)
    write_index(out, outputs)
    return kept


def _outputs(judged: Judged, merge: MergeOrder) -> tuple[Output, ...]:
    assert judged.examined is not None
    try:
        sources = sources_of(judged.examined, {"fp32": "F32", "bf16": "BF16"}[merge.dtype])
    except NotMerged as error:
        raise ImpossiblePlan(f"{judged.examined.tag.folder.name} is not merged: {error}") from error
    return outputs_of(sources, largest=merge.largest)


def _write(folder: Path, output: Output, watching: Watching) -> None:
    try:
        write_output(folder, output, watching.read)
    except Damaged as error:
        raise DoctorError(
            f"{output.name} was not written: {error}", hint="dsdoctor checkpoint DIR --deep names the file"
        ) from error


def _check_space(folder: Path, needed: int) -> None:
    free = LocalHost().free(str(folder.absolute()))
    if free is not None and free < needed:
        message = f"the merged model takes {needed / GIB:.2f} GiB more, and {folder} has {free / GIB:.2f} GiB left"
        raise ImpossiblePlan(message, hint="name a folder on another disk: --merge OUT")


def _clear(folder: Path) -> None:
    """Take away what a merge left that was killed: hidden files of ours that nobody writes to any more."""
    for path in folder.glob(".dsdoctor-*.tmp"):
        with contextlib.suppress(OSError):
            state = path.lstat()
            if is_this_user(state.st_uid) and time.time() - state.st_mtime > STALE:
                path.unlink()


def whole_tag(judged: Judged) -> Judged:
    """The same without what was said of a run, which is nothing to weights; ``outcome`` is None where anything else is an error."""
    about = tuple(finding for finding in judged.findings if finding.rule not in OF_A_RUN)
    return replace(judged, findings=about, outcome=None if has_error(about) else judged.outcome)
