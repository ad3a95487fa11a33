"""A file that torch.save wrote: its entries, and what its pickle says as inert data; or what is the matter with the file.

Reads the zip's directory, the headers of its entries and the pickle, never the tensors: 70 GB cost what 70 kB cost.
"""

import errno
import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from dsdoctor.checkpoint.inert_pickle import ITEM_SIZES, NotUnderstood, Storage, Tensor, read_pickle
from dsdoctor.core.files import open_regular
from dsdoctor.core.zip_file import (
    HEADER,
    HEADER_MARK,
    STORED,
    AmbiguousZip,
    BadZip,
    DamagedZip,
    Entry,
    read_bytes,
    read_entries,
)
from dsdoctor.rules import book

MAX_PICKLE_BYTES = 64 << 20
DENIED = "you may not read it"
PICKLE = "data.pkl"
MARKS = frozenset({"version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"})
"""What torch writes beside the pickle and the tensors."""
WRITTEN = {
    "version": (rb"(?:[1-9]|10)\n?", "an unknown version of torch's format"),
    "byteorder": (rb"little|big", "a byte order that does not exist"),
    ".storage_alignment": (rb"[1-9]\d{0,6}", "an alignment that is not a number"),
}
"""What torch's reader takes of them, and what anything else is."""
ALIGNMENT = 64
LEGACY = (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"\x80\x02}")
NOT_SAVED = (
    (b"version https://git-lfs", "it is a git-lfs pointer; git lfs pull downloads the file"),
    (b"<", "it is an XML or HTML page, as a refused download leaves it"),
    (b"\x1f\x8b", "it is compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd"),
)
"""How a file begins that stands for one of torch, and what it is."""


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A file as far as it could be read. ``problem``: what is the matter, "" for nothing. ``unknown``: why nothing is known.

    ``ambiguous``: whether the problem is that another reader could see other contents. ``root``: the name that the file had when
    it was written, as torch puts it into the zip. ``content``: the pickle's; ``digest``: of its bytes. ``storages``: those that it
    speaks of. ``names``: every class and function that it names.
    """

    path: Path
    size: int = 0
    modified: float = 0.0
    root: str = ""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    content: Any = None
    digest: bytes = b""
    storages: tuple[Storage, ...] = ()
    names: frozenset[str] = frozenset()
    problem: str = ""
    ambiguous: bool = False
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class ReadPickle:
    """A pickle that was read: its content, the names in it, the storages that it speaks of, and what is wrong in itself."""

    content: Any
    names: frozenset[str]
    storages: tuple[Storage, ...]
    problem: str


Pickles = dict[bytes, ReadPickle]
"""Pickles by the digest of their bytes: of a large run's ranks most are the same, and each is read once."""


def read_archive(path: Path, pickles: Pickles) -> Archive:
    """Look at one file. What is the matter with it is told in the answer, and nothing is raised."""
    try:
        with open_regular(path) as file:
            return _read(path, file, pickles)
    except FileNotFoundError:
        reason = "it is a link to a missing file" if path.is_symlink() else "it is not there"
        return Archive(path=path, problem=reason)
    except IsADirectoryError:
        return Archive(path=path, problem="it is a folder")
    except PermissionError:
        return Archive(path=path, unknown=DENIED)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Archive(path=path, problem="it is a link to itself")
        return Archive(path=path, unknown=error.strerror or str(error))
    except Exception as error:
        # a file of anybody's: the verdict on the others must not fail with it
        return Archive(path=path, unknown=f"it could not be read: {type(error).__name__}: {str(error)[:100]}")


def entries_of(file: BinaryIO) -> tuple[str, dict[str, Entry]]:
    """The folder in which all entries of the zip stand, and these by their names in it. Raises BadZip, and OSError."""
    found = [entry for entry in read_entries(file) if not entry.is_folder]
    root = found[0].name.partition("/")[0] if found else ""
    if any(not entry.name.startswith(f"{root}/") for entry in found):
        raise AmbiguousZip("its entries are not in one folder")
    return root, {entry.name.removeprefix(f"{root}/"): entry for entry in found}


def write_copy(archive: Archive, made: BinaryIO, copied: Callable[[int], None]) -> None:
    """Write a file anew, of what was judged: its pickle, and the bytes of its storages. ``copied`` is told the bytes.

    Raises BadZip where the file is another one by now, or its bytes are not those that its directory tells of.
    """
    with open_regular(archive.path) as file, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as copy:
        root, entries = entries_of(file)
        if (root, entries) != (archive.root, archive.entries):
            raise DamagedZip("it changed during the inspection")
        for name, entry in entries.items():
            if name == PICKLE:
                # the very bytes that were read as data, in one look
                content = b"".join(read_bytes(file, entry))
                if hashlib.sha256(content).digest() != archive.digest:
                    raise DamagedZip("it changed during the inspection")
                pieces: Iterable[bytes] = (content,)
            elif name.startswith("data/") or name in MARKS:
                pieces = read_bytes(file, entry)
            else:
                continue
            info = zipfile.ZipInfo(f"{root}/{name}")
            # torch maps a file into memory, where tensors are to begin at round addresses
            ahead = (
                made.tell()
                + HEADER.size
                + len(info.filename.encode())
                + (20 if entry.size > zipfile.ZIP64_LIMIT else 0)
            )
            padding = -(ahead + 4) % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            info.file_size = entry.size
            with copy.open(info, "w") as target:
                for piece in pieces:
                    target.write(piece)
                    copied(len(piece))


