"""A DeepSpeed wheel, or an installed DeepSpeed -> facts about it. Bytes are read; nothing of it is imported or run."""

import base64
import csv
import hashlib
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import msgspec
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from dsdoctor.builder.wheel.elf import ElfInfo, newest, read_elf
from dsdoctor.builder.wheel.foreign import foreign_files, foreign_installed
from dsdoctor.builder.wheel.identity import addresses, contradictions
from dsdoctor.core.deepspeed_install import (
    MANIFEST,
    RECORD,
    deepspeed_of_record,
    left_to_system,
    library_of,
    recorded_wheel_digest,
    with_libraries,
    with_manifest,
    with_tags,
)
from dsdoctor.core.errors import UsageError, is_full
from dsdoctor.core.files import open_regular, read_limited
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.core.text import decode

LARGEST = 16 << 30
MOST_FILES = 200_000
WORST_RATIO = 400
"""A shared object with debug information shrinks to a quarter; a file of zeros to a thousandth."""

SMALL = 8 << 20
CHUNK = 1 << 20
HINT = "fetch or build it again"
LARGEST_TEXT = 16 << 20
"""The RECORD of a DeepSpeed with everything in it has 0.3 MB, its manifest 0.05 MB."""

DAMAGE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, KeyError, ValueError)
"""What zipfile raises for a damaged archive."""


def read_wheel(path: Path) -> DeepSpeed:
    """What a wheel is and holds. Raises UsageError for what is not a DeepSpeed wheel, is damaged, or looks malicious."""
    if not path.exists():
        raise UsageError(f"{path} is not there", hint="name a wheel's file, its address, or a package index")
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UsageError(
            f"{path} is not a wheel: {error}", hint="name a file such as deepspeed-0.19.8-...whl"
        ) from None
    if name != "deepspeed":
        raise UsageError(f"{path.name} is a wheel of {name}, not of deepspeed", hint="name a DeepSpeed wheel")
    try:
        with (
            open_regular(path) as opened,
            zipfile.ZipFile(opened) as file,
            tempfile.TemporaryDirectory(prefix="dsdoctor-") as folder,
        ):
            _refuse_malicious(file, path)
            facts = _read(file, path, str(version), Path(folder))
            return _with_name(facts, {tag.interpreter for tag in tags}, {tag.platform for tag in tags})
    except (*DAMAGE, MemoryError) as error:
        if is_full(error):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"{path} cannot be read as a wheel: {why}", hint=HINT) from None


def read_installed(facts: DeepSpeed) -> DeepSpeed:
    """Add to an installed DeepSpeed's facts what its shared objects show, which files differ from its RECORD, and which that
    lists belong to no DeepSpeed."""
    location = Path(facts.location)
    libraries = {
        path.relative_to(location.parent).as_posix(): read_elf(path) for path in sorted(location.rglob("*.so"))
    }
    distributions = _distributions(location.parent)
    entry_points = "\n".join(map(_entry_points, distributions))
    record = _record_of(facts.version, distributions)
    altered: tuple[str, ...] = ()
    foreign = foreign_installed((), facts.version, entry_points)
    if record is not None:
        text = read_limited(record, LARGEST_TEXT).decode("utf-8", errors="replace")
        altered = tuple(
            name for name, digest in sorted(_parse_record(text).items()) if _digest_of(location.parent / name) != digest
        )
        # a file that somebody has removed since does no harm
        there = [name for name in _names_in_record(text) if os.path.lexists(location.parent / name)]
        foreign = foreign_installed(there, facts.version, entry_points, editable=_is_editable(record))
    return replace(_with_library_facts(facts, libraries), altered=altered, foreign=foreign)


def _distributions(site: Path) -> tuple[Path, ...]:
    """Every .dist-info of a DeepSpeed in a folder: Python heeds the entry points of all, one left over by an upgrade too."""
    folders = sorted(site.iterdir()) if site.is_dir() else []
    return tuple(path for path in folders if re.fullmatch(r"deepspeed-.+\.dist-info", path.name, re.IGNORECASE))


