"""The METADATA, the names in a wheel and its file name -> where they contradict each other, and what it takes from an address."""

import itertools
import posixpath
import re
from collections.abc import Iterable, Iterator

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dsdoctor.core import redaction
from dsdoctor.core.redaction import GONE

DIRECT = re.compile(r"([\w.-]+) ?(?:\[[^\]]*\])? ?@ ?(\S+)", re.ASCII)
"""A requirement that names where it is fetched from (PEP 508), as no package of PyPI may have one."""

LONGEST = 200
"""Characters of what a wheel names; no version of anybody has as many."""

Header = tuple[str, str]


def contradictions(names: Iterable[str], version: str, metadata: str | None) -> tuple[str, ...]:
    """What in a wheel says that it is something else than its file name says, or differently for each who reads it.

    >>> contradictions(["deepspeed-1.dist-info/WHEEL", "deepspeed//x.py"], "1", "Name: torch\\nVersion: 1.0\\n")
    ("METADATA names the package 'torch'", "the file name 'deepspeed//x.py' is not in its plain form")
    """
    listed = tuple(names)
    return (*_of_metadata(metadata, version), *_of_folders(listed, version), *_of_names(listed))


def addresses(metadata: str | None) -> tuple[str, ...]:
    """The requirements that are fetched from an address instead of the index, with no more of it than may be shown.

    >>> addresses("Requires-Dist: torch @ https://me:pw@evil.example/x.whl\\nRequires-Dist: numpy (>=1.2)\\n")
    ('torch from https://evil.example/x.whl',)
    """
    found = (DIRECT.match(value) for name, value in _headers(metadata or "") if name == "requires-dist")
    return tuple(f"{each[1]} from {_shown(each[2])}" for each in found if each)


def _shown(address: str) -> str:
    return redaction.url(address)[:LONGEST] if "://" in address else GONE


def _of_metadata(metadata: str | None, version: str) -> Iterator[str]:
    if metadata is None:
        yield "METADATA is missing"
        return
    if "\0" in metadata:
        yield "METADATA holds NUL, as no text does"
    headers = list(_headers(metadata))
    packages = _values(headers, "name")
    versions = _values(headers, "version")
    yield from (
        f"METADATA names no {what}" for what, told in (("package", packages), ("version", versions)) if not told
    )
    yield from (f"METADATA names the package {_quoted(name)}" for name in packages if _is_other_name(name))
    yield from (f"METADATA names the version {_quoted(told)}" for told in versions if not _is_same(told, version))


def _of_folders(names: tuple[str, ...], version: str) -> Iterator[str]:
    """What is wrong with the .dist-info folders at the top, of which pip demands exactly one: that of the file name."""
    folders = sorted({name.split("/", 1)[0] for name in names if "/" in name})
    info = [folder for folder in folders if folder.lower().endswith(".dist-info")]
    if len(info) > 1:
        yield f"it has {len(info)} .dist-info folders: {', '.join(map(_quoted, info[:3]))}"
    for folder in info:
        name, _, told = folder[: -len(".dist-info")].partition("-")
        if canonicalize_name(name) == "deepspeed" and not _is_same(told, version):
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


def _is_same(told: str, version: str) -> bool:
    try:
        return len(told) <= LONGEST and Version(told) == Version(version)
    except InvalidVersion:
        return told == version


def _quoted(text: str) -> str:
    """A name of the wheel's own choice, as it is shown.

    >>> _quoted("a\\nb")
    "'a\\\\nb'"
    """
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
