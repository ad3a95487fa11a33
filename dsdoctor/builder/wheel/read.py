"""A DeepSpeed wheel, or an installed DeepSpeed -> facts about it. Bytes are read; nothing of it is imported or run.

Also which of its names no DeepSpeed has, where its METADATA, names and file name contradict each other, and what it requires from
an address.
"""

import base64
import contextlib
import csv
import hashlib
import itertools
import os
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from dsdoctor.builder.wheel.shared_object import ElfInfo, newest, read_elf
from dsdoctor.core import redaction
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
from dsdoctor.core.errors import DoctorError, UsageError, is_full
from dsdoctor.core.files import open_regular, read_limited
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import DeepSpeed
from dsdoctor.core.redaction import GONE
from dsdoctor.core.text import decode
from dsdoctor.core.workspace import temporary_folder
from dsdoctor.core.zip_file import AmbiguousZip, BadZip, Entry, read_bytes, read_entries

OWN = frozenset({"deepspeed", "op_builder", "deepspeed.libs"})
"""The package; op_builder stood beside it up to 0.3.16 and in builds of forks; auditwheel puts libraries into deepspeed.libs."""

EARLY = (("benchmarks",), ("accelerator",), ("tests", "unit"))
LAST_EARLY = Version("0.8.99")
"""What setup.py packed too before 0.9, by leaving out too little: benchmarks in 0.7 and 0.8, tests/unit in 0.7.1 and 0.7.2."""

SCRIPT = re.compile(r"(dsr|(ds|deepspeed)([._-]\w+)*)(\.bat|\.exe)?", re.ASCII)
"""The files of DeepSpeed's bin: deepspeed, deepspeed.pt, ds, ds_report, ds_io and others, dsr; no program of anybody else."""

COMMAND_FOLDERS = frozenset({"bin", "Scripts"})
EDITABLE = re.compile(
    r"__editable__\.deepspeed-[^/]+\.pth|(__pycache__/)?__editable___deepspeed_\w+_finder(\.[\w-]+)?\.pyc?", re.ASCII
)
"""What ``pip install --editable`` puts beside an installed package."""

DATA_FOLDER = re.compile(r"[^/]+\.data/(?:purelib|platlib)/", re.IGNORECASE)
"""What installers put where the rest of the wheel goes."""
LANDS_BESIDE = frozenset({"purelib", "platlib", "data"})
"""The folders of a .data folder whose own folders are judged like those of the wheel."""

MAKES_COMMANDS = frozenset({"console_scripts", "gui_scripts"})
ENTRY_POINTS = frozenset(
    {("pytest_randomly.random_seeder", "deepspeed", "deepspeed.runtime.utils:set_random_seed")},
)
"""All that a release has: group, name, object. Other packages load what an entry point names, torch at each import of it."""

Parts = tuple[str, ...]


def foreign_files(names: Iterable[str], version: str, entry_points: str | None = None) -> tuple[str, ...]:
    """The files among ``names`` that are no part of a DeepSpeed of this version, and the entry points that are none of its; sorted.

    >>> foreign_files(["deepspeed/__init__.py", "evil.pth", "deepspeed-1.data/scripts/ds", "deepspeed-1.data/scripts/python"], "1")
    ('deepspeed-1.data/scripts/python', 'evil.pth')
    """
    early = _is_early(version)
    named = {name for name in names if not name.endswith("/")}
    # installers compile it themselves; one that is brought along is run in place of its source
    files = {name for name in named if name.endswith(".pyc") or not _is_own(PurePosixPath(name).parts, early=early)}
    return tuple(sorted(files | set(_foreign_entry_points(entry_points))))


def foreign_installed(
    names: Iterable[str], version: str, entry_points: str | None = None, *, editable: bool = False
) -> tuple[str, ...]:
    """The files that the RECORD of an installed DeepSpeed lists and that are no part of it, and the entry points; sorted.

    ``editable``: setuptools has put what leads to the source tree beside it.

    >>> foreign_installed(["deepspeed/__init__.py", "../../../bin/ds", "../../../bin/python", "deepspeed/../evil.pth"], "0.19.8")
    ('../../../bin/python', 'evil.pth')
    """
    early = _is_early(version)
    places = {posixpath.normpath(name) for name in names}
    files = {name for name in places if not _is_own_place(name, early=early, editable=editable)}
    return tuple(sorted(files | set(_foreign_entry_points(entry_points))))


