"""A folder -> its tags, what ``latest`` says, and one tag with the directory and the pickle of each file. Judges nothing."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.checkpoint.archive import Archive, Pickles, read_archive
from dsdoctor.checkpoint.names import Part, ShardName, parse_name
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited

LONGEST_TAG = 4096
UNIVERSAL = "zero"
"""The folder of a universal tag that has one folder for each parameter."""
GROUPS = "optimizer_state.pt"
"""The file in it that has the optimizer's groups: base_optimizer.py and stage3.py open it before any parameter."""


def step_of(name: str) -> int | None:
    """The step in a tag's name, as DeepSpeed gives it."""
    found = re.fullmatch(r"global_step(\d{1,12})(?:_universal)?", name, re.ASCII)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of a tag, and what its name says."""

    name: ShardName
    file: Archive

    @property
    def part(self) -> Part:
        """What it holds."""
        return Part[self.name.part]


@dataclass(frozen=True, kw_only=True)
class TagFolder:
    """A tag as its folder shows it, no file opened. ``modified``: when its newest file was written."""

    name: str
    path: Path
    files: tuple[str, ...]
    size: int
    modified: float
    universal: bool

    @property
    def step(self) -> int | None:
        """The step in its name, as DeepSpeed gives it."""
        return step_of(self.name)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a universal tag: its folder's name and the files in it."""

    name: str
    files: tuple[Archive, ...]


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A tag with every file of it read. ``parameters``: those of a universal tag, None for a tag that is none. ``groups``: the
    file of its optimizer's groups, None where that is not there."""

    folder: TagFolder
    shards: tuple[Shard, ...]
    parameters: tuple[Parameter, ...] | None = None
    groups: Archive | None = None

    def of(self, part: Part) -> tuple[Shard, ...]:
        """The files that hold one kind of thing, in order."""
        return tuple(shard for shard in self.shards if shard.part is part)

    @property
    def files(self) -> tuple[Archive, ...]:
        """All files, those of the parameters too."""
        inner = (file for parameter in self.parameters or () for file in parameter.files)
        return (*(shard.file for shard in self.shards), *((self.groups,) if self.groups else ()), *inner)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of tags. ``latest`` and ``latest_universal``: what the files of that name say, None where they are not there.

    ``beside``: files of Hugging Face that hold the weights too. ``denied``: folders in it that this user may not read.
    """

    path: Path
    tags: tuple[TagFolder, ...]
    latest: str | None = None
    latest_universal: str | None = None
    beside: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def tag(self, name: str) -> TagFolder | None:
        """The tag of a name."""
        return next((tag for tag in self.tags if tag.name == name), None)


def look(path: Path) -> Folder:
    """Look at a folder, or at the folder around a tag that is named. Raises UsageError for what is none."""
    _readable(path)
    if not is_folder(path):
        around = path.parent if path.exists() else "DIR"
        raise UsageError(
            f"{path} is {'no folder' if path.exists() else 'not there'}", hint=f"dsdoctor checkpoint {around}"
        )
    latest = _first_line(path / "latest")
    found, denied = _tags(path)
    tags = tuple(sorted(found, key=lambda tag: (tag.modified, tag.name)))
    if latest and latest not in {tag.name for tag in tags} and (named := _named_and_readable(path, latest)):
        tags = (*tags, named)
    return Folder(
        path=path,
        tags=tags,
        latest=latest,
        latest_universal=_first_line(path / "latest_universal"),
        beside=tuple(
            sorted(name for name in names_in(path) if re.fullmatch(r"(model|pytorch_model).*\.(safetensors|bin)", name))
        ),
        denied=denied,
    )


def named_tag(path: Path, name: str) -> TagFolder | None:
    """The tag that DeepSpeed finds by a name, which may lead further down ("run1/step5") or be a whole path.

    Raises UsageError for one that this user may not read.
    """
    folder = path / name
    try:
        _readable(folder)
        tag = tag_folder(folder) if is_folder(folder) else None
    except PermissionError as error:
        raise _not_yours(folder) from error
    return replace(tag, name=name) if tag else None


def _named_and_readable(path: Path, name: str) -> TagFolder | None:
    try:
        return named_tag(path, name)
    except UsageError:  # matters only to one who wants that tag: choose says it then
        return None


def _readable(folder: Path) -> None:
    """Raises UsageError for a folder that this user may not read."""
    if is_denied(folder):
        raise _not_yours(folder)


def _not_yours(folder: Path) -> UsageError:
    return UsageError(f"you may not read the folder {folder}", hint="ls -ld shows whose it is")


def is_folder(path: Path) -> bool:
    """Whether a folder can be seen there; a name that no system takes is none."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_denied(folder: Path) -> bool:
    """Whether this user may not list a folder or not open what is in it, or may not even see whether it is there."""
    try:
        return stat.S_ISDIR(folder.stat().st_mode) and not os.access(folder, os.R_OK | os.X_OK)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def folder_of_tags_below(path: Path) -> list[Path]:
    """Folders in a folder that hold tags themselves (checkpoint-500), the one that was written last at the end."""
    inner = [path / name for name in names_in(path) if is_folder(path / name) and not is_denied(path / name)]
    return sorted((each for each in inner if _tags(each)[0]), key=lambda each: each.stat().st_mtime)