def _record_of(version: str, distributions: tuple[Path, ...]) -> Path | None:
    """The RECORD of the distribution of that version; of the only one, where the package tells another version than that does."""
    named = [folder for folder in distributions if folder.name == f"deepspeed-{version}.dist-info"]
    chosen = named or (distributions if len(distributions) == 1 else ())
    return next((folder / "RECORD" for folder in chosen if (folder / "RECORD").is_file()), None)


def _entry_points(distribution: Path) -> str:
    """The entry points of an installed distribution. Raises UsageError where they are there and cannot be read."""
    path = distribution / "entry_points.txt"
    try:
        return read_limited(path, LARGEST_TEXT).decode("utf-8", errors="replace") if os.path.lexists(path) else ""
    except OSError as error:
        hint = "look at it, and install DeepSpeed again"
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from None


def _is_editable(record: Path) -> bool:
    """Whether a distribution was installed with ``pip install --editable`` (PEP 610)."""
    try:
        told = decode(read_limited(record.with_name("direct_url.json"), LARGEST_TEXT), dict)
    except (OSError, msgspec.DecodeError):
        return False
    folder = told.get("dir_info")
    return isinstance(folder, dict) and folder.get("editable") is True


def _refuse_malicious(file: zipfile.ZipFile, path: Path) -> None:
    entries = file.infolist()
    if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > LARGEST:
        raise UsageError(f"{path.name} claims to unpack to more than a DeepSpeed can be", hint="do not install it")
    for entry in entries:
        parts = PurePosixPath(entry.filename).parts
        if entry.filename.startswith("/") or ".." in parts or "\\" in entry.filename or "\0" in entry.filename:
            raise UsageError(
                f"{path.name} holds a file outside of itself: {entry.filename!r}", hint="do not install it"
            )
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise UsageError(
                f"{path.name} holds a link: {entry.filename!r}; wheels have none", hint="do not install it"
            )
        if entry.file_size > SMALL and entry.file_size > WORST_RATIO * max(1, entry.compress_size):
            raise UsageError(
                f"{path.name}'s {entry.filename!r} unpacks to {entry.file_size} bytes from {entry.compress_size}",
                hint="do not install it",
            )


def _read(file: zipfile.ZipFile, path: Path, version: str, folder: Path) -> DeepSpeed:
    def text(ending: str) -> str | None:
        # pip reads the .dist-info at the top; one further down is a file like any other
        name = next((name for name in file.namelist() if name == ending or _at_top(name, ending)), None)
        if name is None:
            return None
        if file.getinfo(name).file_size > LARGEST_TEXT:
            raise UsageError(f"{path.name}'s {name} is larger than any can be", hint="do not install it")
        return file.read(name).decode("utf-8", errors="replace")

    record = text(f"deepspeed/{RECORD}")
    if record is None:
        raise UsageError(f"{path.name} holds no deepspeed/{RECORD}: it is not a built DeepSpeed", hint=HINT)
    facts = deepspeed_of_record(record, version=version, location=str(path))
    facts = with_tags(with_manifest(facts, text(MANIFEST), exists=_exists), text("WHEEL"))
    record_text = text("RECORD")
    listed = _parse_record(record_text or "")
    libraries: dict[str, ElfInfo] = {}
    altered = [name for name in listed if name not in file.NameToInfo]
    altered += ["RECORD, which is missing"] if record_text is None else _unlisted(file, listed)
    for entry in file.infolist():
        unpacked = folder / "library.so" if entry.filename.endswith(".so") else None
        digest = _copied(file, entry, unpacked)
        if entry.filename in listed and listed[entry.filename] != digest:
            altered.append(entry.filename)
        if unpacked is not None:
            libraries[entry.filename] = read_elf(unpacked)
    recorded = recorded_wheel_digest(_beside(path))
    if recorded is not None and recorded != hex_of(path):
        altered.append(path.name)
    metadata = text("METADATA")
    return replace(
        _with_library_facts(facts, libraries),
        altered=tuple(sorted(altered)),
        foreign=foreign_files(file.namelist(), version, text("entry_points.txt")),
        contradictions=contradictions(file.namelist(), version, metadata),
        addresses=addresses(metadata),
    )


def _at_top(name: str, ending: str) -> bool:
    return name.count("/") == 1 and name.lower().startswith("deepspeed-") and name.endswith(f".dist-info/{ending}")