def _is_own_place(name: str, *, early: bool, editable: bool) -> bool:
    parts = PurePosixPath(name).parts
    if parts[0] in {"..", "/"}:
        return len(parts) > 1 and parts[-2] in COMMAND_FOLDERS and SCRIPT.fullmatch(parts[-1]) is not None
    return _is_own(parts, early=early) or (editable and EDITABLE.fullmatch(name) is not None)


def _is_own(parts: Parts, *, early: bool) -> bool:
    if len(parts) < 2:
        return False
    if re.fullmatch(r"deepspeed-[^/]+\.dist-info", parts[0], re.IGNORECASE):
        return True
    if re.fullmatch(r"deepspeed-[^/]+\.data", parts[0], re.IGNORECASE):
        return _is_own_data(parts[1:], early=early)
    return _is_own_package(parts, early=early)


def _is_own_package(parts: Parts, *, early: bool) -> bool:
    return len(parts) > 1 and (parts[0] in OWN or (early and any(parts[: len(place)] == place for place in EARLY)))


def _is_own_data(parts: Parts, *, early: bool) -> bool:
    if parts[0] == "scripts":
        return len(parts) == 2 and SCRIPT.fullmatch(parts[1]) is not None
    # a second .dist-info beside the first would bring entry points of its own
    return parts[0] in LANDS_BESIDE and _is_own_package(parts[1:], early=early)


def _is_early(version: str) -> bool:
    try:
        return Version(Version(version).public) <= LAST_EARLY
    except ValueError:
        return False


def _foreign_entry_points(text: str | None) -> Iterator[str]:
    """The entry points of an ``entry_points.txt`` that no DeepSpeed has: commands of others, and objects for other packages.

    >>> list(_foreign_entry_points("[console_scripts]\\nds_top = deepspeed.top:main\\npython = deepspeed.x:main"))
    ['the command python']
    >>> list(_foreign_entry_points("[torch.backends]\\nx = deepspeed.evil:run"))
    ['entry point [torch.backends] x = deepspeed.evil:run']
    """
    group = ""
    # line by line, as pip reads it: a stricter reader would be blinded by a malformed line
    for line in map(str.strip, (text or "").splitlines()):
        name, equals, target = map(str.strip, line.partition("="))
        if line.startswith("["):
            # older Pythons open a group also where something follows the bracket; newer ones fail by it
            group = line[1:].removesuffix("]").strip()
            if not line.endswith("]"):
                yield f"entry point group {line}, which is not closed"
        elif not (equals or (line and group)) or line.startswith("#") or (group, name, target) in ENTRY_POINTS:
            continue
        elif not equals:
            # importlib.metadata, which each import of torch asks, fails by it
            yield f"entry point [{group}] {line}, which is not a valid one"
        elif group not in MAKES_COMMANDS:
            yield f"entry point [{group}] {name} = {target}"
        elif not SCRIPT.fullmatch(name):
            yield f"the command {name}"


DIRECT = re.compile(r"([\w.-]+) ?(?:\[[^\]]*\])? ?@ ?(\S+)", re.ASCII)
"""A requirement that names where it is fetched from (PEP 508), as no package of PyPI may have one."""

KNOWN_REQUIREMENTS = re.compile(
    r"torch|torchvision|einops|hjson|msgpack|ninja|numpy|packaging|psutil|py-cpuinfo|cpufeature|pydantic|pynvml|nvidia-ml-py3?|tqdm"
    r"|tensorboardx|pillow|triton|mpi4py|cupy(-(cuda|rocm)[\dx-]+)?|deepspeed-kernels"
)
"""What the releases require, of requirements.txt and of the ops that bring a requirement along."""

