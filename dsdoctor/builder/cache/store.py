"""The op cache: files kept under a key, in a folder that many builds, users and machines may use at once.

An entry's folder is <folder>/<kind>/<first two of the key>/<key>/<sha256 of the record>; <folder>/tmp is for those that are being
made. There are no locks: entries appear and disappear whole, by one rename, and every byte is checked when it is copied out. A
damaged entry is removed and reported, never used. A disk that is full or cannot be written adds a complaint and never raises.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdoctor.builder.cache.entry import (
    PRIVATE,
    RECORD,
    Damaged,
    Entry,
    Gone,
    Stored,
    check_files,
    copy_out,
    last_use_and_size,
    plain,
    read_entry,
    unreadable_entry,
    write_entry,
)
from dsdoctor.core.errors import is_full
from dsdoctor.core.files import make_folder, real_path
from dsdoctor.core.trust import Distrusted, distrust, trusted

KINDS = {"ops": "op", "wheels": "wheel"}
"""The folder of each kind of entry, and what one entry of it is called."""

TEMPORARY = "tmp"
DAY_SECONDS = 86400.0
MAX_ATTEMPTS = 8
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
        for _ in range(MAX_ATTEMPTS):
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
        raise FileNotFoundError(errno.EBUSY, "other processes keep removing its contents", str(target))

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
                if time.time() - left.lstat().st_mtime > DAY_SECONDS:
                    self._move_away(left)

    def _move_away(self, path: Path) -> None:
        """Move something into the temporary folder in one step, then delete it there."""
        try:
            away = self._make(self.folder / TEMPORARY) / uuid.uuid4().hex
            path.rename(away)
        except OSError as error:
            if not is_full(error):
                raise
            # a full disk takes no folder and no name more, and to remove something is what mends it: without its record it is none
            away = path
            if path.is_dir() and not path.is_symlink():
                (path / RECORD).unlink(missing_ok=True)
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


__all__ = ["CacheStore", "Entry", "Stored"]

MIB = 1 << 20


class CacheStore:
    """A cache folder; it is made when something is first kept in it.

    ``limit`` is in bytes: the least recently used entries are removed when it is passed. ``dropped`` and ``complaints``
    are sentences for the user: the damaged entries that were removed, and what the disk refused.
    """

    def __init__(self, folder: Path, *, limit: int) -> None:
        self._named, self.limit = folder, limit
        self.folder = Path(real_path(folder))
        self.dropped: list[str] = []
        self.complaints: list[str] = []
        self._layout = CacheLayout(folder=self.folder)
        self._total: int | None = None

    def find(self, kind: str, key: str) -> tuple[Entry, ...]:
        """All entries under a key, the last used first."""
        key_folder = self._layout.key_folder(kind, key)
        if self._distrusted(key_folder):
            return ()
        found = [entry for folder in named_by_digest(key_folder, 64) if (entry := self._read(folder))]
        return tuple(sorted(found, key=lambda entry: entry.used, reverse=True))

    def take(self, entry: Entry, into: Path) -> bool:
        """Copy all files of an entry into a folder, each checked on the way. False where that failed; none is left there then."""
        try:
            copy_out(entry, into)
        except Gone:
            return False
        except Damaged as damage:
            self._drop(entry, str(damage))
            return False
        except OSError as error:
            self._complain(f"{_label(entry)} could not be copied to {into}: {_error_text(error)}")
            return False
        self._use(entry.folder)
        return True

    def put(self, kind: str, key: str, files: Mapping[str, Path], facts: Mapping[str, Any]) -> Entry | None:
        """Keep files under a key, with facts that can be written as JSON. None, and a complaint, where the disk refuses.

        Raises ValueError for a key that is not a sha256 or a file name that is not plain, TypeError for facts JSON cannot hold.
        """
        key_folder = self._layout.key_folder(kind, key)
        if bad := [name for name in files if not plain(name)]:
            raise ValueError(f"{bad[0]!r} is not a plain file name")
        try:
            make_folder(self.folder, mode=PRIVATE)
            if self._distrusted() or self._too_large(files):
                return None
            with self._layout.workdir() as made:
                entry = write_entry(made, key_folder, files, facts, mode_inside(self.folder))
                self._layout.place(made, entry.folder, self._is_as_good)
        except (OSError, UnicodeEncodeError) as error:
            self._complain(f"nothing can be stored in the cache {self.folder}: {_error_text(error)}")
            return None
        self._bound(entry.size)
        return entry

    def entries(self) -> Iterator[Entry]:
        """All entries."""
        return (entry for folder in self._layout.entry_folders() if (entry := self._read(folder)))

    def remove(self, entry: Entry) -> bool:
        """Remove an entry; False where it was gone already, and False with a complaint where it cannot be."""
        try:
            self._layout.remove(entry.folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._complain(f"{_label(entry)} cannot be removed: {_error_text(error)}")
            return False
        return True

    def prune(self, limit: int) -> tuple[Entry, ...]:
        """Remove the least recently used entries until the rest has at most ``limit`` bytes. Returns the removed ones.

        Files that killed processes left behind are removed as well, once they are a day old.
        """
        return self._prune(limit, down_to=limit)

    def verify(self) -> tuple[tuple[Entry, str], ...]:
        """Read every byte of every entry. Removes the damaged ones and returns them, each with the reason."""
        wrong = ((entry, why) for folder in self._layout.entry_folders() for entry, why in _verified(folder))
        return tuple((entry, why) for entry, why in wrong if self._drop(entry, why) or _is_there(entry.folder))

    def distrust(self) -> str | None:
        """Why this folder is not used at all; None where it is used."""
        return distrust(self._named, "*", shareable=True)

    def _distrusted(self, entries: Path | None = None) -> bool:
        """Whether the folder is not used, with a complaint, or is not there."""
        inside = f"{entries.relative_to(self.folder)}/*" if entries else "*"
        try:
            real = trusted(self._named, inside, shareable=True)
        except Distrusted as refusal:
            self._complain(f"the cache is not used: {refusal}")
            return True
        if real is not None and real != self.folder:
            self._complain(f"the cache is not used: {self._named} led to {self.folder}, and leads to {real} now")
        return real != self.folder

    def _too_large(self, files: Mapping[str, Path]) -> bool:
        size = sum(path.stat().st_size for path in files.values())
        if size > self.limit:
            self._complain(
                f"{size / MIB:.1f} MiB were not cached: the limit of the cache is {self.limit / MIB:.1f} MiB"
            )
        return size > self.limit

    def _read(self, folder: Path) -> Entry | None:
        # Gone is no news: another process removed this entry, or another version of dsdoctor wrote it
        try:
            with suppress(Gone):
                return read_entry(folder)
        except Damaged as damage:
            self._drop(unreadable_entry(folder), str(damage))
        except OSError as error:
            self._complain(f"{_label(unreadable_entry(folder))} cannot be read: {_error_text(error)}")
        return None

    def _drop(self, entry: Entry, why: str) -> bool:
        dropped = self.remove(entry)
        if dropped:
            self.dropped.append(f"{_label(entry)} was dropped: {why}")
        return dropped

    def _is_as_good(self, folder: Path) -> bool:
        intact = self._read(folder) is not None
        if intact:
            self._use(folder)
        return intact

    def _use(self, folder: Path) -> None:
        # where the time of last use cannot be written, the entry is merely removed earlier
        with suppress(OSError):
            os.utime(folder / RECORD, follow_symlinks=False)

    def _bound(self, added: int) -> None:
        """Prune if ``added`` bytes may have passed the limit."""
        # pruned to nine tenths of the limit, so that not every put has to look at all entries again
        if self._total is not None and self._total + added <= self.limit:
            self._total += added
        else:
            self._prune(self.limit, down_to=max(self.limit * 9 // 10, added))

    def _prune(self, limit: int, *, down_to: int) -> tuple[Entry, ...]:
        self._layout.remove_leftovers()
        found = sorted((*last_use_and_size(folder), folder) for folder in self._layout.entry_folders())
        total = sum(size for _, size, _ in found)
        aim = down_to if total > limit else limit
        removed = []
        for _, size, folder in found:
            if total <= aim:
                break
            entry = self._read(folder) or unreadable_entry(folder)
            if self.remove(entry):
                removed.append(entry)
            total -= 0 if _is_there(folder) else size
        self._total = total
        return tuple(removed)

    def _complain(self, sentence: str) -> None:
        if sentence not in self.complaints:
            self.complaints.append(sentence)


def _verified(folder: Path) -> Iterator[tuple[Entry, str]]:
    """The entry and what is wrong with it; yields nothing for one that is intact or gone."""
    entry = unreadable_entry(folder)
    try:
        entry = read_entry(folder)
        check_files(entry)
    except Gone:
        return
    except (Damaged, OSError) as error:
        yield entry, _error_text(error)


def _is_there(folder: Path) -> bool:
    return folder.is_symlink() or folder.exists()


def _label(entry: Entry) -> str:
    name = entry.facts.get("op") or entry.facts.get("name")
    return " ".join(["the cached", KINDS[entry.kind], *([str(name)] if name else []), f"({entry.key[:12]})"])


def _error_text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
