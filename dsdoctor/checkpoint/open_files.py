"""Elements of a tensor that lie in a rank's file -> their bytes, a few MiB at a time, with a number of files open at once."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dsdoctor.checkpoint.archive import Archive
from dsdoctor.checkpoint.values import Damaged, pieces, start_of
from dsdoctor.core.files import open_regular

MOST_OPEN = 200


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
            raise Damaged(f"a tensor ends behind its entry in {piece.file.path.name}")
        file = self._file(piece.file.path)
        yield from pieces(file, start_of(file, entry) + piece.start * width, piece.count * width)

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[path] = open_regular(path)
        self._open.move_to_end(path)
        return self._open[path]
