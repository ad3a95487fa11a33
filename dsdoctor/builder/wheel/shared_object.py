"""The shared objects in a wheel: what is in them, and whether each loads with this torch.

They are read without being run; only ``load_each`` runs code of an op, in a new process.
"""

import itertools
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import Section

from dsdoctor.core.children import PreloadedPython, parse_answer
from dsdoctor.core.deepspeed_install import library_of
from dsdoctor.core.files import open_regular
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import Answer, LocalHost
from dsdoctor.core.machine import DeepSpeed, Gap, Machine
from dsdoctor.rules import book

MAGIC = 0xBA55ED50
"""Begins a container of the ``.nv_fatbin`` section, as nvcc's fatbinary writes it. A container has entries that state their kind
(PTX or machine code), their size and their architecture. ``cuobjdump --list-elf`` lists the same."""

CONTAINER = struct.Struct("<IHHQ")
"""Magic number, version, size of this header, size of the entries after it."""

ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, version, size of this header, size of what follows, compressed size, options, minor, major, architecture."""

KINDS = {1: "virtual", 2: "real"}
MAX_SECTION_BYTES = 512 << 20
"""Bytes; the debug strings of the largest op have 30 MB, its GPU code for six architectures 60 MB."""

MAX_ENTRIES = 1000
MAX_NAME_BYTES = 4096
"""Bytes of a library's name: Linux takes no longer path."""

MAX_PIECE_BYTES = 64
"""Bytes that are read at once of a name, or of a value of a table."""

LINKS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
"""Dynamic entries that name a library or folders -> the attribute in pyelftools that holds the text."""

PRODUCER = re.compile(rb"GNU C(?:\+\+|\d)[^\0]{10,4000}")
LOAD_TIMEOUT_SECONDS = 300.0


class NamesEnd:
    """A file that is read as pyelftools does, a text in pieces until a zero byte: none that is longer than a path may be.

    A few bytes can be the names of a thousand entries, each of them megabytes long. Raises ValueError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._since = file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go where the next value begins."""
        self._since = 0
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        data = self._file.read(size)
        if 0 <= size <= MAX_PIECE_BYTES:
            self._since += len(data)
            if self._since > MAX_NAME_BYTES:
                raise ValueError("a name has no end")
        return data


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


def architectures(section: bytes) -> tuple[str, ...]:
    """The architectures of a section, as "90_real" and "90_virtual"; a damaged container ends the reading."""
    return tuple(sorted({f"{number}_{KINDS[kind]}" for kind, number in _entries(section) if kind in KINDS}))


def read_elf(path: Path) -> ElfInfo:
    """Read one shared object. For a file that is not one, or is damaged, ``sm_arch`` is None and nothing else is known."""
    try:
        with open_regular(path) as file:
            elf = ELFFile(cast("BinaryIO", NamesEnd(file)))
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


def newest(versions: Iterable[str | None]) -> str | None:
    """The greatest of some dotted numbers; anything else is ignored.

    >>> newest(["2.9", None, "2.34", "PRIVATE"])
    '2.34'
    """
    numbers = [version for version in versions if version and re.fullmatch(r"\d{1,9}(?:\.\d{1,9}){0,5}", version)]
    return max(numbers, key=lambda version: tuple(map(int, version.split("."))), default=None)


def load_each(
    host: LocalHost, python: str, libraries: Mapping[str, Path], *, preloaded: PreloadedPython | None = None
) -> dict[str, str | None]:
    """The error of each op, None for one that loads. ``preloaded`` is that same interpreter, with torch imported."""
    # all ops in one process; if that dies, each op in a process of its own, to find the one that kills it

    def ask(ops: Mapping[str, Path], preloaded: PreloadedPython | None = None) -> dict[str, str | None] | Gap:
        pairs = json.dumps([[op, str(path)] for op, path in ops.items()])
        answer = preloaded and _asked_of(preloaded, pairs, host.environment())
        answer = answer or host.ask(python, "load_ops.py", pairs, timeout=LOAD_TIMEOUT_SECONDS)
        return parse_answer(answer, dict[str, str | None], "load")

    together = ask(libraries, preloaded)
    if preloaded is not None and (isinstance(together, Gap) or any(together.values())):
        # an error counts only where nothing but torch was there before the op
        together = ask(libraries)
    if not isinstance(together, Gap):
        return together
    first = {op: path for op, path in libraries.items() if op == "pin_memory"}
    errors: dict[str, str | None] = {}
    for op, path in libraries.items():
        alone = ask({**first, op: path})
        errors[op] = alone.reason if isinstance(alone, Gap) else alone[op]
    return errors


