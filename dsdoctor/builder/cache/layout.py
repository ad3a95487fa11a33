"""The folders of the op cache: <folder>/<kind>/<first two of the key>/<key>/<sha256 of the record>, and <folder>/tmp.

What stands on a shelf came there by one rename and goes by one rename, at once and whole. Nothing of an entry is read here.
"""

import errno
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.cache.checked_files import PRIVATE
from dsdoctor.builder.sharing import mode_inside

KINDS = {"ops": "op", "wheels": "wheel"}
TEMPORARY = "tmp"
DAY = 86400.0
ATTEMPTS = 8
IN_THE_WAY = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


@dataclass(frozen=True, kw_only=True)
class Shelves:
    """The folders below one. Every method raises OSError where the disk refuses, unless it says otherwise."""

    folder: Path

    def shelf(self, kind: str, key: str) -> Path:
        """Where all that has a key stands. Raises ValueError for what is no kind and no sha256."""
        if kind not in KINDS or not re.fullmatch("[0-9a-f]{64}", key):
            raise ValueError(f"{kind!r} {key!r} is no key of the cache")
        return self.folder / kind / key[:2] / key

    def standing(self) -> Iterator[Path]:
        """The folder of every entry. Raises nothing."""
        for kind in KINDS:
            for prefix in named(self.folder / kind, 2):
                for shelf in named(prefix, 64):
                    yield from named(shelf, 64)

    @contextmanager
    def bench(self) -> Iterator[Path]:
        """An empty folder on the same file system to make an entry in; it goes away unless it was moved."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        folder = self._make(self.folder / TEMPORARY) / uuid.uuid4().hex
        folder.mkdir(mode=PRIVATE)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def place(self, made: Path, target: Path, stays: Callable[[Path], bool]) -> None:
        """Move a finished folder to its place.

        Where one stands already, ``stays`` tells whether it is as good and stays; it may remove it.
        """
        for _ in range(ATTEMPTS):
            try:
                self._make(target.parent)
                made.rename(target)
                return
            except FileNotFoundError:
                # a pruner took the empty shelf; or a server did the move, and its answer got lost
                if target.exists() and not made.exists():
                    return
            except OSError as error:
                if error.errno not in IN_THE_WAY:
                    raise
                if stays(target):
                    return
        raise FileNotFoundError(errno.EBUSY, "others remove what is put there", str(target))

    def take_down(self, standing: Path) -> None:
        """Remove an entry, and the shelf that is empty then. Raises FileNotFoundError when it is gone already."""
        self._discard(standing)
        for emptied in standing.parents[:2]:
            with suppress(OSError):
                emptied.rmdir()

    def sweep(self) -> None:
        """Remove what killed writers and removers left behind more than a day ago. Raises nothing."""
        with suppress(OSError):
            for left in (self.folder / TEMPORARY).iterdir():
                if time.time() - left.lstat().st_mtime > DAY:
                    self._discard(left)

    def _discard(self, path: Path) -> None:
        """Out of everybody's sight in one step, then away."""
        away = self._make(self.folder / TEMPORARY) / uuid.uuid4().hex
        path.rename(away)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away, ignore_errors=True)
        else:
            away.unlink(missing_ok=True)

    def _make(self, folder: Path) -> Path:
        """Make a folder and those above it, with the rights that the cache's own folder gives to others."""
        mode = mode_inside(self.folder)
        for above in reversed([folder, *folder.parents][: len(folder.relative_to(self.folder).parts)]):
            with suppress(FileExistsError):
                above.mkdir(mode=PRIVATE)
                if mode != PRIVATE:
                    above.chmod(mode)
        return folder


def named(folder: Path, length: int) -> tuple[Path, ...]:
    """What is named in a folder as we name things; everything else is left alone. Raises nothing."""
    try:
        inside = () if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(path for path in inside if re.fullmatch(rf"[0-9a-f]{{{length}}}", path.name))