OF_EXTRA = re.compile(r'(?:(?!\bor\b).)*\bextra == "[\w-]+"')
"""A condition that holds only where somebody asks for an extra."""

MAX_REQUIREMENTS = 1000
"""A release has a tenth of it with all extras."""

MAX_PATCH = 30
"""Of a release of Python or torch."""
MAX_NAME_LENGTH = 200
"""Characters of what a wheel names; no version of anybody has as many."""

Header = tuple[str, str]


def contradictions(
    names: Iterable[str],
    version: str,
    metadata: str | None,
    wheel: str | None = None,
    *,
    pythons: Iterable[str] = (),
    torch: str | None = None,
) -> tuple[str, ...]:
    """What in a wheel says that it is something else than its file name says, or differently for each who reads it. ``wheel``: its
    file WHEEL. ``pythons``: the tags of Pythons in its file name. ``torch``: the one that its ops were built for.

    >>> contradictions(["deepspeed-1.dist-info/WHEEL", "deepspeed//x.py"], "1", "Name: torch\\nVersion: 1.0\\n")
    ("METADATA names the package 'torch'", "the file name 'deepspeed//x.py' is not in its plain form")
    """
    listed = tuple(names)
    return (
        *_of_metadata(metadata, version),
        *_of_requirements(metadata or "", tuple(pythons), torch),
        *(_of_wheel_version(wheel) if wheel is not None else ()),
        *_of_folders(listed, version),
        *_of_names(listed),
    )


def addresses(metadata: str | None) -> tuple[str, ...]:
    """The requirements that are fetched from an address instead of the index, with no more of it than may be shown.

    >>> addresses("Requires-Dist: torch @ https://me:pw@evil.example/x.whl\\nRequires-Dist: numpy (>=1.2)\\n")
    ('torch from https://evil.example/x.whl',)
    """
    found = (DIRECT.match(value) for name, value in _headers(metadata or "") if name == "requires-dist")
    return tuple(f"{each[1]} from {_shown(each[2])}" for each in found if each)


def unknown_requirements(metadata: str | None) -> tuple[str, ...]:
    """The packages that the wheel has pip install, and that no release of DeepSpeed requires.

    >>> unknown_requirements("Requires-Dist: einops\\nRequires-Dist: einops-evil\\nRequires-Dist: sphinx ; extra == 'dev'\\n")
    ('einops-evil',)
    """
    found: dict[str, None] = {}
    for value in _values(list(_headers(metadata or "")), "requires-dist")[:MAX_REQUIREMENTS]:
        with contextlib.suppress(ValueError):
            needed = Requirement(value)
            is_of_extra = OF_EXTRA.fullmatch(str(needed.marker or ""))
            if not is_of_extra and not KNOWN_REQUIREMENTS.fullmatch(canonicalize_name(needed.name)):
                found[needed.name] = None
    return tuple(found)


def _shown(address: str) -> str:
    return redaction.url(address)[:MAX_NAME_LENGTH] if "://" in address else GONE


def _of_metadata(metadata: str | None, version: str) -> Iterator[str]:
    if metadata is None:
        yield "METADATA is missing"
        return
    if "\0" in metadata:
        yield "METADATA contains a NUL byte"
    headers = list(_headers(metadata))
    packages = _values(headers, "name")
    versions = _values(headers, "version")
    yield from (
        f"METADATA names no {what}" for what, named in (("package", packages), ("version", versions)) if not named
    )
    yield from (f"METADATA names the package {_quoted(name)}" for name in packages if _is_other_name(name))
    yield from (f"METADATA names the version {_quoted(named)}" for named in versions if not _is_same(named, version))


