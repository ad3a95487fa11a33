"""The ``.nv_fatbin`` section of a shared object -> the GPU architectures inside. Bytes are read, no tool is run.

The layout is that which nvcc's fatbinary writes: containers that begin with a magic number, each with entries that tell
their kind (PTX or machine code), their size and their architecture. ``cuobjdump --list-elf`` lists the same.
"""

import struct
from collections.abc import Iterator

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Magic number, version, size of this header, size of the entries after it."""

ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, version, size of this header, size of what follows, compressed size, options, minor, major, architecture."""

KINDS = {1: "virtual", 2: "real"}


def architectures(section: bytes) -> tuple[str, ...]:
    """The architectures of a section, as "90_real" and "90_virtual"; a damaged container ends the reading."""
    return tuple(sorted({f"{number}_{KINDS[kind]}" for kind, number in _entries(section) if kind in KINDS}))


def _entries(section: bytes) -> Iterator[tuple[int, int]]:
    place = section.find(MAGIC.to_bytes(4, "little"))
    while place >= 0 and place + CONTAINER.size <= len(section):
        _, _, header, size = CONTAINER.unpack_from(section, place)
        end = min(place + header + size, len(section))
        yield from _of_container(section, place + header, end)
        place = section.find(MAGIC.to_bytes(4, "little"), max(end, place + CONTAINER.size))


def _of_container(section: bytes, place: int, end: int) -> Iterator[tuple[int, int]]:
    while place + ENTRY.size <= end:
        kind, _, header, size, *_, number = ENTRY.unpack_from(section, place)
        if header < ENTRY.size:
            return
        yield kind, number
        place += header + size
