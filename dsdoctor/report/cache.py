"""Entries of the op cache -> lines. Facts that an entry lacks are left out."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from dsdoctor.ui.table import size

SPANS = ((86400, "day"), (3600, "hour"), (60, "minute"))


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
        yield f"{total} besides in toolkits, sdists and targets  {cache}"


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
    for span, unit in SPANS:
        count = int(seconds // span)
        if count >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


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