def _of_requirements(metadata: str, pythons: tuple[str, ...], torch: str | None) -> Iterator[str]:
    """Requirements that no installer can read, or that the wheel itself contradicts."""
    headers = list(_headers(metadata))
    for value in _values(headers, "requires-python"):
        try:
            wanted = SpecifierSet(value)
        except ValueError:
            yield f"METADATA requires the Python {_quoted(value)}, which is not a valid one"
            continue
        releases = [f"{found[1]}.{found[2]}" for tag in pythons if (found := re.fullmatch(r"cp(\d)(\d+)", tag))]
        if releases and not any(_allows(wanted, release) for release in releases):
            yield f"METADATA requires the Python {_quoted(value)}, and the file name says {', '.join(sorted(pythons))}"
    requirements = _values(headers, "requires-dist")
    if len(requirements) > MAX_REQUIREMENTS:
        yield f"METADATA holds {len(requirements):,} requirements, more than any DeepSpeed"
    for value in requirements[:MAX_REQUIREMENTS]:
        try:
            needed = Requirement(value)
        except ValueError:
            yield f"METADATA requires {_quoted(value) if '://' not in value else GONE}, which is not a valid requirement"
            continue
        is_torch = canonicalize_name(needed.name) == "torch" and needed.marker is None
        if is_torch and torch and not _allows(needed.specifier, torch):
            yield f"METADATA requires {_quoted(f'torch{needed.specifier}')}, and its ops were built for torch {torch}"


def _allows(wanted: SpecifierSet, release: str) -> bool:
    """Whether any patch of a release ("3.11") is one that is asked for.

    >>> _allows(SpecifierSet(">=3.11.4"), "3.11"), _allows(SpecifierSet("<2"), "2.14.0+cu130")
    (True, False)
    """
    try:
        base = Version(release).release
    except ValueError:
        return True
    tried = (release, *(".".join(map(str, (*base[:2], patch))) for patch in range(MAX_PATCH)))
    return any(wanted.contains(each, prereleases=True) for each in tried)


def _of_wheel_version(wheel: str) -> Iterator[str]:
    """Installers take version 1 of the format, and no file without one."""
    named = _values(list(_headers(wheel)), "wheel-version")
    if len(named) != 1 or not re.fullmatch(r"1\.\d{1,4}", named[0], re.ASCII):
        yield f"WHEEL names the version {', '.join(map(_quoted, named[:3])) or 'of no format'}"


def _of_folders(names: tuple[str, ...], version: str) -> Iterator[str]:
    """What is wrong with the .dist-info folders at the top, of which pip demands exactly one: that of the file name."""
    folders = sorted({name.split("/", 1)[0] for name in names if "/" in name})
    info = [folder for folder in folders if folder.lower().endswith(".dist-info")]
    if len(info) > 1:
        yield f"it has {len(info)} .dist-info folders: {', '.join(map(_quoted, info[:3]))}"
    for folder in info:
        name, _, named = folder[: -len(".dist-info")].partition("-")
        if canonicalize_name(name) == "deepspeed" and not _is_same(named, version):
            yield f"the folder {_quoted(folder)} is of another version"


def _of_names(names: tuple[str, ...]) -> Iterator[str]:
    """Names that installers make another name of: a RECORD lists the one, and the other is written."""
    for name in names:
        if posixpath.normpath(name) != name.removesuffix("/"):
            yield f"the file name {_quoted(name)} is not in its plain form"


def _headers(metadata: str) -> Iterator[Header]:
    """The headers of a METADATA file up to its description, their names in small letters, folded lines joined.

    >>> list(_headers("Name: a\\nRequires-Dist: b\\n @ c\\nno header\\n\\nName: d\\n"))
    [('name', 'a'), ('requires-dist', 'b @ c')]
    """
    for text in _unfolded(re.split(r"\r\n|\r|\n", metadata)):
        name, colon, value = text.partition(":")
        if colon:
            yield name.strip().lower(), " ".join(value.split())


def _unfolded(lines: Iterable[str]) -> Iterator[str]:
    """The lines up to the first that is empty, each with those that continue it."""
    parts: list[str] = []
    for line in itertools.takewhile(bool, lines):
        if parts and line[0] not in " \t":
            yield " ".join(parts)
            parts = []
        parts.append(line)
    yield " ".join(parts)


def _values(headers: list[Header], wanted: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for name, value in headers if name == wanted))


def _is_other_name(name: str) -> bool:
    return canonicalize_name(name) != "deepspeed"


