"""The folders of the op cache: <folder>/<kind>/<first two of the key>/<key>/<sha256 of the record>, and <folder>/tmp.

What stands on a shelf came there by one rename and goes by one rename, at once and whole. Nothing of an entry is read here.
"""

import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from dsdoctor.builder.cache.checked_files import PRIVATE

SHARED = stat.S_IWGRP | stat.S_ISGID
"""The sign that a folder is shared with its group on purpose (mode 2770): no umask makes it by accident."""


# what lies in the cache becomes part of wheels: who may write there may run code as whoever builds
def distrust(folder: Path) -> str | None:
    """Why nothing is taken from a folder or put into it; None where it is fine, or not made yet.

    Fine is a folder of this user (or of root) that nobody else may write, and one that its owner shares with a group of
    this user: mode 2770. What everybody may write is never fine.
    """
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be looked at: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to {folder}; chmod o-w {quote(str(folder))} ends that"
    shared = found.st_mode & SHARED == SHARED
    if found.st_mode & stat.S_IWGRP and not shared:
        return f"the group may write to {folder}; chmod 2770 {quote(str(folder))} shares it on purpose, chmod 700 ends that"
    if found.st_uid in {os.geteuid(), 0} or (shared and found.st_gid in {os.getegid(), *os.getgroups()}):
        return None
    return f"{folder} belongs to user {found.st_uid}, this is user {os.geteuid()}; its owner shares it with a group by chmod 2770"


def mode_inside(folder: Path) -> int:
    """The mode of folders that are made in a cache folder: what it lets its group and others do, they do."""
    try:
        return PRIVATE | folder.stat().st_mode & 0o2075
    except OSError:
        return PRIVATE


KINDS = {"ops": "op", "wheels": "wheel"}
TEMPORARY = "tmp"
DAY = 86400.0
ATTEMPTS = 8
IN_THE_WAY = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
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
    def workdir(self) -> Iterator[Path]:
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
