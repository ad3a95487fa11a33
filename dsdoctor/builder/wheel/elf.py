"""A shared object -> its GPU architectures, the glibc it needs, its compiler's flags, its linked libraries. It is never run."""

import itertools
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import Section

from dsdoctor.core.files import open_regular

# The ``.nv_fatbin`` section, as nvcc's fatbinary writes it: containers that begin with a magic number, each with entries that
# state their kind (PTX or machine code), their size and their architecture. ``cuobjdump --list-elf`` lists the same.
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


LARGEST_SECTION = 512 << 20
"""Bytes; the debug strings of the largest op have 30 MB, its GPU code for six architectures 60 MB."""
MOST_ENTRIES = 1000
LONGEST_NAME = 4096
"""Bytes of a library's name: Linux takes no longer path."""
LINKS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
"""Dynamic entries that name a library or folders -> the attribute in pyelftools that holds the text."""
PRODUCER = re.compile(rb"GNU C(?:\+\+|\d)[^\0]{10,4000}")


@dataclass(frozen=True, kw_only=True)
class ElfInfo:
    """What a shared object needs. ``sm_arch`` holds "90_real" for machine code and "90_virtual" for PTX.

    ``needed`` are the names of the libraries that it links (DT_NEEDED), ``run_path`` the folders in it where they are
    looked for first (DT_RPATH, DT_RUNPATH).
    """

    sm_arch: tuple[str, ...] | None
    glibc: str | None
    glibcxx: str | None
    cpu_flags: tuple[str, ...]
    needed: tuple[str, ...] = ()
    run_path: tuple[str, ...] = ()


def read_elf(path: Path) -> ElfInfo:
    """Read one shared object. For a file that is not one, or is damaged, ``sm_arch`` is None and nothing else is known."""
    try:
        with open_regular(path) as file:
            elf = ELFFile(file)
            versions, linked = _needed_versions(elf), _linked(elf)
            debug, device = elf.get_section_by_name(".debug_str"), elf.get_section_by_name(".nv_fatbin")
            command_line = elf.get_section_by_name(".GCC.command.line")
            return ElfInfo(
                sm_arch=architectures(_data(device)) if device else (),
                glibc=_newest(versions, "GLIBC_"),
                glibcxx=_newest(versions, "GLIBCXX_"),
                cpu_flags=parse_producers(
                    (_data(debug) if debug else b"") + b"\0" + (_data(command_line) if command_line else b"")
                ),
                needed=tuple(dict.fromkeys(text for tag, text in linked if tag == "DT_NEEDED")),
                run_path=tuple(part for tag, text in linked if tag != "DT_NEEDED" for part in text.split(":") if part),
            )
    except (
        ELFError,
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        MemoryError,
        zlib.error,
    ):
        # pyelftools raises whatever a damaged table leads it to
        return ElfInfo(sm_arch=None, glibc=None, glibcxx=None, cpu_flags=())


def _data(section: Section) -> bytes:
    """A section's contents. Raises ValueError for one that would unpack to more than any op has."""
    if max(section.data_size, section["sh_size"]) > LARGEST_SECTION:
        raise ValueError(f"section {section.name} claims to hold {section.data_size} bytes")
    return bytes(section.data())


def parse_producers(debug_strings: bytes) -> tuple[str, ...]:
    """The machine flags of gcc's producer strings: those that decide which CPU the code runs on.

    >>> parse_producers(b"x\\0GNU C++20 12.2.0 -march=znver3 -mavx2 -g -O3 -std=c++20\\0")
    ('-march=znver3', '-mavx2')
    """
    flags = {
        word.decode("ascii", errors="replace")
        for producer in PRODUCER.findall(debug_strings)
        for word in producer.split()
        if word.startswith((b"-march=", b"-mcpu=")) or re.fullmatch(rb"-m(?!no-|tune|cmodel|param)[a-z0-9.]+", word)
    }
    return tuple(sorted(flags))


def _needed_versions(elf: ELFFile) -> list[str]:
    """The symbol versions that a shared object needs. Raises ValueError for a table that does not come to an end."""
    names = (
        auxiliary.name
        for section in itertools.islice(elf.iter_sections(), MOST_ENTRIES)
        if isinstance(section, GNUVerNeedSection)
        for _, auxiliaries in section.iter_versions()
        for auxiliary in auxiliaries
    )
    found = list(itertools.islice(names, MOST_ENTRIES))
    if len(found) == MOST_ENTRIES:
        raise ValueError("the table of needed symbol versions does not come to an end")
    return found


def _linked(elf: ELFFile) -> list[tuple[str, str]]:
    """The dynamic entries of LINKS, each with its text. Raises ValueError for a table or a name that does not come to an end."""
    segments = itertools.islice(elf.iter_segments("PT_DYNAMIC"), 1)
    tags = (tag for segment in segments if isinstance(segment, DynamicSegment) for tag in segment.iter_tags())
    found = []
    for number, tag in enumerate(tags):
        kind = tag.entry.d_tag
        text = getattr(tag, LINKS[kind]) if kind in LINKS else ""
        if number == MOST_ENTRIES or len(text) > LONGEST_NAME:
            raise ValueError("the table of linked libraries does not come to an end")
        if text:
            found.append((kind, text))
    return found


def _newest(names: list[str], prefix: str) -> str | None:
    return newest(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def newest(versions: Iterable[str | None]) -> str | None:
    """The greatest of some dotted numbers; anything else is ignored.

    >>> newest(["2.9", None, "2.34", "PRIVATE"])
    '2.34'
    """
    numbers = [version for version in versions if version and re.fullmatch(r"\d{1,9}(?:\.\d{1,9}){0,5}", version)]
    return max(numbers, key=lambda version: tuple(map(int, version.split("."))), default=None)