def _with_name(facts: DeepSpeed, pythons: set[str], platforms: set[str]) -> DeepSpeed:
    """Add the tags in the file's name, which pip goes by; where those in the WHEEL file differ, the wheel was altered."""
    in_wheel_file = (set(facts.python), set(facts.platform))
    altered = (
        facts.altered
        if in_wheel_file == (pythons, platforms)
        else (*facts.altered, "the tags of its name or its WHEEL file")
    )
    return replace(facts, python=tuple(sorted(pythons)), platform=tuple(sorted(platforms)), altered=altered)


def _unlisted(file: zipfile.ZipFile, listed: Mapping[str, str]) -> list[str]:
    """The files that RECORD does not list; it cannot list itself and signatures."""
    free = ("/RECORD", "/RECORD.jws", "/RECORD.p7s", "/")
    return [name for name in file.namelist() if name not in listed and not name.endswith(free)]


def _with_library_facts(facts: DeepSpeed, libraries: Mapping[str, ElfInfo]) -> DeepSpeed:
    """Add what the shared objects show. Where that contradicts what was recorded about them, it replaces it."""
    facts = with_libraries(facts, libraries)
    of_ops = {op: libraries[path] for op in facts.installed_ops if (path := library_of(op, libraries))}
    needed = {op: left_to_system(elf_info.needed, elf_info.run_path, _exists) for op, elf_info in of_ops.items()}
    flags = tuple(sorted({flag for elf_info in libraries.values() for flag in elf_info.cpu_flags}))
    return replace(
        facts,
        sm_arch={op: elf_info.sm_arch for op, elf_info in of_ops.items() if elf_info.sm_arch},
        needed={op: names for op, names in needed.items() if names},
        cpu_flags=flags or facts.cpu_flags,
        glibc=newest(elf_info.glibc for elf_info in libraries.values()) or facts.glibc,
        glibcxx=newest(elf_info.glibcxx for elf_info in libraries.values()) or facts.glibcxx,
        unreadable=tuple(path for path, elf_info in libraries.items() if elf_info.sm_arch is None),
        told_by="manifest" if facts.told_by == "manifest" else "files",
    )


def _exists(path: str) -> bool:
    """Whether a library is where an op looks for it: on this machine, even where the machine to be judged is another."""
    return LocalHost().exists(path)


def _copied(file: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path | None) -> str:
    """The digest of an entry, as RECORD writes it; its bytes are written to ``target``. zipfile checks its CRC on the way."""
    total = hashlib.sha256()
    with file.open(entry) as source:
        if target is None:
            _each(source.read, total.update)
        else:
            with target.open("wb") as copy:
                _each(source.read, total.update, copy.write)
    return _urlsafe(total.digest())


def _digest_of(path: Path) -> str | None:
    total = hashlib.sha256()
    try:
        with open_regular(path) as file:
            _each(file.read, total.update)
    except OSError:
        return None
    return _urlsafe(total.digest())


def hex_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    total = hashlib.sha256()
    with open_regular(path) as file:
        _each(file.read, total.update)
    return total.hexdigest()


def _each(read: Callable[[int], bytes], *takers: Callable[[bytes], object]) -> None:
    while chunk := read(CHUNK):
        for take in takers:
            take(chunk)


def _urlsafe(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _parse_record(text: str) -> dict[str, str]:
    """The sha256 digests of a RECORD file, by path; lines without one are left out."""
    return dict(_record_lines(text.splitlines()))


def _names_in_record(text: str) -> list[str]:
    """Every file that a RECORD lists, also those without a digest.

    >>> _names_in_record('deepspeed/__init__.py,sha256=x,1\\n"evil, but quoted.pth",,\\n\\n')
    ['deepspeed/__init__.py', 'evil, but quoted.pth']
    """
    try:
        return [row[0] for row in csv.reader(text.splitlines()) if row and row[0]]
    except csv.Error:
        return []


def _record_lines(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    try:
        for row in csv.reader(lines):
            if len(row) >= 2 and row[1].startswith("sha256="):
                yield row[0], row[1].removeprefix("sha256=")
    except csv.Error:
        return


def _beside(path: Path) -> str | None:
    try:
        return read_limited(path.with_name(f"{path.name}.json"), LARGEST_TEXT).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
