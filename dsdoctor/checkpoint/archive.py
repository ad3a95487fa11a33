"""A file that torch.save wrote -> its entries, and what its pickle says, as inert data; or what is the matter with the file.

Reads the directory at the end of the zip and the pickle, never the tensors: a file of 70 GB costs what one of 70 kB costs.
"""

import errno
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from dsdoctor.checkpoint.inert import ITEM_SIZES, Storage
from dsdoctor.checkpoint.pickles import NotUnderstood, read_pickle
from dsdoctor.checkpoint.walk import tensors
from dsdoctor.core.files import open_regular

LARGEST_PICKLE = 64 << 20
DENIED = "you may not read it"
ZIP, LEGACY = b"PK\x03\x04", (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"\x80\x02}")
LOCAL_HEADER = 30
NOT_SAVED = (
    (b"version https://git-lfs", "it is a pointer of git-lfs and not the file, which git lfs pull gets"),
    (b"<", "it is a page of XML or HTML, as a download that was refused leaves it"),
    (b"\x1f\x8b", "it is compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd"),
)
"""How a file begins that stands for one of torch, and what it is."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the zip. ``header``: where its own header begins in the file."""

    header: int
    size: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A file as far as it could be read. ``problem``: what is the matter, "" for nothing. ``unknown``: why nothing is known.

    ``root``: the name that the file had when it was written, as torch puts it into the zip. ``content``: the pickle's.
    ``names``: every class and function that the pickle names.
    """

    path: Path
    size: int = 0
    modified: float = 0.0
    root: str = ""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    content: Any = None
    names: frozenset[str] = frozenset()
    problem: str = ""
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class Understood:
    """A pickle that was read: its content, the names in it, and the storages that it speaks of."""

    content: Any
    names: frozenset[str]
    storages: tuple[Storage, ...]


Pickles = dict[bytes, Understood]
"""Pickles by their bytes: of a large run's ranks most are the same, and each is read once."""


def read_archive(path: Path, pickles: Pickles) -> Archive:
    """Look at one file. What is the matter with it is told in the answer, and nothing is raised."""
    try:
        with open_regular(path) as file:
            return _read(path, file, pickles)
    except FileNotFoundError:
        reason = "it is a link to a file that is not there" if path.is_symlink() else "it is not there"
        return Archive(path=path, problem=reason)
    except IsADirectoryError:
        return Archive(path=path, problem="it is a folder")
    except PermissionError:
        return Archive(path=path, unknown=DENIED)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Archive(path=path, problem="it is a link that leads back to itself")
        return Archive(path=path, unknown=error.strerror or str(error))


def _read(path: Path, file: BinaryIO, pickles: Pickles) -> Archive:
    state = os.fstat(file.fileno())
    size = state.st_size
    known = Archive(path=path, size=size, modified=state.st_mtime)
    start = file.read(len(LEGACY[0]))
    if not size:
        return replace(known, problem="it is empty")
    if start.startswith(LEGACY):
        return replace(known, unknown="it is in torch's format from before 1.6, which is not read")
    if not start.startswith(ZIP):
        file.seek(0)
        return replace(known, problem=_other_kind(file.read(len(NOT_SAVED[0][0]))))
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError, MemoryError, EOFError):
        return replace(known, problem=f"it ends after {size:,} bytes without the zip's directory: it was cut off")
    return _inside(known, archive, pickles)


def _other_kind(start: bytes) -> str:
    """What a file is that torch did not write, by its first bytes."""
    if not start.strip(b"\0"):
        return "it begins with zeros: it was never written"
    return next((what for begin, what in NOT_SAVED if start.startswith(begin)), "it is no file of torch.save")


def _inside(known: Archive, archive: zipfile.ZipFile, pickles: Pickles) -> Archive:
    infos = archive.infolist()
    root = infos[0].filename.partition("/")[0] if infos else ""
    entries = {
        info.filename.partition("/")[2]: Entry(header=info.header_offset, size=info.file_size, crc=info.CRC)
        for info in infos
    }
    known = replace(known, root=root, entries=entries)
    if len(entries) != len(infos):
        return replace(known, unknown="its zip has two entries of one name")
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos):
        return replace(known, unknown="its zip is compressed, which torch never does")
    late = [name for name, entry in entries.items() if entry.header + LOCAL_HEADER + entry.size > known.size]
    if late:
        return replace(known, problem=f"{late[0]} lies behind the end of the file")
    if "data.pkl" not in entries:
        return replace(known, problem="its zip has no data.pkl")
    if entries["data.pkl"].size > LARGEST_PICKLE:
        return replace(known, unknown=f"its pickle is larger than {LARGEST_PICKLE >> 20} MiB")
    try:
        pickle = _understood(archive.read(f"{root}/data.pkl"), pickles)
    except (zipfile.BadZipFile, EOFError) as error:
        return replace(known, problem=f"its pickle is damaged: {str(error)[:100]}")
    except NotUnderstood as error:
        return replace(known, unknown=str(error))
    problem = _storage_problem(entries, pickle.storages)
    return replace(known, content=pickle.content, names=pickle.names, problem=problem)


def _understood(pickle: bytes, pickles: Pickles) -> Understood:
    """A pickle's content. Raises NotUnderstood."""
    if pickle not in pickles:
        names: set[str] = set()
        content = read_pickle(pickle, names)
        pickles[pickle] = Understood(content=content, names=frozenset(names), storages=_storages(content))
    return pickles[pickle]


def _storage_problem(entries: Mapping[str, Entry], storages: tuple[Storage, ...]) -> str:
    """What of the tensors that the pickle names is not in the zip."""
    for storage in storages:
        entry = entries.get(f"data/{storage.key}")
        if entry is None:
            return f"data/{storage.key}, the values of a tensor, is missing in its zip"
        wanted = storage.count * ITEM_SIZES.get(storage.dtype, 0)
        if wanted and entry.size != wanted:
            return f"data/{storage.key} has {entry.size:,} bytes, and its tensor {wanted:,}"
    return ""


def _storages(content: Any) -> tuple[Storage, ...]:
    """Every storage that a content speaks of, once."""
    return tuple(dict.fromkeys(tensor.storage for _, tensor in tensors(content)))
