"""Zip files that two readers could take for two: each form of it is planted, and refused; what real writers make is read."""

import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdoctor.core.zip_file import END, BadZip, Entry, read_bytes, read_entries

CONTENTS = {"a/data.pkl": b"pickle", "a/data/0": bytes(300), "a/version": b"3\n"}
LOCATOR, END_MARK, RECORD, HEADER = b"PK\x06\x07", b"PK\x05\x06", b"PK\x01\x02", b"PK\x03\x04"


def made(contents: dict[str, bytes] = CONTENTS, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_zip64(content: bytes, *, begin: int | None = None, **other: int) -> bytes:
    """The same with a zip64 record and a locator, as torch writes them into each file. ``begin``: where the locator points."""
    end = content.rindex(END_MARK)
    _, _, _, _, count, size, offset, _ = END.unpack(content[end:])
    values = {"count": count, "size": size, "offset": offset, **other}
    record = struct.pack(
        "<4sQ2H2L4Q",
        b"PK\x06\x06",
        44,
        45,
        45,
        0,
        0,
        values["count"],
        values["count"],
        values["size"],
        values["offset"],
    )
    locator = struct.pack("<4sLQL", LOCATOR, 0, end if begin is None else begin, 1)
    return content[:end] + record + locator + content[end:]


def streamed(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """As it is written into a pipe: the sizes stand behind the bytes."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.content = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, piece: bytes) -> int:  # type: ignore[override]
            self.content += piece
            return len(piece)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", method) as archive:  # type: ignore[arg-type]
        for name, content in CONTENTS.items():
            archive.writestr(name, content)
    return bytes(pipe.content)


def contents_of(content: bytes) -> dict[str, bytes]:
    file = io.BytesIO(content)
    return {entry.name: b"".join(read_bytes(file, entry)) for entry in read_entries(file)}


def changed(mark: bytes, at: int, value: bytes, *, last: bool = False, of: bytes | None = None) -> bytes:
    """A whole zip with other bytes so far behind the first (or last) mark."""
    content = bytearray(of or made())
    begin = (content.rindex if last else content.index)(mark) + at
    content[begin : begin + len(value)] = value
    return bytes(content)


def two_faced(shown: bytes, followed: bytes) -> bytes:
    """A file of two whole zips: one reader takes the record before the locator, another one goes where the locator points."""
    other = with_zip64(followed)
    before = other[: other.rindex(END_MARK) - 20]
    moved = bytearray(shown)
    end = shown.rindex(END_MARK)
    at = offset = END.unpack(shown[end:])[6]
    while moved[at : at + 4] == RECORD:
        begin = struct.unpack_from("<L", moved, at + 42)[0]
        struct.pack_into("<L", moved, at + 42, begin + len(before))
        at += 46 + sum(struct.unpack_from("<3H", moved, at + 28))
    struct.pack_into("<L", moved, end + 16, offset + len(before))
    return with_zip64(before + bytes(moved), begin=len(before) - 56, offset=offset + len(before))


def hidden_directory(comment: int) -> bytes:
    """A file whose last record has a second directory with its locator as its comment; the end record's comment has this length."""
    content = bytearray(made())
    end = content.rindex(END_MARK)
    _, _, _, _, _, size, offset, _ = END.unpack(content[end:])
    first = bytes(content[offset : content.index(RECORD, offset + 4)])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(first), end)
    hidden = first + record + struct.pack("<4sLQL", LOCATOR, 0, end + len(first), 1)
    struct.pack_into("<H", content, content.rindex(RECORD) + 32, len(hidden))
    struct.pack_into("<L", content, end + 12, size + len(hidden))
    struct.pack_into("<H", content, end + 20, comment)
    return bytes(content[:end]) + hidden + bytes(content[end:]) + b" " * comment


def named(*names: str) -> bytes:
    return made({f"a/{number}": b"x" for number in range(len(names))} | dict.fromkeys(names, b"x"))


def renamed(old: bytes, new: bytes, *, flags: int = 0) -> bytes:
    """A zip whose entry has another name of the same length, with other flags, in the directory and in its header."""
    content = bytearray(made())
    for mark, at, name_at in ((RECORD, 8, 46), (HEADER, 6, 30)):
        for begin in (place for place in range(len(content)) if content.startswith(mark, place)):
            if content[begin + name_at : begin + name_at + len(old)] == old:
                content[begin + name_at : begin + name_at + len(new)] = new
                struct.pack_into("<H", content, begin + at, flags)
    return bytes(content)


AMBIGUOUS: dict[str, Callable[[], bytes]] = {
    "two directories": lambda: two_faced(made(), made({"a/data.pkl": b"evil", "a/version": b"3\n"})),
    **{
        f"a locator before a comment of {length} bytes": lambda length=length: hidden_directory(length)  # type: ignore[misc]
        for length in (0, 65515, 65516, 65535)
    },
    "a locator that points elsewhere": lambda: with_zip64(made(), begin=0),
    "a zip64 record of another directory": lambda: with_zip64(made(), offset=1),
    "a zip64 record of fewer entries": lambda: with_zip64(made(), count=2),
    "bytes before": lambda: b"#!/bin/sh\n" + made(),
    "bytes behind": lambda: made() + b"more",
    "a second end record": lambda: made() + b"\0" * 8 + made()[-22:],
    "an end record in the comment": lambda: changed(END_MARK, 20, b"\x16\x00", last=True) + made()[-22:],
    "bytes between an entry and the next": lambda: (lambda whole, at: whole[:at] + b"PK" + whole[at:])(
        made(), made().index(HEADER, 4)
    ),
    "bytes before the directory": lambda: (lambda whole, at: whole[:at] + b"PK" + whole[at:])(
        made(), made().index(RECORD)
    ),
    "another name in the header": lambda: changed(HEADER, 30, b"b"),
    "another size in the header": lambda: changed(HEADER, 22, b"\x05"),
    "another checksum in the header": lambda: changed(HEADER, 14, b"\xff\xff"),
    "another method in the header": lambda: changed(HEADER, 8, b"\x08"),
    "other flags in the header": lambda: changed(HEADER, 6, b"\x00\x08"),
    "an entry fewer in the end record": lambda: changed(END_MARK, 8, b"\x02\x00\x02\x00", last=True),
    "an entry more in the end record": lambda: changed(END_MARK, 8, b"\x04\x00\x04\x00", last=True),
    "several disks": lambda: changed(END_MARK, 4, b"\x01", last=True),
    "an offset of another entry": lambda: changed(RECORD, 42, struct.pack("<L", 40)),
    "an encrypted entry": lambda: renamed(b"a/version", b"a/version", flags=1),
    "a version that nobody knows": lambda: changed(RECORD, 6, b"\xff"),
    "an unknown method": lambda: changed(RECORD, 10, b"\x0c"),
    "a stored entry of two sizes": lambda: changed(RECORD, 24, b"\x05"),
    "a name that is no UTF-8": lambda: renamed(b"a/version", b"a/versi\xff\xfe", flags=0x800),
    "a name that is of an unknown alphabet": lambda: renamed(b"a/version", b"a/versi\xc3\xbc"),
    "a name that ends early in C": lambda: renamed(b"a/version", b"a/v\0rsion"),
    "two equal names": lambda: _twice(),
    "two names that differ in case": lambda: named("a/data.pkl", "a/Data.PKL"),
    "two names that a Mac takes for one": lambda: named("a/\u00e9", "a/e\u0301"),
    "a folder and a file of one name": lambda: named("a/x", "a/x/"),
    "a path that leads outside": lambda: named("a/../../x"),
    "a path from the root": lambda: named("/etc/x"),
    "a path of Windows": lambda: named("a\\..\\x"),
    "a drive of Windows": lambda: named("C:/x"),
    "an extra field that is cut off": lambda: _with_extra(b"\x01\x00\x10"),
    "a second name": lambda: _with_extra(struct.pack("<HH", 0x7075, 6) + b"\1....x"),
    "a zip64 size that is not needed": lambda: _with_extra(struct.pack("<HHQ", 1, 8, 7)),
}
DAMAGED: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "cut off": lambda: made()[:-30],
    "half": lambda: made()[:200],
    "a header that is overwritten": lambda: changed(HEADER, 0, bytes(30)),
    "other bytes": lambda: changed(b"pickle", 0, b"tickle"),
    "a stream that does not end": lambda: changed(HEADER, 40, b"\xff\xff", of=made(method=zipfile.ZIP_DEFLATED)),
}


