"""Reads and writes the files of one cache folder, and checks the sha256 of every byte that is read or copied.

A link, a pipe, a wrong size and a wrong digest all raise Damaged: nothing found in a cache folder is trusted.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o700
CHUNK = 1 << 20
ABSENT = {errno.ENOENT, errno.ESTALE}
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class Damaged(Exception):
    """A file or folder that is there, and is not what was stored; the message says why."""


class Gone(Exception):
    """An entry that is not there any more (another process removed it), or that another version of dsdoctor wrote."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The digest, the size in bytes and the mode of a file when it was stored."""

    sha256: str
    size: int
    executable: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenFolder:
    """A folder held open by its file descriptor, ``number``: another process may move it away while it is read."""

    folder: Path
    number: int

    def open(self, name: str) -> BinaryIO:
        """Open a regular file of this folder. Raises Damaged, Gone, or OSError where the disk does not answer."""
        try:
            # O_NONBLOCK: opening a pipe must not hang; O_NOFOLLOW: a link must not lead out of the folder
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.number)
        except OSError as error:
            if error.errno in ABSENT:
                raise (Damaged(f"{name} is missing") if self._in_place() else Gone()) from None
            if error.errno in {errno.ELOOP, errno.ENXIO}:
                raise Damaged(f"{name} is not a regular file") from None
            raise
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise Damaged(f"{name} is not a regular file")
        return os.fdopen(number, "rb")

    def open_sized(self, name: str, stored: Stored) -> BinaryIO:
        """Open a file. Raises Damaged as well where its size is not the stored one."""
        file = self.open(name)
        size = os.fstat(file.fileno()).st_size
        if size != stored.size:
            file.close()
            raise Damaged(f"{name} has {size} bytes, {stored.size} were stored")
        return file

    def check(self, name: str, stored: Stored, target: BinaryIO | None = None) -> None:
        """Read a whole file, and copy it where a target is given. Raises Damaged where it is not what was stored."""
        with self.open_sized(name, stored) as source:
            if copy_and_hash(source, target) != (stored.sha256, stored.size):
                raise Damaged(f"{name} has other bytes than were stored")

    def copy(self, name: str, stored: Stored, to: Path) -> None:
        """Copy a file to a path that does not exist yet. Until this returns, the copy must not be used."""
        mode = 0o755 if stored.executable else 0o644  # no umask lets others write
        with os.fdopen(os.open(to, NEW, mode), "wb") as target:
            self.check(name, stored, target)

    def _in_place(self) -> bool:
        """Whether the folder is still at its path."""
        # another process that removes an entry moves its folder away first: a file missing from that one is no damage
        try:
            return os.path.samestat(self.folder.lstat(), os.fstat(self.number))
        except OSError:
            return False


@contextmanager
def open_folder(folder: Path) -> Iterator[OpenFolder]:
    """Hold a folder open. Raises Damaged for what is not a folder, Gone, or OSError where the disk does not answer."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in ABSENT:
            raise Gone from None
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise Damaged("it is not a folder") from None
        raise
    try:
        yield OpenFolder(folder=folder, number=number)
    finally:
        os.close(number)


def store(source: Path, target: Path, mode: int) -> Stored:
    """Copy a file into the cache; it is on the disk (fsync) when this returns. Raises OSError."""
    with source.open("rb") as original, new_file(target, mode) as copy:
        digest, size = copy_and_hash(original, copy)
        executable = bool(os.fstat(original.fileno()).st_mode & stat.S_IXUSR)
        flush(copy)
    return Stored(sha256=digest, size=size, executable=executable)


def copy_and_hash(source: BinaryIO, target: BinaryIO | None) -> tuple[str, int]:
    """Read to the end and copy to ``target`` if there is one. Returns the sha256 and the size of what was read."""
    digest, size = sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest(), size


def new_file(path: Path, mode: int) -> BinaryIO:
    """Create a file with the permissions of a folder of that mode, without those to execute."""
    file = os.fdopen(os.open(path, NEW, 0o600), "wb")
    if mode != PRIVATE:
        os.fchmod(file.fileno(), mode & 0o666)
    return file


def flush(file: BinaryIO) -> None:
    """Write a file through to the disk (fsync)."""
    # on a network file system, a full disk is reported only here
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk (fsync)."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