def _read(path: Path, file: BinaryIO, pickles: Pickles) -> Archive:
    state = os.fstat(file.fileno())
    known = Archive(path=path, size=state.st_size, modified=state.st_mtime)
    start = file.read(len(LEGACY[0]))
    if not known.size:
        return replace(known, problem="it is empty")
    if start.startswith(LEGACY):
        return replace(known, unknown=book.phrase("checkpoint", "legacy-format"))
    if not start.startswith(HEADER_MARK):
        file.seek(0)
        return replace(known, problem=_other_kind(file.read(len(NOT_SAVED[0][0]))))
    try:
        root, entries = entries_of(file)
        known = replace(known, root=root, entries=entries)
        return _with_pickle(known, file, pickles)
    except DamagedZip as error:
        return replace(known, problem=str(error))
    except AmbiguousZip as error:
        return replace(known, problem=str(error), ambiguous=True)
    except (BadZip, NotUnderstood) as error:
        return replace(known, unknown=str(error))


def _other_kind(start: bytes) -> str:
    """What a file is that torch did not write, by its first bytes."""
    if not start.strip(b"\0"):
        return "it begins with zeros: it was never written"
    return next((what for begin, what in NOT_SAVED if start.startswith(begin)), "it was not written by torch.save")


def _with_pickle(known: Archive, file: BinaryIO, pickles: Pickles) -> Archive:
    """What the pickle says. Raises BadZip and NotUnderstood."""
    if any(entry.method != STORED for entry in known.entries.values()):
        return replace(known, unknown=book.phrase("checkpoint", "zip-compressed"))
    if PICKLE not in known.entries:
        return replace(known, problem=f"its zip has no {PICKLE}")
    if known.entries[PICKLE].size > MAX_PICKLE_BYTES:
        return replace(known, unknown=f"its pickle is larger than {MAX_PICKLE_BYTES >> 20} MiB")
    if reason := _mark_problem(known.entries, file):
        return replace(known, unknown=reason)
    content = b"".join(read_bytes(file, known.entries[PICKLE]))
    digest = hashlib.sha256(content).digest()
    if digest not in pickles:
        names: set[str] = set()
        built: list[Storage | Tensor] = []
        made = read_pickle(content, names, built=built)
        # a large file names each storage once for each of its tensors
        storages = tuple(dict.fromkeys(each for each in built if isinstance(each, Storage)))
        problem = next(filter(None, (_reach_problem(each) for each in built if isinstance(each, Tensor))), "")
        pickles[digest] = ReadPickle(content=made, names=frozenset(names), storages=storages, problem=problem)
    pickle = pickles[digest]
    return replace(
        known,
        content=pickle.content,
        digest=digest,
        storages=pickle.storages,
        names=pickle.names,
        problem=pickle.problem or _storage_problem(known.entries, pickle.storages),
    )


def _mark_problem(entries: Mapping[str, Entry], file: BinaryIO) -> str:
    """What torch's reader would refuse beside the pickle and the tensors; "" for nothing."""
    if "version" not in entries and ".data/version" not in entries:
        return "its zip has no version entry, which torch requires"
    for name, (form, otherwise) in WRITTEN.items():
        if name in entries and (
            entries[name].size > ALIGNMENT or not re.fullmatch(form, b"".join(read_bytes(file, entries[name])))
        ):
            return f"its zip has {otherwise}"
    return ""


def _reach_problem(tensor: Tensor) -> str:
    """That a tensor reaches beyond its storage: torch.load refuses it."""
    sizes = [ITEM_SIZES.get(dtype, 0) for dtype in (tensor.dtype, tensor.storage.dtype)]
    if not all(sizes) or not tensor.count:
        return ""
    last = tensor.start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
    if tensor.start >= 0 and last >= 0 and (last + 1) * sizes[0] <= tensor.storage.count * sizes[1]:
        return ""
    return f"a tensor reaches beyond its values, data/{tensor.storage.key}"


def _storage_problem(entries: Mapping[str, Entry], storages: tuple[Storage, ...]) -> str:
    """What of the tensors that the pickle names is not in the zip."""
    for storage in storages:
        entry = entries.get(f"data/{storage.key}")
        if entry is None:
            return f"data/{storage.key}, the values of a tensor, is missing in its zip"
        if storage.dtype not in ITEM_SIZES:
            continue
        wanted = storage.count * ITEM_SIZES[storage.dtype]
        if entry.size != wanted:
            return f"data/{storage.key} has {entry.size:,} bytes, but its tensor has {wanted:,}"
    return ""
