"""The names in a wheel, or of an installed DeepSpeed -> those that no DeepSpeed has, and that lie beside it. Nothing is read."""

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from packaging.version import InvalidVersion, Version

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

LANDS_BESIDE = frozenset({"purelib", "platlib", "data"})
"""The folders of a .data folder whose own folders are judged like those of the wheel."""

MAKES_COMMANDS = frozenset({"console_scripts", "gui_scripts"})

Parts = tuple[str, ...]


def foreign_files(names: Iterable[str], version: str, entry_points: str | None = None) -> tuple[str, ...]:
    """The files among ``names`` that are no part of a DeepSpeed of this version, sorted; and the commands of others that its
    entry points would make.

    >>> foreign_files(["deepspeed/__init__.py", "evil.pth", "deepspeed-1.data/scripts/ds", "deepspeed-1.data/scripts/python"], "1")
    ('deepspeed-1.data/scripts/python', 'evil.pth')
    """
    early = _is_early(version)
    files = {name for name in names if not name.endswith("/") and not _is_own(PurePosixPath(name).parts, early=early)}
    return tuple(sorted(files | {f"the command {name}" for name in _commands(entry_points or "")}))


def foreign_installed(names: Iterable[str], version: str, *, editable: bool = False) -> tuple[str, ...]:
    """The files that the RECORD of an installed DeepSpeed lists and that are no part of it, sorted.

    ``editable``: setuptools has put what leads to the source tree beside it.

    >>> foreign_installed(["deepspeed/__init__.py", "../../../bin/ds", "../../../bin/python", "deepspeed/../evil.pth"], "0.19.8")
    ('../../../bin/python', 'evil.pth')
    """
    early = _is_early(version)
    places = {posixpath.normpath(name) for name in names}
    return tuple(sorted(name for name in places if not _is_own_place(name, early=early, editable=editable)))


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
    return parts[0] in OWN or (early and any(parts[: len(place)] == place for place in EARLY))


def _is_own_data(parts: Parts, *, early: bool) -> bool:
    if parts[0] == "scripts":
        return len(parts) == 2 and SCRIPT.fullmatch(parts[1]) is not None
    return parts[0] in LANDS_BESIDE and _is_own(parts[1:], early=early)


def _is_early(version: str) -> bool:
    try:
        return Version(Version(version).public) <= LAST_EARLY
    except InvalidVersion:
        return False


def _commands(entry_points: str) -> Iterator[str]:
    """The commands of an ``entry_points.txt`` that are not DeepSpeed's.

    >>> list(_commands("[console_scripts]\\nds_top = deepspeed.top:main\\npython = deepspeed.x:main"))
    ['python']
    """
    group = ""
    # line by line, as pip reads it: a stricter reader would be blinded by a malformed line
    for line in map(str.strip, entry_points.splitlines()):
        name, equals, _ = line.partition("=")
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]").strip()
        elif equals and group in MAKES_COMMANDS and not line.startswith("#") and not SCRIPT.fullmatch(name.strip()):
            yield name.strip()