def _twice() -> bytes:
    content = io.BytesIO()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a/x", b"1")
        archive.writestr("a/x", b"2")
    return content.getvalue()


def _with_extra(extra: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        info = zipfile.ZipInfo("a/x")
        info.extra = extra
        archive.writestr(info, b"x")
    return content.getvalue()


def error_of(content: bytes) -> str:
    """The name of the error that a zip ends in, with its words."""
    try:
        return f"read: {sorted(contents_of(content))}"
    except BadZip as error:
        return f"{type(error).__name__}: {error}"


def test_what_two_readers_could_take_for_two_is_refused() -> None:
    said = {name: error_of(plant()) for name, plant in AMBIGUOUS.items()}

    assert {name: why for name, why in said.items() if not why.startswith("AmbiguousZip: ")} == {}


def test_what_is_damaged_is_told_from_it() -> None:
    said = {name: error_of(plant()) for name, plant in DAMAGED.items()}

    assert {name: why for name, why in said.items() if not why.startswith("DamagedZip: ")} == {}


def test_what_writers_make_is_read() -> None:
    whole = {
        "stored": made(),
        "deflated": made(method=zipfile.ZIP_DEFLATED),
        "with a zip64 record, as torch's": with_zip64(made()),
        "into a pipe": streamed(),
        "into a pipe, stored": streamed(zipfile.ZIP_STORED),
        "with a comment": changed(END_MARK, 20, b"\x03\x00", last=True) + b"hey",
    }

    assert {name: contents_of(content) for name, content in whole.items()} == dict.fromkeys(whole, CONTENTS)


def test_sizes_of_64_bits_are_read_where_a_file_is_that_large(tmp_path: Path) -> None:
    """With a hole in it, as the disk keeps nothing of it."""
    path = tmp_path / "large"
    size = (4 << 30) + 1
    raw, wide = b"a/0", struct.pack("<HHQQ", 1, 16, size, size)
    header = struct.pack("<4s5H3L2H", HEADER, 45, 0, 0, 0, 33, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(raw), len(wide))
    offset = len(header) + len(raw) + len(wide) + size
    record = struct.pack(
        "<4s6H3L5H2L", RECORD, 45, 45, 0, 0, 0, 33, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(raw), len(wide), 0, 0, 0, 0, 0
    )
    directory = record + raw + wide
    end = struct.pack("<4s4H2LH", END_MARK, 0, 0, 1, 1, len(directory), 0xFFFFFFFF, 0)
    zip64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(directory), offset)
    locator = struct.pack("<4sLQL", LOCATOR, 0, offset + len(directory), 1)
    with path.open("wb") as file:
        file.write(header + raw + wide)
        file.seek(offset)
        file.write(directory + zip64 + locator + end)

    with path.open("rb") as file:
        assert read_entries(file) == (Entry(name="a/0", header=0, start=offset - size, stored=size, size=size, crc=0),)


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers())
def test_a_zip_with_changed_bytes_ends_in_one_error(seed: int) -> None:
    fuzz_zip(random.Random(seed))