def names_in(folder: Path) -> list[str]:
    """All names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def is_tag(path: Path) -> bool:
    """Whether a folder holds the files of a tag."""
    return is_folder(path) and not is_denied(path) and any(parse_name(name) for name in names_in(path))


def read_tag(folder: TagFolder) -> Tag:
    """Read the directory and the pickle of each file of a tag."""
    named = [(name, parse_name(name)) for name in folder.files]
    pickles: Pickles = {}
    shards = [Shard(name=parsed, file=read_archive(folder.path / name, pickles)) for name, parsed in named if parsed]
    parameters = tuple(_parameters(folder.path / UNIVERSAL, pickles)) if folder.universal else None
    groups = folder.path / UNIVERSAL / GROUPS
    is_there = folder.universal and (groups.is_symlink() or groups.exists())
    return Tag(
        folder=folder,
        shards=tuple(sorted(shards, key=lambda shard: _order(shard.name))),
        parameters=parameters,
        groups=read_archive(groups, pickles) if is_there else None,
    )


def _order(name: ShardName) -> tuple[str, int, int, int, int]:
    numbers = (name.layer, name.expert, name.model, name.data)
    first, second, third, fourth = (-1 if number is None else number for number in numbers)
    return (name.part, first, second, third, fourth)


def _tags(path: Path) -> tuple[list[TagFolder], tuple[str, ...]]:
    """The tags in a folder, and the names of the folders that this user may not read."""
    tags, denied = [], []
    for name in names_in(path):
        folder = path / name
        try:
            tag = tag_folder(folder) if is_folder(folder) and not is_denied(folder) else None
        except PermissionError:  # a server of files may refuse what the rights allow
            denied.append(name)
            continue
        except FileNotFoundError:  # a training takes its old tags away
            continue
        if tag:
            tags.append(tag)
        elif is_denied(folder):
            denied.append(name)
    return tags, tuple(denied)


def tag_folder(folder: Path) -> TagFolder | None:
    """A folder as a tag; None for one without a file of DeepSpeed's."""
    files = tuple(sorted(name for name in names_in(folder) if parse_name(name)))
    universal = is_folder(folder / UNIVERSAL)
    if not files and not universal:
        return None
    states = [state for name in files if (state := _state(folder / name))]
    return TagFolder(
        name=folder.name,
        path=folder,
        files=files,
        size=sum(state.st_size for state in states),
        modified=max((state.st_mtime for state in states), default=folder.stat().st_mtime),
        universal=universal,
    )


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _parameters(path: Path, pickles: Pickles) -> Iterator[Parameter]:
    _readable(path)
    for name in names_in(path):
        if is_folder(path / name):
            _readable(path / name)
            files = sorted(each for each in names_in(path / name) if each.endswith(".pt"))
            yield Parameter(name=name, files=tuple(read_archive(path / name / each, pickles) for each in files))


def _first_line(path: Path) -> str | None:
    """What DeepSpeed reads of such a file: all of it, stripped."""
    try:
        return read_limited(path, LONGEST_TAG).decode("utf-8", "backslashreplace").strip()
    except (FileNotFoundError, IsADirectoryError):
        # DeepSpeed asks whether it is a file
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="ls -l shows whose it is") from error
