"""What else takes room below the cache folder: assembled toolkits, DeepSpeed's archives, environments made for targets."""

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsdoctor.core.trust import distrust

KINDS = ("toolkits", "sdists", "targets")
NVCC = "home/bin/nvcc"
SHELTERED = 2 * 3600.0
"""Seconds after its last use in which nothing is removed for its age or size: a build may be at work with it."""


@dataclass(frozen=True, kw_only=True)
class StoredFolder:
    """One of them: ``used`` is in seconds since 1970, ``size`` in bytes. ``facts`` is there for the lines of the op cache."""

    kind: str
    name: str
    folder: str
    size: int
    used: float
    facts: dict[str, Any] = field(default_factory=dict)


def stored_folders(cache: Path) -> tuple[StoredFolder, ...]:
    """All of them, the last used first. Folders that others may write to are left alone."""
    found = [entry for kind in KINDS for entry in _of_kind(cache / kind, kind)]
    return tuple(sorted(found, key=lambda entry: entry.used, reverse=True))


def remove_folder(entry: StoredFolder) -> bool:
    """Remove one, and what is recorded of it: it has gone from its place at once, or is still there as it was."""
    path = Path(entry.folder)
    aside = path.with_name(f".{uuid.uuid4().hex}.removed")
    try:
        path.rename(aside)
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)
    except OSError:
        return False
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
    return True


def _of_kind(folder: Path, kind: str) -> Iterator[StoredFolder]:
    if not folder.is_dir() or distrust(folder) is not None:
        return
    for path in folder.iterdir():
        if path.name.startswith(".") or path.is_symlink() or path.suffix in {".lock", ".json"}:
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
