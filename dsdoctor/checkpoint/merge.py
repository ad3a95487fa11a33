"""The tensors of a merged model -> files of safetensors with Hugging Face's index, written piece by piece; resumable.

A file has its name only when it is whole. Which checkpoint it was made of stands in its header, by the checksums that the zips
hold: one of another checkpoint is not taken for a part of this one.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.checkpoint.convert import converted
from dsdoctor.checkpoint.inert import ITEM_SIZES
from dsdoctor.checkpoint.open_files import OpenFiles
from dsdoctor.checkpoint.sources import Source
from dsdoctor.core.files import open_regular, read_limited, replacing, write_text

LARGEST_FILE = 5_000_000_000
"""Bytes of a file of weights, as Hugging Face cuts them."""
INDEX = "model.safetensors.index.json"


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


def outputs_of(sources: tuple[Source, ...], *, largest: int = LARGEST_FILE) -> tuple[Output, ...]:
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
