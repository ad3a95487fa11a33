"""The bytes of tensors in their files: where they are, of which type, and whether they are finite. Without torch or numpy.

A number is nan or inf where all bits of its exponent are set. Those bits lie in the two highest bytes of each number, which are
sliced out, translated to 0 and 1, and compared as one long integer: some hundred megabytes a second. Types are converted bit for
bit as torch does it. Whatever the size, a few MiB are read at a time, with a bounded number of files open.
"""

import functools
import math
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dsdoctor.checkpoint.inert_pickle import ITEM_SIZES, Tensor
from dsdoctor.checkpoint.torch_file import Archive
from dsdoctor.core.files import open_regular

ONE = b"\x01"
HIGH = bytes(byte & 0x7F == 0x7F for byte in range(256))
"""Sign, then seven bits of the exponent: float32, bfloat16 and float64."""
TOP_BIT = bytes(byte >= 0x80 for byte in range(256))
TOP_FOUR = bytes(byte >= 0xF0 for byte in range(256))
HALF = bytes(byte & 0x7C == 0x7C for byte in range(256))
ALL = bytes([1]) * 256
SIGNS: dict[str, tuple[int, bytes, bytes]] = {
    "F32": (4, HIGH, TOP_BIT),
    "BF16": (2, HIGH, TOP_BIT),
    "F64": (8, HIGH, TOP_FOUR),
    "F16": (2, HALF, ALL),
}
"""Type -> bytes of a number, the test of its highest byte, the test of the one below."""
CONVERTED_FORMATS = {"F32": "f", "F64": "d", "F16": "e"}
QUIET_NAN = b"\x00\x00\xc0\x7f"
FEW = 1 << 16
"""Numbers that are made Python's own at once."""
PIECE = 4 << 20
FORMATS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B", "BOOL": "<?"}
MAX_OPEN_FILES = 200


def not_finite(content: bytes, dtype: str) -> Iterator[tuple[int, str]]:
    """Each number that is nan or inf: its place, and which. Nothing for types that have neither.

    >>> import struct
    >>> list(not_finite(struct.pack("<4f", 1.0, float("nan"), 3e38, float("-inf")), "F32"))
    [(1, 'nan'), (3, 'inf')]
    """
    if dtype not in SIGNS:
        return
    width, high, low = SIGNS[dtype]
    first = content[width - 1 :: width].translate(high)
    if ONE not in first:
        return
    second = content[width - 2 :: width].translate(low)
    count = len(first)
    both = int.from_bytes(first, "little") & int.from_bytes(second[:count], "little")
    hits = both.to_bytes(count, "little")
    place = hits.find(ONE)
    while place >= 0:
        yield place, _which(content[place * width : (place + 1) * width], dtype)
        place = hits.find(ONE, place + 1)


def _which(number: bytes, dtype: str) -> str:
    if dtype == "BF16":
        number, dtype = b"\0\0" + number, "F32"
    value = struct.unpack({"F32": "<f", "F64": "<d", "F16": "<e"}[dtype], number)[0]
    return "nan" if math.isnan(value) else "inf"


def float_types() -> frozenset[str]:
    """Types that are converted to the one of the merged model."""
    return frozenset({*CONVERTED_FORMATS, "BF16"})


def can_convert(dtype: str, made: str) -> bool:
    """Whether numbers of a type can be written as another."""
    return (dtype == made and dtype in ITEM_SIZES) or (dtype in float_types() and made in {"F32", "BF16"})


def converted(content: bytes, dtype: str, made: str) -> bytes:
    """The same numbers in another type, rounded to the nearest, to even where two are as near.

    >>> import struct
    >>> converted(struct.pack("<2f", 1.0, 3.1415927), "F32", "BF16").hex()
    '803f4940'
    >>> struct.unpack("<f", converted(b"\\x80\\x3f", "BF16", "F32"))
    (1.0,)
    """
    if dtype == made:
        return content
    single = content if dtype == "F32" else _from_bf16(content) if dtype == "BF16" else _from_other(content, dtype)
    return single if made == "F32" else _to_bf16(single)


def _from_bf16(content: bytes) -> bytes:
    made = bytearray(2 * len(content))
    made[2::4], made[3::4] = content[0::2], content[1::2]
    return bytes(made)


def _from_other(content: bytes, dtype: str) -> bytes:
    width, made = ITEM_SIZES[dtype], []
    for start in range(0, len(content), width * FEW):
        part = content[start : start + width * FEW]
        numbers = struct.unpack(f"<{len(part) // width}{CONVERTED_FORMATS[dtype]}", part)
        made.append(b"".join(map(_single, numbers)))
    return b"".join(made)


def _single(number: float) -> bytes:
    try:
        return struct.pack("<f", number)
    except OverflowError:
        return struct.pack("<f", float("inf") if number > 0 else float("-inf"))


def _to_bf16(content: bytes) -> bytes:
    """Half of the last bit that stays is added to all numbers at once, as one long integer: nothing runs over into the next,
    because nan is set aside before."""
    nans = [place for place, kind in not_finite(content, "F32") if kind == "nan"]
    if nans:
        changed = bytearray(content)
        for place in nans:
            changed[4 * place : 4 * place + 4] = QUIET_NAN
        content = bytes(changed)
    ones = _ones(len(content) // 4)
    numbers = int.from_bytes(content, "little")
    rounded = (numbers + ((numbers >> 16) & ones) + 0x7FFF * ones).to_bytes(len(content), "little")
    made = bytearray(len(content) // 2)
    made[0::2], made[1::2] = rounded[2::4], rounded[3::4]
    return bytes(made)


@functools.lru_cache(maxsize=2)
def _ones(count: int) -> int:
    return int.from_bytes(b"\1\0\0\0" * count, "little")


class Damaged(Exception):
    """An entry of a file that is not where the zip's directory says it is, or ends too early."""


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
            begin = entry.start + tensor.start * width
            return float(struct.unpack(form, b"".join(pieces(file, begin, width)))[0])
    except (OSError, Damaged, struct.error):
        return None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements of one entry of one file."""

    file: Archive
    key: str
    start: int
    count: int


class OpenFiles:
    """The ranks' files. Use as a context manager."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, BinaryIO] = OrderedDict()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def read(self, piece: Piece, width: int) -> Iterator[bytes]:
        """The bytes of a piece, a few MiB at a time. ``width``: bytes of an element."""
        entry = piece.file.entries[f"data/{piece.key}"]
        if (piece.start + piece.count) * width > entry.size:
            raise Damaged(f"a tensor extends past its entry in {piece.file.path.name}")
        file = self._file(piece.file.path)
        yield from pieces(file, entry.start + piece.start * width, piece.count * width)

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[path] = open_regular(path)
        self._open.move_to_end(path)
        return self._open[path]
