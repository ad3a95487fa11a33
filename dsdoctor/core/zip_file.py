"""A zip file that all readers read alike: its directory, and the bytes of its entries. What two readers could take for different
contents is refused.

A zip says everything twice, and readers choose: the directory at its end or the header before each entry, the offset in a zip64
locator or the record that stands before it, the first of two equal names or the last. Here one end record, one directory and one
header for each entry must say the same, and must leave no byte of the file to spare.
"""

import os
import posixpath
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO

STORED, DEFLATED = 0, 8
MAX_ENTRIES = 200_000
MAX_DIRECTORY_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20

HEADER = struct.Struct("<4s5H3L2H")
RECORD = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
HEADER_MARK, RECORD_MARK, END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
LOCATOR_MARK, END64_MARK, DESCRIPTOR_MARK = b"PK\x06\x07", b"PK\x06\x06", b"PK\x07\x08"
MAX_COMMENT = 0xFFFF
NEWEST_VERSION = 63
"""Of the format, times ten: what a reader must know who reads an entry."""
IN_ZIP64 = {2: 0xFFFF, 4: 0xFFFFFFFF}
"""Bytes of a field -> what it holds where the value itself stands in a zip64 field."""
ZIP64, UNICODE_PATH = 0x0001, 0x7075
"""Extra fields: sizes of 64 bits, and another name than the one in the header."""
ENCRYPTED, DESCRIPTOR, UTF8 = 0x0001, 0x0008, 0x0800
KNOWN_FLAGS = 0x0006 | DESCRIPTOR | UTF8
"""How hard deflate tried, sizes behind the bytes, names in UTF-8."""


class BadZip(Exception):
    """A zip file that is not read, and why."""


class DamagedZip(BadZip):
    """It was cut off, or written over."""


class AmbiguousZip(BadZip):
    """Two readers could see two contents, or the one that is there could be written outside of a folder."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry. ``header``: where its header begins, ``start``: where its bytes do. ``stored``: how many these are in the file.

    ``mode``: the rights and the kind that Unix gives to the file, 0 where nothing says them.
    """

    name: str
    header: int
    start: int
    stored: int
    size: int
    crc: int
    method: int = STORED
    mode: int = 0

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, which has no bytes."""
        return self.name.endswith("/")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What the directory says of an entry."""

    raw: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    header: int
    mode: int

    @property
    def shown(self) -> str:
        return repr(self.raw[:200].decode("utf-8", "backslashreplace"))


def read_entries(file: BinaryIO) -> tuple[Entry, ...]:
    """The entries in the order of the directory. Raises BadZip, and OSError."""
    size = file.seek(0, os.SEEK_END)
    count, start, end = _directory_of(file, size)
    file.seek(start)
    records = tuple(_records(file.read(end - start), count))
    entries = dict(_laid_out(file, records, start))
    _check_names(records)
    return tuple(entries[record.header] for record in records)


