"""The folders of the op cache: <folder>/<kind>/<first two of the key>/<key>/<sha256 of the record>, and <folder>/tmp.

An entry's folder is put in place by one rename and removed by one rename, so nobody ever sees half of it. Reads no entry.
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

KINDS = {"ops": "op", "wheels": "wheel"}
"""The folder of each kind of entry, and what one entry of it is called."""

TEMPORARY = "tmp"
DAY = 86400.0
ATTEMPTS = 8
IN_THE_WAY = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


def mode_inside(folder: Path) -> int:
    """The mode of folders made inside a cache folder: they give group and others what the cache folder itself gives them."""
    try:
        return PRIVATE | folder.stat().st_mode & 0o2075
    except OSError:
        return PRIVATE


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Where things lie below the cache folder. Every method raises OSError where the disk refuses, unless it says otherwise."""

    folder: Path

    def key_folder(self, kind: str, key: str) -> Path:
        """The folder of all entries under a key. Raises ValueError for an unknown kind or a key that is not a sha256."""
        if kind not in KINDS or not re.fullmatch("[0-9a-f]{64}", key):
            raise ValueError(f"{kind!r} {key!r} is not a key of the cache")
        return self.folder / kind / key[:2] / key

    def entry_folders(self) -> Iterator[Path]:
        """The folder of every entry. Raises nothing."""
        for kind in KINDS:
            for prefix in named_by_digest(self.folder / kind, 2):
                for key_folder in named_by_digest(prefix, 64):
                    yield from named_by_digest(key_folder, 64)

    @contextmanager
    def workdir(self) -> Iterator[Path]:
        """An empty folder on the same file system to make an entry in. It is removed at the end unless it was moved."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        folder = self._make(self.folder / TEMPORARY) / uuid.uuid4().hex
        folder.mkdir(mode=PRIVATE)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def place(self, made: Path, target: Path, is_as_good: Callable[[Path], bool]) -> None:
        """Move a finished entry's folder to its place.

        Where another is in that place already, ``is_as_good`` decides whether that one is kept; it may also remove it.
        """
        for _ in range(ATTEMPTS):
            try:
                self._make(target.parent)
                made.rename(target)
                return
            except FileNotFoundError:
                # another process removed the key's empty folder; or a file server did the move, and its answer got lost
                if target.exists() and not made.exists():
                    return
            except OSError as error:
                if error.errno not in IN_THE_WAY:
                    raise
                if is_as_good(target):
                    return
        raise FileNotFoundError(errno.EBUSY, "other processes keep removing what is put there", str(target))

    def remove(self, entry_folder: Path) -> None:
        """Remove an entry, and the folders above it that are empty then. Raises FileNotFoundError when it is gone already."""
        self._move_away(entry_folder)
        for emptied in entry_folder.parents[:2]:
            with suppress(OSError):
                emptied.rmdir()

    def remove_leftovers(self) -> None:
        """Remove what processes that were killed left in the temporary folder more than a day ago. Raises nothing."""
        with suppress(OSError):
            for left in (self.folder / TEMPORARY).iterdir():
                if time.time() - left.lstat().st_mtime > DAY:
                    self._move_away(left)

    def _move_away(self, path: Path) -> None:
        """Move something into the temporary folder in one step, then delete it there."""
        away = self._make(self.folder / TEMPORARY) / uuid.uuid4().hex
        path.rename(away)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away, ignore_errors=True)
        else:
            away.unlink(missing_ok=True)

    def _make(self, folder: Path) -> Path:
        """Make a folder and those above it, with the permissions that the cache folder itself has for group and others."""
        mode = mode_inside(self.folder)
        for above in reversed([folder, *folder.parents][: len(folder.relative_to(self.folder).parts)]):
            with suppress(FileExistsError):
                above.mkdir(mode=PRIVATE)
                if mode != PRIVATE:
                    above.chmod(mode)
        return folder


def named_by_digest(folder: Path, length: int) -> tuple[Path, ...]:
    """The paths in a folder whose names are ``length`` hexadecimal digits; everything else is not ours. Raises nothing."""
    try:
        inside = () if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(path for path in inside if re.fullmatch(rf"[0-9a-f]{{{length}}}", path.name))
