"""The cache on this machine: compiled ops and wheels, toolkits, sources and environments; how much of each, and its removal."""

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dsdoctor.builder.cache.store import CacheStore, Entry
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import Host
from dsdoctor.core.trust import Distrusted, trusted
from dsdoctor.core.workspace import cache_folder
from dsdoctor.rules import book
from dsdoctor.ui.table import size

KINDS = ("toolkits", "sdists", "targets")
NVCC = "home/bin/nvcc"
IN_USE_SECONDS = 2 * 3600.0
"""Seconds after its last use in which nothing is removed for its age or size: a build may be at work with it."""

FOLDER = "compiled"
DEFAULT_LIMIT = "10G"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SPANS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
UNLISTED_FACTS = ("dependencies", "inputs")
"""Facts of thousands of lines. They stand in the entry's own record."""

SPANS_SHOWN = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True, kw_only=True)
class StoredFolder:
    """One of them: ``used`` is in seconds since 1970, ``size`` in bytes. ``facts`` is there for the lines of the op cache."""

    kind: str
    name: str
    folder: str
    size: int
    used: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An entry as the command tells it: ``name`` is the op or the wheel, ``used`` seconds since 1970, ``size`` bytes."""

    kind: str
    name: str | None
    key: str
    folder: str
    files: tuple[str, ...]
    size: int
    used: float
    facts: dict[str, Any] = field(default_factory=dict)


class Shown(Protocol):
    """What a line needs to know of an entry."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def size(self) -> int: ...
    @property
    def used(self) -> float: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...


def stored_folders(cache: Path) -> tuple[StoredFolder, ...]:
    """All of them, the last used first. Folders that others may write to are left alone."""
    found = [entry for kind in KINDS for entry in _of_kind(cache / kind, kind)]
    return tuple(sorted(found, key=lambda entry: entry.used, reverse=True))


LEFT_OVER = re.compile(r"\.[0-9a-f]{32}\.removed", re.ASCII)
"""The name of what is being removed, or was when its removal was killed."""


def remove_folder(entry: StoredFolder) -> bool:
    """Remove one, and what is recorded of it: it has gone from its place at once, or is still there as it was."""
    path = Path(entry.folder)
    aside = path.with_name(f".{uuid.uuid4().hex}.removed")
    try:
        path.rename(aside)
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)
    except FileNotFoundError:  # another one removes it
        return True
    except OSError:
        return False
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
    return True


def open_store(host: Host) -> CacheStore:
    """This user's op cache, with its limit from DSDOCTOR_CACHE_LIMIT. Raises UsageError for a limit that is no size."""
    limit = parse_size(host.variable("DSDOCTOR_CACHE_LIMIT") or DEFAULT_LIMIT, "DSDOCTOR_CACHE_LIMIT")
    return CacheStore(cache_folder(host) / FOLDER, limit=limit)


def trusted_store(host: Host) -> CacheStore:
    """The same for those who come for the cache alone. Raises ImpossiblePlan for one that is not to be trusted."""
    store = open_store(host)
    if why := store.distrust():
        raise ImpossiblePlan(
            f"the cache is not used: {why}", hint="fix that, or export DSDOCTOR_CACHE=/a/folder/you/own"
        )
    return store


def prune(store: CacheStore, *, size: str | None, age: str | None, everything: bool) -> tuple[Entry, ...]:
    """Remove what was not used for an age, then the least recently used down to a size; without either, down to the limit.

    Raises UsageError for what is no size and no age.
    """
    if everything and (size is not None or age is not None):
        raise UsageError("--all cannot be combined with --max-size or --older-than", hint="use --all alone")
    limit = 0 if everything else parse_size(size, "--max-size") if size is not None else store.limit
    oldest = time.time() - parse_age(age, "--older-than") if age is not None else 0.0
    stale = tuple(entry for entry in store.entries() if entry.used < oldest and store.remove(entry))
    only_age = age is not None and size is None
    return stale if only_age else (*stale, *store.prune(limit))


