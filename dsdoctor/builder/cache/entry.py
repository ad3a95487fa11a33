"""One cache entry: a folder of files and ``entry.json``, their digests. Writes, reads and checks entries; removes none.

Nothing found in a cache folder is trusted: a link, a pipe, a wrong size and a wrong digest all raise Damaged. A record is trusted
when the folder's name is the sha256 of the record and every file name in it is a plain name.
"""

import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dsdoctor.core.text import decode, encode

PRIVATE = 0o700
CHUNK_BYTES = 1 << 20
ABSENT = {errno.ENOENT, errno.ESTALE}
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
SCHEMA = "dsdoctor-cache/1"
RECORD = "entry.json"
MAX_RECORD_BYTES = 64 << 20
MAX_NAME_BYTES = 255


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
                raise Damaged(f"{name} differs from the bytes that were stored")

    def copy(self, name: str, stored: Stored, to: Path) -> None:
        """Copy a file to a path that does not exist yet. Until this returns, the copy must not be used."""
        mode = 0o755 if stored.executable else 0o644  # no umask lets others write
        with os.fdopen(os.open(to, NEW_FILE, mode), "wb") as target:
            self.check(name, stored, target)

    def _in_place(self) -> bool:
        """Whether the folder is still at its path."""
        # another process that removes an entry moves its folder away first: a file missing from that one is no damage
        try:
            return os.path.samestat(self.folder.lstat(), os.fstat(self.number))
        except OSError:
            return False


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is kept under a key. ``used`` is when it was last used (seconds since 1970), ``size`` the bytes of all its files."""

    kind: str
    key: str
    folder: Path
    files: dict[str, Stored]
    facts: dict[str, Any]
    used: float
    size: int


@dataclass(frozen=True, kw_only=True)
class _Head:
    schema: str


@dataclass(frozen=True, kw_only=True)
class _Record:
    schema: str = SCHEMA
    kind: str
    key: str
    files: dict[str, Stored]
    facts: dict[str, Any]


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
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest(), size


def new_file(path: Path, mode: int) -> BinaryIO:
    """Create a file with the permissions of a folder of that mode, without those to execute."""
    file = os.fdopen(os.open(path, NEW_FILE, 0o600), "wb")
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


def plain(name: str) -> bool:
    """Whether a name is that of a file directly inside a folder, and can be written as JSON.

    >>> plain("fused_adam_op.so"), plain("../x"), plain("/etc/x"), plain("."), plain("entry.json"), plain("\\udce9")
    (True, False, False, False, False, False)
    """
    if name in {"", ".", "..", RECORD} or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def address(folder: Path) -> tuple[str, str]:
    """The kind and the key of an entry, from its folder: <kind>/<first two digits of the key>/<key>/<digest>."""
    return folder.parts[-4], folder.parts[-2]


def write_entry(
    folder: Path, key_folder: Path, files: Mapping[str, Path], facts: Mapping[str, Any], mode: int
) -> Entry:
    """Copy files into an empty folder and write their record. Everything is on the disk when this returns. Raises OSError.

    Returns the entry as it will be once the folder was moved into ``key_folder``, the folder of its key. ``mode`` is the mode
    of the entry's folder.
    """
    stored = {name: store(path, folder / name, mode) for name, path in sorted(files.items())}
    kind, key = address(key_folder / "x")
    data = encode(_Record(kind=kind, key=key, files=stored, facts=dict(facts)), order="sorted")
    with new_file(folder / RECORD, mode) as file:
        file.write(data)
        flush(file)
    if mode != PRIVATE:
        folder.chmod(mode)
    flush_folder(folder)
    return _entry(key_folder / sha256(data).hexdigest(), decode(data, _Record), len(data), time.time())


def read_entry(folder: Path) -> Entry:
    """Read the entry of a folder. Only the sizes of its files are checked.

    Raises Damaged, Gone, or OSError where the disk does not answer.
    """
    with open_folder(folder) as inside:
        with inside.open(RECORD) as file:
            data = file.read(MAX_RECORD_BYTES)
            used = os.fstat(file.fileno()).st_mtime
        if sha256(data).hexdigest() != folder.name:
            raise Damaged(f"{RECORD} differs from the bytes that were stored")
        record = _decoded(data)
        if (record.kind, record.key) != address(folder):
            raise Damaged(f"it was stored under another key, {record.kind} {record.key}")
        for name, stored in record.files.items():
            inside.open_sized(name, stored).close()
    return _entry(folder, record, len(data), used)


def copy_out(entry: Entry, into: Path) -> None:
    """Copy all files of an entry into a folder, each checked against its digest. On any error none of them is left there.

    Raises Damaged, Gone, or OSError where the disk does not answer or ``into`` cannot be written.
    """
    into.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    parts = {into / f".{token}.{number}": name for number, name in enumerate(entry.files)}
    made: list[Path] = []
    try:
        with open_folder(entry.folder) as inside:
            for part, name in parts.items():
                made.append(part)
                inside.copy(name, entry.files[name], part)
        for part, name in parts.items():
            part.replace(into / name)
            made.append(into / name)
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.unlink()
        raise


def check_files(entry: Entry) -> None:
    """Read every byte of an entry. Raises Damaged, Gone, or OSError where the disk does not answer."""
    with open_folder(entry.folder) as inside:
        for name, stored in entry.files.items():
            inside.check(name, stored)


def last_use_and_size(folder: Path) -> tuple[float, int]:
    """When an entry was last used and how many bytes it has, without reading its record; 0 and 0 for one that is gone."""
    used, size = 0.0, 0
    with suppress(OSError), os.scandir(folder) as inside:
        for item in inside:
            found = item.stat(follow_symlinks=False)
            size += found.st_size
            used = found.st_mtime if item.name == RECORD else used
    return used, size


def unreadable_entry(folder: Path) -> Entry:
    """A stand-in for an entry whose record cannot be read, so that it can be named and removed."""
    kind, key = address(folder)
    used, size = last_use_and_size(folder)
    return Entry(kind=kind, key=key, folder=folder, files={}, facts={}, used=used, size=size)


def _entry(folder: Path, record: _Record, record_size: int, used: float) -> Entry:
    return Entry(
        kind=record.kind,
        key=record.key,
        folder=folder,
        files=record.files,
        facts=record.facts,
        used=used,
        size=record_size + sum(stored.size for stored in record.files.values()),
    )


def _decoded(data: bytes) -> _Record:
    try:
        if decode(data, _Head).schema != SCHEMA:
            raise Gone
        record = decode(data, _Record)
    except msgspec.DecodeError as error:
        raise Damaged(f"{RECORD} is malformed: {error}") from None
    if bad := [name for name in record.files if not plain(name)]:
        raise Damaged(f"{RECORD} names a file {bad[0]!r}")
    return record
