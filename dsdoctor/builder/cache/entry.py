"""One cache entry: a folder of files and ``entry.json``, their digests. Writes, reads and checks entries; removes none.

A record is trusted when the folder's name is the sha256 of the record and every file name in it is a plain name.
"""

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.builder.cache.checked_files import (
    PRIVATE,
    Damaged,
    Gone,
    Stored,
    flush,
    flush_folder,
    new_file,
    open_folder,
    store,
)
from dsdoctor.core.text import decode, encode

SCHEMA = "dsdoctor-cache/1"
RECORD = "entry.json"
LARGEST_RECORD = 64 << 20
LONGEST_NAME = 255


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


def plain(name: str) -> bool:
    """Whether a name is that of a file directly inside a folder, and can be written as JSON.

    >>> plain("fused_adam_op.so"), plain("../x"), plain("/etc/x"), plain("."), plain("entry.json"), plain("\\udce9")
    (True, False, False, False, False, False)
    """
    if name in {"", ".", "..", RECORD} or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= LONGEST_NAME
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
            data = file.read(LARGEST_RECORD)
            used = os.fstat(file.fileno()).st_mtime
        if sha256(data).hexdigest() != folder.name:
            raise Damaged(f"{RECORD} has other bytes than were stored")
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
