"""The bytes of a tensor in its file: where they are, and small ones as numbers. Reads in pieces, whatever the size."""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from dsdoctor.checkpoint.archive import LOCAL_HEADER, ZIP, Archive, Entry
from dsdoctor.checkpoint.inert import ITEM_SIZES, Tensor
from dsdoctor.core.files import open_regular

PIECE = 4 << 20
FORMATS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B", "BOOL": "<?"}


class Damaged(Exception):
    """An entry of a file that is not where the zip's directory says it is, or ends too early."""


def start_of(file: BinaryIO, entry: Entry) -> int:
    """Where an entry's bytes begin, by its own header. Raises Damaged."""
    file.seek(entry.header)
    header = file.read(LOCAL_HEADER)
    if len(header) < LOCAL_HEADER or not header.startswith(ZIP):
        raise Damaged("an entry's header is overwritten")
    name, extra = struct.unpack("<HH", header[26:30])
    return entry.header + LOCAL_HEADER + int(name) + int(extra)


def pieces(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    """So many bytes from a place on, in pieces. Raises Damaged where the file ends before."""
    file.seek(start)
    while size > 0:
        piece = file.read(min(PIECE, size))
        if not piece:
            raise Damaged("the file ends within a tensor")
        yield piece
        size -= len(piece)


def number_of(archive: Archive, tensor: Tensor) -> float | None:
    """The one number of a tensor that has one; None where it cannot be read, or is of a type that is not known."""
    entry = archive.entries.get(f"data/{tensor.storage.key}")
    form = FORMATS.get(tensor.dtype)
    if entry is None or form is None or tensor.count != 1:
        return None
    width = ITEM_SIZES[tensor.dtype]
    try:
        with open_regular(archive.path) as file:
            begin = start_of(file, entry) + tensor.start * width
            return float(struct.unpack(form, b"".join(pieces(file, begin, width)))[0])
    except (OSError, Damaged, struct.error):
        return None