def _is_same(named: str, version: str) -> bool:
    try:
        return len(named) <= MAX_NAME_LENGTH and Version(named) == Version(version)
    except ValueError:
        return named == version


def _quoted(text: str) -> str:
    """A name of the wheel's own choice, as it is shown.

    >>> _quoted("a\\nb")
    "'a\\\\nb'"
    """
    return repr(text if len(text) <= MAX_NAME_LENGTH else f"{text[:MAX_NAME_LENGTH]}...")


MAX_UNPACKED_BYTES = 16 << 30
MAX_RATIO = 400
"""A shared object with debug information shrinks to a quarter; a file of zeros to a thousandth."""

MIN_RATIO_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
HINT = "fetch or build it again"
MAX_FOLDERS = 64
"""In each other."""
MAX_TEXT_BYTES = 16 << 20
"""The RECORD of a DeepSpeed with everything in it has 0.3 MB, its manifest 0.05 MB."""

Entries = Mapping[str, Entry]
"""By their names, in the order of the zip's directory."""


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
        with open_regular(path) as file, temporary_folder() as folder:
            entries = {entry.name: entry for entry in read_entries(file)}
            _refuse_malicious(entries, path)
            pythons = {tag.interpreter for tag in tags}
            facts = _read(file, entries, path, str(version), folder, pythons)
            return _with_name(facts, pythons, {tag.platform for tag in tags})
    except DoctorError:
        raise
    except AmbiguousZip as error:
        raise UsageError(f"{path.name} is refused: {error}", hint="do not install it") from None
    except Exception as error:
        # what is in a wheel is anybody's: whatever it brings about, it is this wheel that cannot be read
        if is_full(error):
            raise
        why = error.strerror if isinstance(error, OSError) else None
        why = why or (str(error) if isinstance(error, BadZip | OSError) else f"{type(error).__name__}: {error}"[:200])
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
        text = read_limited(record, MAX_TEXT_BYTES).decode("utf-8", errors="replace")
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
        return read_limited(path, MAX_TEXT_BYTES).decode("utf-8", errors="replace") if os.path.lexists(path) else ""
    except OSError as error:
        hint = "inspect it, then reinstall DeepSpeed"
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from None


def _is_editable(record: Path) -> bool:
    """Whether a distribution was installed with ``pip install --editable`` (PEP 610)."""
    try:
        origin = decode(read_limited(record.with_name("direct_url.json"), MAX_TEXT_BYTES), dict)
    except (OSError, msgspec.DecodeError):
        return False
    folder = origin.get("dir_info")
    return isinstance(folder, dict) and folder.get("editable") is True


def _refuse_malicious(entries: Entries, path: Path) -> None:
    if sum(entry.size for entry in entries.values()) > MAX_UNPACKED_BYTES:
        raise UsageError(f"{path.name} claims to unpack to more than a DeepSpeed can be", hint="do not install it")
    landing: dict[str, str] = {}
    for name in entries:
        if name.endswith("/"):
            continue
        place = name[found.end() :] if (found := DATA_FOLDER.match(name)) else name
        other = landing.setdefault(place.casefold(), name)
        if other != name:
            raise UsageError(
                f"{path.name} installs {name!r} over {other!r}: the result depends on the installer",
                hint="do not install it",
            )
    for place, name in landing.items():
        if above := next((each for each in _folders_of(place) if each in landing), None):
            raise UsageError(
                f"{path.name} holds {landing[above]!r} as a file, and as the folder of {name!r}",
                hint="do not install it",
            )
    for entry in entries.values():
        if stat.S_ISLNK(entry.mode):
            raise UsageError(f"{path.name} holds a link: {entry.name!r}; wheels have none", hint="do not install it")
        if entry.size > MIN_RATIO_BYTES and entry.size > MAX_RATIO * max(1, entry.stored):
            raise UsageError(
                f"{path.name}'s {entry.name!r} unpacks to {entry.size} bytes from {entry.stored}",
                hint="do not install it",
            )


