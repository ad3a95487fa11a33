"""A shared object -> what it confesses: GPU architectures, glibc floor, the compiler's flags. Nothing of it is run."""

import re
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from dsdoctor.host import Host

LIST_LIMIT = 300.0
NO_DEVICE_CODE = "does not contain device code"
PRODUCER = re.compile(rb"GNU C(?:\+\+|\d)[^\0]{10,4000}")


@dataclass(frozen=True, kw_only=True)
class Confession:
    """What a shared object needs. ``sm_arch`` holds "90_real" for machine code and "90_virtual" for PTX."""

    sm_arch: tuple[str, ...] | None
    glibc: str | None
    glibcxx: str | None
    cpu_flags: tuple[str, ...]


def confess(host: Host, path: Path, *, cuobjdump: str | None) -> Confession:
    """Read one shared object. ``sm_arch`` is None when no cuobjdump answers."""
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            versions = _needed_versions(elf)
            section = elf.get_section_by_name(".debug_str")
            flags = parse_producers(section.data() if section else b"")
    except (ELFError, OSError, ValueError):
        versions, flags = [], ()
    return Confession(
        sm_arch=_architectures(host, path, cuobjdump) if cuobjdump else None,
        glibc=_newest(versions, "GLIBC_"),
        glibcxx=_newest(versions, "GLIBCXX_"),
        cpu_flags=flags,
    )


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


def parse_listed(text: str, kind: str) -> set[str]:
    """The architectures that ``cuobjdump --list-elf`` or ``--list-ptx`` lists.

    >>> parse_listed("ELF file    1: fused_adam_op.1.sm_90.cubin", "real")
    {'90_real'}
    """
    return {f"{number}_{kind}" for number in re.findall(r"\.sm_(\d+[a-z]?)\.(?:cubin|ptx)", text)}


def _architectures(host: Host, path: Path, cuobjdump: str) -> tuple[str, ...] | None:
    """None when cuobjdump itself fails, which says nothing of the GPU code; it names a file without any as such."""
    real = host.run([cuobjdump, "--list-elf", str(path)], timeout=LIST_LIMIT)
    virtual = host.run([cuobjdump, "--list-ptx", str(path)], timeout=LIST_LIMIT)
    if NO_DEVICE_CODE in real.stdout + real.stderr:
        return ()
    if not real.ok or not virtual.ok:
        return None
    return tuple(sorted(parse_listed(real.stdout, "real") | parse_listed(virtual.stdout, "virtual")))


def _needed_versions(elf: ELFFile) -> list[str]:
    return [
        auxiliary.name
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for _, auxiliaries in section.iter_versions()
        for auxiliary in auxiliaries
    ]


def _newest(names: list[str], prefix: str) -> str | None:
    numbers = [
        tuple(map(int, name.removeprefix(prefix).split(".")))
        for name in names
        if re.fullmatch(prefix + r"[\d.]+", name)
    ]
    return ".".join(map(str, max(numbers))) if numbers else None
