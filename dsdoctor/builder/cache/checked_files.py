"""The files of one folder, read and written by those who believe nothing: every byte goes past a digest.

A link, a pipe, a wrong size, a wrong digest are Damaged. A folder is held open, so that moving it away disturbs no reader.
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
    """It is there, and is not what was stored. The words tell why."""


class Gone(Exception):
    """It is not there (any more), or is none of ours: somebody else pruned it, or a newer dsdoctor wrote it."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a file was when it was stored; ``size`` in bytes."""

    sha256: str
    size: int
    executable: bool = False


@dataclass(frozen=True, kw_only=True)
class Held:
    """A folder that is open: what is read is its own, even when it is moved away meanwhile."""

    folder: Path
    number: int

    def open(self, name: str) -> BinaryIO:
        """A regular file of it. Raises Damaged, Gone, or OSError where the disk does not answer."""
        try:
            # a pipe must not hold us up, and a link must not lead us away
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.number)
        except OSError as error:
            if error.errno in ABSENT:
                raise (Damaged(f"{name} is missing") if self._in_place() else Gone()) from None
            if error.errno in {errno.ELOOP, errno.ENXIO}:
                raise Damaged(f"{name} is no file of its own") from None
            raise
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise Damaged(f"{name} is no file of its own")
        return os.fdopen(number, "rb")

    def open_sized(self, name: str, stored: Stored) -> BinaryIO:
        """A file that has the size it should have."""
        file = self.open(name)
        size = os.fstat(file.fileno()).st_size
        if size != stored.size:
            file.close()
            raise Damaged(f"{name} has {size} bytes, {stored.size} were stored")
        return file

    def check(self, name: str, stored: Stored, target: BinaryIO | None = None) -> None:
        """Read a file to its end, copying it where a target is given. Raises Damaged where it is not what was stored."""
        with self.open_sized(name, stored) as source:
            if pour(source, target) != (stored.sha256, stored.size):
                raise Damaged(f"{name} has other bytes than were stored")

    def copy(self, name: str, stored: Stored, to: Path) -> None:
        """Copy a file to a path that does not exist yet; it is nothing to be used until this returns."""
        mode = 0o777 if stored.executable else 0o666  # the umask takes from it what it takes from a compiler's files
        with os.fdopen(os.open(to, NEW, mode), "wb") as target:
            self.check(name, stored, target)

    def _in_place(self) -> bool:
        """Whether the folder is still where it was: what lacks in one that is being removed is no damage."""
        try:
            return os.path.samestat(self.folder.lstat(), os.fstat(self.number))
        except OSError:
            return False


@contextmanager
def held(folder: Path) -> Iterator[Held]:
    """Hold a folder open. Raises Damaged for what is none, Gone, or OSError where the disk does not answer."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in ABSENT:
            raise Gone from None
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise Damaged("it is no folder of its own") from None
        raise
    try:
        yield Held(folder=folder, number=number)
    finally:
        os.close(number)


def store(source: Path, target: Path, mode: int) -> Stored:
    """Copy a file to where it is kept; it is on the disk when this returns. Raises OSError."""
    with source.open("rb") as original, new_file(target, mode) as copy:
        digest, size = pour(original, copy)
        executable = bool(os.fstat(original.fileno()).st_mode & stat.S_IXUSR)
        flush(copy)
    return Stored(sha256=digest, size=size, executable=executable)


def pour(source: BinaryIO, target: BinaryIO | None) -> tuple[str, int]:
    """Read to the end, copying: the sha256 and the size of what was read."""
    digest, size = sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest(), size


def new_file(path: Path, mode: int) -> BinaryIO:
    """A new file, with the rights of a folder of that mode but for executing."""
    file = os.fdopen(os.open(path, NEW, 0o600), "wb")
    if mode != PRIVATE:
        os.fchmod(file.fileno(), mode & 0o666)
    return file


def flush(file: BinaryIO) -> None:
    """Onto the disk with what was written: a full disk of a server speaks up here."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Onto the disk with the names in a folder."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