@pytest.mark.exhaustive
def test_many_zips_with_changed_bytes_end_in_one_error() -> None:
    choice = random.Random(7)
    for _ in range(20_000):
        fuzz_zip(choice)


def fuzz_zip(choice: random.Random) -> bool:
    """Read a zip with bytes changed, moved, doubled and left out, most of them in its structure; whether it was read.

    What is read is what Python's zipfile reads.
    """
    whole = choice.choice((made, lambda: with_zip64(made()), streamed, lambda: made(method=zipfile.ZIP_DEFLATED)))()
    content = bytearray(whole)
    marks = [at for at in range(len(content)) if content.startswith(b"PK", at)]
    for _ in range(choice.randint(0, 3)):
        at = min(len(content) - 1, max(0, choice.choice(marks) + choice.randint(0, 60)))
        match choice.randrange(4):
            case 0:
                content[at] = choice.choice((0, 1, 8, 0xFF, choice.randrange(256)))
            case 1:
                content[at : at + choice.choice((2, 4, 8))] = choice.choice((b"\xff", b"\0")) * choice.choice((2, 4, 8))
            case 2:
                begin, length = choice.choice(marks), choice.randint(1, 80)
                content[at:at] = content[begin : begin + length]
            case _:
                del content[at : at + choice.randint(1, 30)]
    try:
        found = contents_of(bytes(content))
    except BadZip:
        return False
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        assert {info.filename: archive.read(info) for info in archive.infolist()} == found
    return True


def test_a_directory_that_claims_too_much_is_not_read() -> None:
    content = with_zip64(changed(END_MARK, 8, b"\xff\xff\xff\xff", last=True), count=1 << 40)
    with pytest.raises(BadZip, match="more than are read here"):
        read_entries(io.BytesIO(content))


def test_the_fuzz_reads_some_and_refuses_some() -> None:
    choice = random.Random(int(os.environ.get("SEED", "1")))
    assert len({fuzz_zip(choice) for _ in range(60)}) == 2