def read_bytes(file: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """The bytes of an entry, a MiB at a time. Raises DamagedZip where they are not what the directory says."""
    file.seek(entry.start)
    left, size, crc = entry.stored, 0, 0
    inflate = zlib.decompressobj(-zlib.MAX_WBITS) if entry.method == DEFLATED else None
    waiting = b""
    while True:
        if not waiting and left:
            waiting = file.read(min(left, CHUNK_BYTES))
            left -= len(waiting)
            if not waiting:
                raise DamagedZip(f"it ends within {entry.name!r}")
        try:
            piece = waiting if inflate is None else inflate.decompress(waiting, CHUNK_BYTES)
        except zlib.error as error:
            raise DamagedZip(f"{entry.name!r} cannot be unpacked: {error}") from None
        waiting = b"" if inflate is None else inflate.unconsumed_tail
        if inflate is not None and inflate.eof and (inflate.unused_data or left):
            raise DamagedZip(f"{entry.name!r} does not end where the directory says")
        size, crc = size + len(piece), zlib.crc32(piece, crc)
        if size > entry.size:
            raise DamagedZip(f"{entry.name!r} is longer than the directory says")
        if piece:
            yield piece
        elif not left and not waiting:
            break
    if inflate is not None and not inflate.eof:
        raise DamagedZip(f"{entry.name!r} does not end where the directory says")
    if (size, crc) != (entry.size, entry.crc):
        raise DamagedZip(f"{entry.name!r} has a checksum or length that differs from the directory's")


def _directory_of(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """(entries, where the directory begins, where it ends) by the end record and the zip64 record, which must agree."""
    tail_start = max(0, size - END.size - MAX_COMMENT - LOCATOR.size)
    file.seek(tail_start)
    tail = file.read(size - tail_start)
    at = tail.rfind(END_MARK, 0, len(tail) - END.size + len(END_MARK))
    if at < 0:
        raise DamagedZip(f"it ends after {size:,} bytes without the zip's directory: it was cut off")
    _, disk, first_disk, here, count, length, offset, comment = END.unpack_from(tail, at)
    if len(tail) - at - END.size != comment or END_MARK[:2] in tail[at + END.size :]:
        raise AmbiguousZip("there is data after the zip's end record")
    end, values, fields = tail_start + at, (count, length, offset), (2, 4, 4)
    if disk or first_disk or here != count:
        raise AmbiguousZip("its end record refers to several disks")
    if tail[max(0, at - LOCATOR.size) : at].startswith(LOCATOR_MARK) and at >= LOCATOR.size:
        end, whole = _zip64_end(file, end - LOCATOR.size, LOCATOR.unpack_from(tail, at - LOCATOR.size))
        for value, width, other in zip(values, fields, whole, strict=True):
            if value not in {other, IN_ZIP64[width]}:
                raise AmbiguousZip("its end record and its zip64 record differ")
        values = whole
    elif any(value == IN_ZIP64[width] for value, width in zip(values, fields, strict=True)):
        raise AmbiguousZip("its end record refers to a missing zip64 record")
    count, length, offset = values
    if offset + length != end:
        raise AmbiguousZip("its directory does not end where its end record begins")
    if count > MAX_ENTRIES or length > MAX_DIRECTORY_BYTES:
        raise BadZip(f"its directory has {count:,} entries in {length:,} bytes, more than are read here")
    return count, offset, end


def _zip64_end(file: BinaryIO, locator: int, fields: tuple[bytes, int, int, int]) -> tuple[int, tuple[int, int, int]]:
    """Where the zip64 record begins, and (entries, bytes, offset) of the directory by it."""
    _, disk, begin, disks = fields
    if disk or disks != 1 or begin != locator - END64.size:
        raise AmbiguousZip("its zip64 locator does not point to the record before it")
    file.seek(begin)
    mark, length, _, _, disk, first_disk, here, count, size, offset = END64.unpack(_exactly(file, END64.size))
    if mark != END64_MARK or length != END64.size - 12 or disk or first_disk or here != count:
        raise AmbiguousZip("its zip64 record does not describe a single directory")
    return begin, (count, size, offset)


def _records(directory: bytes, count: int) -> Iterator[_Record]:
    """The records of a directory, which they must fill."""
    at = 0
    for _ in range(count):
        if len(directory) - at < RECORD.size or not directory.startswith(RECORD_MARK, at):
            raise AmbiguousZip("its directory does not have the entries that its end record counts")
        fields = RECORD.unpack_from(directory, at)
        made, flags, method = fields[1], fields[3], fields[4]
        crc, stored, size, name_length, extra_length, comment_length, disk = fields[7:14]
        attributes, header = fields[15:]
        at += RECORD.size
        raw, extra = directory[at : at + name_length], directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        if at > len(directory):
            raise AmbiguousZip("an entry extends past its directory")
        size, stored, header = _widened(extra, (size, stored, header), raw)
        mode = attributes >> 16 if made >> 8 == 3 else 0
        record = _Record(
            raw=raw, flags=flags, method=method, crc=crc, stored=stored, size=size, header=header, mode=mode
        )
        if disk or flags & ~KNOWN_FLAGS or fields[2] & 0xFF > NEWEST_VERSION:
            how = "encrypted" if flags & ENCRYPTED else "stored in an unsupported way"
            raise AmbiguousZip(f"{record.shown} is {how}")
        if method not in {STORED, DEFLATED} or (method == STORED and stored != size):
            raise AmbiguousZip(f"{record.shown} is compressed in a way that not every reader supports")
        yield record
    if at != len(directory):
        raise AmbiguousZip("its directory has more than the entries that its end record counts")


def _widened(extra: bytes, values: tuple[int, ...], raw: bytes) -> list[int]:
    """Values of 32 bits, those that do not fit replaced by the ones of the zip64 field, which must hold exactly these."""
    wide = [place for place, value in enumerate(values) if value == IN_ZIP64[4]]
    fields = dict(_extra_fields(extra, raw))
    content = fields.get(ZIP64, b"")
    if UNICODE_PATH in fields:
        raise AmbiguousZip(f"{raw[:200]!r} has a second name")
    if len(content) != 8 * len(wide):
        raise AmbiguousZip(f"the sizes of {raw[:200]!r} can be read in two ways")
    made = list(values)
    for place, value in zip(wide, struct.unpack(f"<{len(wide)}Q", content), strict=True):
        made[place] = value
    return made


def _extra_fields(extra: bytes, raw: bytes) -> Iterator[tuple[int, bytes]]:
    at, seen = 0, set()
    while at < len(extra):
        kind, length = struct.unpack_from("<2H", extra, at) if len(extra) - at >= 4 else (None, 0)
        if kind is None or at + 4 + length > len(extra) or (kind in {ZIP64, UNICODE_PATH} and kind in seen):
            raise AmbiguousZip(f"the extra fields of {raw[:200]!r} can be read in two ways")
        yield kind, extra[at + 4 : at + 4 + length]
        seen.add(kind)
        at += 4 + length


def _laid_out(file: BinaryIO, records: tuple[_Record, ...], directory: int) -> Iterator[tuple[int, Entry]]:
    """Each entry by where its header begins: one follows the other from the first byte to the directory."""
    ordered = sorted(records, key=lambda record: record.header)
    begins = [*(record.header for record in ordered), directory]
    if begins[0] != 0:
        raise AmbiguousZip("there is data before its first entry")
    for record, following in zip(ordered, begins[1:], strict=True):
        start = _start_of(file, record)
        end = start + record.stored
        if end > following:
            raise AmbiguousZip(f"{record.shown} overlaps what follows it")
        if record.flags & DESCRIPTOR:
            file.seek(end)
            _check_descriptor(record, file.read(min(following - end, 25)))
        elif end != following:
            raise AmbiguousZip(f"there is data between {record.shown} and what follows it")
        entry = Entry(
            name=_name_of(record),
            header=record.header,
            start=start,
            stored=record.stored,
            size=record.size,
            crc=record.crc,
            method=record.method,
            mode=record.mode,
        )
        if entry.is_folder and entry.size:
            raise AmbiguousZip(f"the folder {record.shown} has content")
        yield record.header, entry


def _start_of(file: BinaryIO, record: _Record) -> int:
    """Where an entry's bytes begin by its own header, which must say what the directory says."""
    file.seek(record.header)
    header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(HEADER_MARK):
        raise DamagedZip(f"the header of {record.shown} is overwritten")
    _, _, flags, method, _, _, crc, stored, size, name_length, extra_length = HEADER.unpack(header)
    raw, extra = _exactly(file, name_length), _exactly(file, extra_length)
    # where the sizes stand behind the bytes, they may be 0 here
    late = bool(flags & DESCRIPTOR) and (crc, stored, size) in {(0, 0, 0), (0, *[IN_ZIP64[4]] * 2)}
    fields = dict(_extra_fields(extra, raw))
    if UNICODE_PATH in fields:
        raise AmbiguousZip(f"{record.shown} has a second name")
    if ZIP64 in fields:
        sizes = (record.size, record.stored)
        # miniz, which torch writes with, puts the size alone there, and the offset too
        known_sizes = [(), (0, 0), (record.size, 0)] if late else []
        known_words = [(*each, *more) for each in (*known_sizes, sizes) for more in ((), (record.header,) * late)]
        if fields[ZIP64] not in {struct.pack(f"<{len(each)}Q", *each) for each in known_words}:
            raise AmbiguousZip(f"the sizes of {record.shown} can be read in two ways")
        if {size, stored} <= {IN_ZIP64[4], *sizes}:
            size, stored = sizes
    told = (raw, flags, method) if late else (raw, flags, method, crc, stored, size)
    known = (record.raw, record.flags, record.method, record.crc, record.stored, record.size)
    if told != known[: len(told)]:
        raise AmbiguousZip(f"the header of {record.shown} and the directory differ")
    return record.header + HEADER.size + len(raw) + len(extra)


def _check_descriptor(record: _Record, gap: bytes) -> None:
    """The sizes behind an entry's bytes, with 32 or 64 bits, with or without a mark, are those of the directory."""
    forms = []
    for form in ("<3L", "<L2Q"):
        try:
            forms.append(struct.pack(form, record.crc, record.stored, record.size))
        except struct.error:
            continue
    if gap not in {*forms, *(DESCRIPTOR_MARK + form for form in forms)}:
        if not gap.strip(b"\0"):
            raise DamagedZip(f"the data descriptor of {record.shown} is overwritten with zeros")
        raise AmbiguousZip(f"the data descriptor of {record.shown} and the directory differ")


def _name_of(record: _Record) -> str:
    try:
        name = record.raw.decode("utf-8" if record.flags & UTF8 else "ascii")
    except UnicodeDecodeError:
        raise AmbiguousZip(f"the name {record.shown} can be read in two ways") from None
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or parts[0].endswith(":"):
        raise AmbiguousZip(f"it contains a path that leads outside: {name!r}")
    return name


def _check_names(records: tuple[_Record, ...]) -> None:
    """No two names are equal to a reader who does not look at case, as torch's does, or to a file system that does not."""
    seen: dict[str, str] = {}
    for record in records:
        name = _name_of(record)
        plain = unicodedata.normalize("NFC", posixpath.normpath(name)).casefold()
        if plain in seen:
            raise AmbiguousZip(f"it has two entries with one name: {seen[plain]!r} and {name!r}")
        seen[plain] = name


def _exactly(file: BinaryIO, count: int) -> bytes:
    content = file.read(count)
    if len(content) != count:
        raise DamagedZip("it ends within a header")
    return content