def lacks_driver(error: str | None, machine: Machine) -> bool:
    """Whether an op did not load only because this machine has no NVIDIA driver: that says nothing about the op."""
    return error is not None and "libcuda.so.1" in error and machine.driver is None


def lacks_instructions(error: str | None, missing: tuple[str, ...]) -> bool:
    """Whether an op did not load only because this processor lacks instructions (``missing``) that the op is compiled for.

    Loading an op runs some of its code, which ends with SIGILL then. That says nothing about the op.
    """
    return error is not None and "(SIGILL)" in error and bool(missing)


def not_tried(ops: tuple[str, ...], missing: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """A note that loading these ops cannot be tried here: the driver is missing, or the processor lacks instructions."""
    if not ops:
        return ()
    if missing:
        lost = missing[:3]
        return (
            book.finding("not-proven", Severity.NOTE, case="instructions", affects=ops, ops=ops, instructions=lost),
        )
    return (book.finding("not-proven", Severity.NOTE, case="driver", affects=ops, ops=ops),)


def load_installed(host: LocalHost, python: str, built: DeepSpeed, machine: Machine) -> tuple[Finding, ...]:
    """Load every op that an installed DeepSpeed has; an error for each that does not load."""
    files = {path.as_posix(): path for path in sorted(Path(built.location).rglob("*.so"))}
    named = {op: library_of(op, files) for op in built.installed_ops}
    errors = load_each(host, python, {op: files[path] for op, path in named.items() if path})
    untried = tuple(op for op, error in errors.items() if lacks_driver(error, machine))
    failed = tuple(
        book.finding("op-does-not-load", Severity.ERROR, evidence=[str(named[op])], affects=[op], op=op, error=error)
        for op, error in errors.items()
        if error is not None and op not in untried
    )
    return (*failed, *not_tried(untried))


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


def _data(section: Section) -> bytes:
    """A section's contents. Raises ValueError for one that would unpack to more than any op has."""
    if max(section.data_size, section["sh_size"]) > MAX_SECTION_BYTES:
        raise ValueError(f"section {section.name} claims to hold {section.data_size} bytes")
    return bytes(section.data())


def _needed_versions(elf: ELFFile) -> list[str]:
    """The symbol versions that a shared object needs. Raises ValueError for a table that does not come to an end."""
    names = (
        auxiliary.name
        for section in itertools.islice(elf.iter_sections(), MAX_ENTRIES)
        if isinstance(section, GNUVerNeedSection)
        for _, auxiliaries in section.iter_versions()
        for auxiliary in auxiliaries
    )
    found = list(itertools.islice(names, MAX_ENTRIES))
    if len(found) == MAX_ENTRIES:
        raise ValueError("the table of required symbol versions has no end")
    return found


def _linked(elf: ELFFile) -> list[tuple[str, str]]:
    """The dynamic entries of LINKS, each with its text. Raises ValueError for a table or a name that does not come to an end."""
    segments = itertools.islice(elf.iter_segments("PT_DYNAMIC"), 1)
    tags = (tag for segment in segments if isinstance(segment, DynamicSegment) for tag in segment.iter_tags())
    found = []
    for number, tag in enumerate(tags):
        kind = tag.entry.d_tag
        text = getattr(tag, LINKS[kind]) if kind in LINKS else ""
        if number == MAX_ENTRIES or len(text) > MAX_NAME_BYTES:
            raise ValueError("the table of linked libraries has no end")
        if text:
            found.append((kind, text))
    return found


def _newest(names: list[str], prefix: str) -> str | None:
    return newest(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _asked_of(preloaded: PreloadedPython, pairs: str, env: Mapping[str, str]) -> Answer | None:
    """What a process that has torch already answers; None where a new one is to be asked."""
    lines: list[str] = []
    status = preloaded.run(
        "load_ops.py", pairs, folder=Path("/"), env=env, on_line=lines.append, silence=LOAD_TIMEOUT_SECONDS
    )
    return Answer(returncode=0, stdout="\n".join(lines)) if status == 0 else None
