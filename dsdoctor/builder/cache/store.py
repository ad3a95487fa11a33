"""The op cache: files under a key, in a folder that many builds, users and machines may use at once.

Nobody waits for a lock: entries appear and go as wholes, and every byte that is taken is checked on the way. What is damaged is
dropped and said, never served; a disk that is full or cannot be written is a complaint, never an error.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsdoctor.builder.cache.checked_files import Damaged, Gone, Stored
from dsdoctor.builder.cache.entry import (
    RECORD,
    Entry,
    check_files,
    copy_out,
    nameless,
    plain,
    read_entry,
    weigh,
    write_entry,
)
from dsdoctor.builder.cache.layout import KINDS, CacheLayout, distrust, mode_inside, named

__all__ = ["CacheStore", "Entry", "Stored"]

MIB = 1 << 20


class CacheStore:
    """A cache folder, made when something is put. ``dropped`` and ``complaints`` hold sentences for the user.

    ``limit`` is in bytes; the least recently used entries go when what is put passes it.
    """

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.dropped: list[str] = []
        self.complaints: list[str] = []
        self._shelves = CacheLayout(folder=folder)
        self._total: int | None = None

    def find(self, kind: str, key: str) -> tuple[Entry, ...]:
        """All that is stored under a key, the last used first."""
        shelf = self._shelves.shelf(kind, key)
        if self._distrusted():
            return ()
        found = [entry for folder in named(shelf, 64) if (entry := self._read(folder))]
        return tuple(sorted(found, key=lambda entry: entry.used, reverse=True))

    def take(self, entry: Entry, into: Path) -> bool:
        """Copy the files of an entry into a folder, each checked on the way: all of them, or none and False."""
        try:
            copy_out(entry, into)
        except Gone:
            return False
        except Damaged as damage:
            self._drop(entry, str(damage))
            return False
        except OSError as error:
            self._complain(f"{_called(entry)} could not be copied to {into}: {_words(error)}")
            return False
        self._use(entry.folder)
        return True

    def put(self, kind: str, key: str, files: Mapping[str, Path], facts: Mapping[str, Any]) -> Entry | None:
        """Keep files under a key, with facts that JSON can hold; None, and a complaint, where the disk cannot.

        Raises ValueError for a key that is no sha256 and a name that is no plain name, TypeError for facts that are no JSON.
        """
        shelf = self._shelves.shelf(kind, key)
        if bad := [name for name in files if not plain(name)]:
            raise ValueError(f"{bad[0]!r} is no plain file name")
        try:
            if self._distrusted() or self._too_large(files):
                return None
            with self._shelves.workdir() as made:
                entry = write_entry(made, shelf, files, facts, mode_inside(self.folder))
                self._shelves.place(made, entry.folder, self._stays)
        except (OSError, UnicodeEncodeError) as error:
            self._complain(f"nothing can be kept in the cache {self.folder}: {_words(error)}")
            return None
        self._bound(entry.size)
        return entry

    def entries(self) -> Iterator[Entry]:
        """All that is stored."""
        return (entry for folder in self._shelves.standing() if (entry := self._read(folder)))

    def remove(self, entry: Entry) -> bool:
        """Remove an entry; False where it was gone already, and False with a complaint where it cannot be."""
        try:
            self._shelves.take_down(entry.folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._complain(f"{_called(entry)} cannot be removed: {_words(error)}")
            return False
        return True

    def prune(self, limit: int) -> tuple[Entry, ...]:
        """Remove the least recently used entries until the rest has at most ``limit`` bytes. Returns the removed ones.

        What killed writers left behind goes as well, after a day.
        """
        return self._prune(limit, down_to=limit)

    def verify(self) -> tuple[tuple[Entry, str], ...]:
        """Read every byte. Removes the entries that are not what was stored and returns them, each with the reason."""
        wrong = ((entry, why) for folder in self._shelves.standing() for entry, why in _verified(folder))
        return tuple((entry, why) for entry, why in wrong if self._drop(entry, why) or _is_there(entry.folder))

    def distrust(self) -> str | None:
        """Why this folder is not used at all; None where it is."""
        return distrust(self.folder)

    def _distrusted(self) -> bool:
        why = self.distrust()
        if why:
            self._complain(f"the cache is not used: {why}")
        return why is not None

    def _too_large(self, files: Mapping[str, Path]) -> bool:
        size = sum(path.stat().st_size for path in files.values())
        if size > self.limit:
            self._complain(f"{size / MIB:.1f} MiB are not kept: the limit of the cache is {self.limit / MIB:.1f} MiB")
        return size > self.limit

    def _read(self, folder: Path) -> Entry | None:
        try:
            return read_entry(folder)
        except Gone:
            pass
        except Damaged as damage:
            self._drop(nameless(folder), str(damage))
        except OSError as error:
            self._complain(f"{_called(nameless(folder))} cannot be read: {_words(error)}")
        return None

    def _drop(self, entry: Entry, why: str) -> bool:
        dropped = self.remove(entry)
        if dropped:
            self.dropped.append(f"{_called(entry)} was dropped: {why}")
        return dropped

    def _stays(self, folder: Path) -> bool:
        well = self._read(folder) is not None
        if well:
            self._use(folder)
        return well

    def _use(self, folder: Path) -> None:
        with suppress(OSError):
            os.utime(folder / RECORD, follow_symlinks=False)

    def _bound(self, added: int) -> None:
        """Keep to the limit, with a tenth to spare: not every put must look at everything."""
        if self._total is not None and self._total + added <= self.limit:
            self._total += added
        else:
            self._prune(self.limit, down_to=max(self.limit * 9 // 10, added))

    def _prune(self, limit: int, *, down_to: int) -> tuple[Entry, ...]:
        self._shelves.sweep()
        found = sorted((*weigh(folder), folder) for folder in self._shelves.standing())
        total = sum(size for _, size, _ in found)
        aim = down_to if total > limit else limit
        removed = []
        for _, size, folder in found:
            if total <= aim:
                break
            entry = self._read(folder) or nameless(folder)
            if self.remove(entry):
                removed.append(entry)
            total -= 0 if _is_there(folder) else size
        self._total = total
        return tuple(removed)

    def _complain(self, sentence: str) -> None:
        if sentence not in self.complaints:
            self.complaints.append(sentence)


def _verified(folder: Path) -> Iterator[tuple[Entry, str]]:
    """The entry and what is wrong with it; nothing where it is well or gone."""
    entry = nameless(folder)
    try:
        entry = read_entry(folder)
        check_files(entry)
    except Gone:
        return
    except (Damaged, OSError) as error:
        yield entry, _words(error)


def _is_there(folder: Path) -> bool:
    return folder.is_symlink() or folder.exists()


def _called(entry: Entry) -> str:
    name = entry.facts.get("op") or entry.facts.get("name")
    return " ".join(["the cached", KINDS[entry.kind], *([str(name)] if name else []), f"({entry.key[:12]})"])


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