def prune_folders(
    cache: Path, *, size: str | None, age: str | None, everything: bool, room: int
) -> tuple[StoredFolder, ...]:
    """Remove toolkits, archives and environments by the same options; without any, none. ``room``: what the op cache takes.

    What was used in the last two hours stays, but for ``everything``. What a removal left that was killed always goes.
    """
    now = time.time()
    oldest = now - max(parse_age(age, "--older-than"), IN_USE_SECONDS) if age is not None else None
    most = parse_size(size, "--max-size") if size is not None else None
    removed: list[StoredFolder] = []
    left = room + sum(entry.size for entry in stored_folders(cache))
    for entry in reversed(stored_folders(cache)):
        is_old = oldest is not None and entry.used < oldest
        is_much = most is not None and left > most and entry.used < now - IN_USE_SECONDS
        is_left = LEFT_OVER.fullmatch(entry.name) is not None
        if (everything or is_old or is_much or is_left) and remove_folder(entry):
            removed.append(entry)
            left -= entry.size
    return tuple(removed)


def store_findings(store: CacheStore) -> tuple[Finding, ...]:
    """What a store has to say to the user: the entries that it dropped as damaged, and what the disk refused."""
    dropped = (book.finding("cache-entry-damaged", Severity.WARNING, case="dropped", why=why) for why in store.dropped)
    refused = (book.finding("dsdoctor", Severity.WARNING, case="cache", why=why) for why in store.complaints)
    return (*dropped, *refused)


def damage(entry: Entry, why: str) -> Finding:
    """An entry that was asked to be what was stored, and is not."""
    name = entry.facts.get("op") or entry.facts.get("name") or "an entry"
    evidence = (f"its files: {', '.join(sorted(entry.files))}",) if entry.files else ()
    return book.finding(
        "cache-entry-damaged",
        Severity.ERROR,
        case="verified",
        evidence=evidence,
        name=str(name),
        kind=entry.kind,
        key=entry.key[:12],
        why=why,
    )


def kept(entries: Iterable[Entry]) -> tuple[Kept, ...]:
    """Entries as the command lists them, the last used first."""
    return tuple(_kept(entry) for entry in sorted(entries, key=lambda entry: entry.used, reverse=True))