def _read(file: BinaryIO, entries: Entries, path: Path, version: str, folder: Path, pythons: set[str]) -> DeepSpeed:
    undecodable: list[str] = []

    def text(ending: str) -> str | None:
        # pip reads the .dist-info at the top; one further down is a file like any other
        name = next((name for name in entries if name == ending or _at_top(name, ending)), None)
        if name is None:
            return None
        if entries[name].size > MAX_TEXT_BYTES:
            raise UsageError(f"{path.name}'s {name} is larger than any can be", hint="do not install it")
        content = b"".join(read_bytes(file, entries[name]))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            undecodable.append(f"{name} is not UTF-8, so installers read it differently")
            return content.decode("utf-8", errors="replace")

    record = text(f"deepspeed/{RECORD}")
    if record is None:
        raise UsageError(f"{path.name} holds no deepspeed/{RECORD}: it is not a built DeepSpeed", hint=HINT)
    facts = deepspeed_of_record(record, version=version, location=str(path))
    facts = with_tags(with_manifest(facts, text(MANIFEST), exists=_exists), text("WHEEL"))
    record_text = text("RECORD")
    listed = _parse_record(record_text or "")
    libraries: dict[str, ElfInfo] = {}
    named = Counter(_names_in_record(record_text or ""))
    altered = [name for name, rows in named.items() if name not in entries or rows > 1]
    altered += ["RECORD, which cannot be read"] if record_text and not named else []
    altered += ["RECORD, which is missing"] if record_text is None else _unlisted(entries, listed)
    for name, entry in entries.items():
        unpacked = folder / "library.so" if name.endswith(".so") else None
        digest = _copied(file, entry, unpacked)
        if name in listed and listed[name] != digest:
            altered.append(name)
        if unpacked is not None:
            libraries[name] = read_elf(unpacked)
    recorded = recorded_wheel_digest(_beside(path))
    if recorded is not None and recorded != hex_of(path):
        altered.append(path.name)
    metadata, entry_points = text("METADATA"), text("entry_points.txt")
    told = contradictions(entries, version, metadata, text("WHEEL"), pythons=pythons, torch=facts.torch)
    return replace(
        _with_library_facts(facts, libraries),
        altered=tuple(sorted(altered)),
        # who uninstalls it removes what RECORD lists, wherever that is
        foreign=foreign_files({*entries, *named}, version, entry_points),
        contradictions=(*dict.fromkeys(undecodable), *told),
        addresses=addresses(metadata),
        doubts=(*facts.doubts, *(f"it requires {name[:MAX_NAME_LENGTH]}" for name in unknown_requirements(metadata))),
    )


def _folders_of(place: str) -> Iterator[str]:
    parts = place.split("/", MAX_FOLDERS)
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


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


def _unlisted(entries: Entries, listed: Mapping[str, str]) -> list[str]:
    """The files that RECORD does not list; it cannot list itself and signatures."""
    free = ("/RECORD", "/RECORD.jws", "/RECORD.p7s", "/")
    return [name for name in entries if name not in listed and not name.endswith(free)]


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


def _copied(file: BinaryIO, entry: Entry, target: Path | None) -> str:
    """The digest of an entry, as RECORD writes it; its bytes are written to ``target``. Their CRC is compared on the way."""
    total = hashlib.sha256()
    with contextlib.nullcontext() if target is None else target.open("wb") as copy:
        for piece in read_bytes(file, entry):
            total.update(piece)
            if copy is not None:
                copy.write(piece)
    return _urlsafe(total.digest())


def _digest_of(path: Path) -> str | None:
    total = hashlib.sha256()
    try:
        with open_regular(path) as file:
            _each(file.read, total.update)
    except OSError:
        return None
    return _urlsafe(total.digest())


def hex_of(path: Path, algorithm: str = "sha256") -> str:
    """The digest of a file, in hexadecimal digits."""
    total = hashlib.new(algorithm)
    with open_regular(path) as file:
        _each(file.read, total.update)
    return total.hexdigest()


def _each(read: Callable[[int], bytes], *takers: Callable[[bytes], object]) -> None:
    while chunk := read(CHUNK_BYTES):
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
        return read_limited(path.with_name(f"{path.name}.json"), MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
