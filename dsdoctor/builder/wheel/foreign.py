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
    except InvalidVersion:
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
            # older Pythons open a group also where something follows the bracket
            group = line[1:].removesuffix("]").strip()
        elif not equals or line.startswith("#") or (group, name, target) in ENTRY_POINTS:
            continue
        elif group not in MAKES_COMMANDS:
            yield f"entry point [{group}] {name} = {target}"
        elif not SCRIPT.fullmatch(name):
            yield f"the command {name}"