def parse_size(text: str, what: str = "a size") -> int:
    """Bytes, of which a K has 1024. Raises UsageError for what is none.

    >>> parse_size("10G"), parse_size("1.5 GiB"), parse_size("500mb"), parse_size("0")
    (10737418240, 1610612736, 524288000, 0)
    >>> parse_size("much")
    Traceback (most recent call last):
    dsdoctor.core.errors.UsageError: a size is 'much', which is not a size
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise UsageError(f"{what} is {text!r}, which is not a size", hint='use a size such as "500M" or "10G"')
    return int(float(found[1]) * UNITS[found[2].upper()])


def parse_age(text: str, what: str = "an age") -> float:
    """Seconds. Raises UsageError for what is no age.

    >>> parse_age("30d"), parse_age("12h"), parse_age("90m"), parse_age("2w")
    (2592000.0, 43200.0, 5400.0, 1209600.0)
    """
    found = re.fullmatch(r"(\d{1,9})\s*([mhdw])", text.strip(), re.ASCII)
    if found is None:
        raise UsageError(
            f"{what} is {text!r}, which is not an age", hint='use an age such as "90m", "12h", "30d" or "2w"'
        )
    return int(found[1]) * SPANS[found[2]]


def kept_lines(entries: Iterable[Shown], folder: str, limit: int, now: float) -> Iterator[str]:
    """A row for each entry, then the total and the limit."""
    entries = tuple(entries)
    yield from _rows(entries, now)
    total = sum(entry.size for entry in entries)
    yield f"{_count(entries)}, {size(total)} of {size(limit)}  {folder}"


def folder_lines(folders: Iterable[Shown], cache: str, now: float) -> Iterator[str]:
    """A row for each toolkit, archive and environment, and what they take together; nothing where there is none."""
    folders = tuple(folders)
    if folders:
        yield from _rows(folders, now)
        total = size(sum(entry.size for entry in folders))
        yield f"{total} more in toolkits, sdists and targets  {cache}"


def pruned_lines(entries: Iterable[Shown], left: int, now: float) -> Iterator[str]:
    """The removed entries, and the bytes that are left."""
    entries = tuple(entries)
    yield from _rows(entries, now)
    freed = size(sum(entry.size for entry in entries))
    yield (
        f"✓ removed {_count(entries)}, {freed}; {size(left)} left"
        if entries
        else f"✓ nothing to remove; {size(left)} left"
    )


def verified_line(whole: int) -> str:
    """How many entries are intact."""
    if not whole:
        return "· nothing else is stored"
    return f"✓ {whole} {'entry is' if whole == 1 else 'entries are'} intact"


def ago(seconds: float) -> str:
    """How long ago something was, in the largest unit that fits.

    >>> ago(5), ago(60), ago(7300), ago(3 * 86400), ago(-5)
    ('just now', '1 minute ago', '2 hours ago', '3 days ago', 'just now')
    """
    for span, unit in SPANS_SHOWN:
        count = int(seconds // span)
        if count >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _of_kind(folder: Path, kind: str) -> Iterator[StoredFolder]:
    try:
        real = trusted(folder)
    except Distrusted:
        return
    for path in real.iterdir() if real else ():
        is_hidden = path.name.startswith(".") and not LEFT_OVER.fullmatch(path.name)
        if is_hidden or path.is_symlink() or path.suffix in {".lock", ".json"}:
            continue
        yield StoredFolder(kind=kind, name=path.name, folder=str(path), size=_size(path), used=_used(path))


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; a file with two names counts once."""
    if not path.is_dir():
        return path.stat().st_size
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(path):
        for name in names:
            about = os.lstat(os.path.join(place, name))  # noqa: PTH118
            seen[about.st_dev, about.st_ino] = about.st_size
    return sum(seen.values())


def _used(path: Path) -> float:
    """When it was last written, or one of the files in it that every use reads was last read."""
    # the times of folders change when they are listed, as here
    read = [path] if path.is_file() else [file for file in (*path.iterdir(), *path.glob(NVCC)) if file.is_file()]
    return max((path.lstat().st_mtime, *(max(file.lstat().st_atime, file.lstat().st_mtime) for file in read)))


def _kept(entry: Entry) -> Kept:
    name = entry.facts.get("op") or entry.facts.get("name")
    return Kept(
        kind=entry.kind,
        name=str(name) if name else None,
        key=entry.key,
        folder=str(entry.folder),
        files=tuple(sorted(entry.files)),
        size=entry.size,
        used=entry.used,
        facts={fact: value for fact, value in entry.facts.items() if fact not in UNLISTED_FACTS},
    )


def _rows(entries: tuple[Shown, ...], now: float) -> Iterator[str]:
    rows = [(*_about(entry), size(entry.size), ago(now - entry.used)) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()


def _about(entry: Shown) -> tuple[str, str, str, str]:
    """Kind, name, torch, and what it is for."""
    facts = entry.facts
    name, version = entry.name or "?", _text(facts.get("version"))
    name = name if version in name else f"{name} {version}"
    torch = f"torch {_text(facts.get('torch'))}" if facts.get("torch") else ""
    made_for = ("accelerator", "architectures", "processor", "ops")
    return (
        entry.kind.removesuffix("s"),
        name,
        torch,
        " ".join(filter(None, (_text(facts.get(fact)) for fact in made_for))),
    )


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _count(entries: tuple[Shown, ...]) -> str:
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
