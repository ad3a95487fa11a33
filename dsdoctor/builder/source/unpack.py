"""An sdist, .tar.gz or .zip -> its single top folder. Nothing is written outside of it, through a link, or without end.

The members are written here and not by ``tarfile.extractall``: Debian 12's Python 3.11.2 has no filters, and the filters of later
releases were passed by links that lead through other links.
"""

import errno
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from dsdoctor.core.errors import DoctorError, UsageError, is_full

LARGEST = 2 << 30
MOST_FILES = 200_000
"""DeepSpeed's sdist has 1,100 files and 10 MB, its whole repository 100 MB."""

DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, ValueError, OverflowError, RuntimeError, NotImplementedError, KeyError),
)
"""What tarfile and zipfile raise for a damaged archive; RuntimeError is zipfile's for one with a password."""

SOURCES = "a DeepSpeed source can be"
Parts = tuple[str, ...]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an sdist's single top folder as ``folder``. Raises UsageError for what is not an sdist, or would write outside."""
    staging = folder.with_name(f".{folder.name}.unpack")
    staging.mkdir(parents=True)
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, staging)
        else:
            _untar(archive, staging, SOURCES)
        tops = [path for path in staging.iterdir() if path.is_dir()]
        if len(tops) != 1:
            raise UsageError(f"{archive} is not an sdist: it holds {len(tops)} top folders, an sdist holds one")
        tops[0].replace(folder)
    except DoctorError:
        raise
    except DAMAGE as error:
        if is_full(error):
            raise
        raise UsageError(
            f"{archive} is not a readable sdist: {error}",
            hint="fetch it again: python -m pip download --no-deps deepspeed",
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def untar(archive: Path, folder: Path, *, largest: int, most: str) -> None:
    """Unpack any .tar.gz or .tar.xz into an existing folder. ``largest``: the bytes that it may unpack to; ``most``: who has so
    much at most, for the message.

    Raises UsageError for a damaged archive, one that would write outside, and one without end.
    """
    try:
        _untar(archive, folder, most, largest)
    except DoctorError:
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise UsageError(f"{archive} is not a readable archive: {error}", hint="fetch it again") from None


def _unzip(archive: Path, staging: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        _refuse_too_large(archive, len(file.infolist()), sum(entry.file_size for entry in file.infolist()), SOURCES)
        for name in file.namelist():
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise UsageError(f"{archive} holds {name!r}, which lies outside of it")
        file.extractall(staging)  # noqa: S202 - every name was checked above, and zipfile writes no links


def _untar(archive: Path, staging: Path, most: str, largest: int = LARGEST) -> None:
    with tarfile.open(archive) as tar:
        members = list(_within_limits(tar, archive, most, largest))
        links = {_parts(member) for member in members if member.issym()}
        for member in members:
            if not _stays_inside(member, links):
                raise UsageError(f"{archive} holds {member.name!r}, which reaches outside of it or is not a file")
        for member in members:
            _write(tar, member, staging)


def _within_limits(tar: tarfile.TarFile, archive: Path, most: str, largest: int) -> Iterator[tarfile.TarInfo]:
    """The members; the first that is too much ends it, before its bytes are unpacked."""
    total = 0
    for count, member in enumerate(tar, 1):
        total += max(0, member.size)
        _refuse_too_large(archive, count, total, most, largest)
        yield member


def _refuse_too_large(archive: Path, count: int, total: int, most: str, largest: int = LARGEST) -> None:
    if count > MOST_FILES or total > largest:
        raise UsageError(
            f"{archive} unpacks to at least {count:,} files of {total:,} bytes, more than {most}",
            hint="name an sdist of DeepSpeed, or a folder" if most == SOURCES else "fetch it again",
        )


def _parts(member: tarfile.TarInfo) -> Parts:
    return PurePosixPath(member.name).parts


def _stays_inside(member: tarfile.TarInfo, links: Collection[Parts]) -> bool:
    """Whether a member is a file, a folder or a link that stays inside, and does not lie behind a link."""
    parts = _parts(member)
    if member.name.startswith("/") or ".." in parts or any(parts[:depth] in links for depth in range(1, len(parts))):
        return False
    if member.issym():
        return len(parts) > 1 and leads_inside(parts[:-1], member.linkname, links)
    if member.islnk():
        target = PurePosixPath(member.linkname).parts
        return leads_inside((), member.linkname, links) and ".." not in target and target not in links
    return member.isfile() or member.isdir()


def leads_inside(folder: Parts, target: str, links: Collection[Parts]) -> bool:
    """Whether a link's target stays below the top folder, and is not reached through another link.

    >>> leads_inside(("top", "a"), "../b", ())
    True
    >>> leads_inside(("top", "a"), "../../b", ()), leads_inside(("top",), "a/../x", {("top", "a")})
    (False, False)
    """
    if target.startswith("/"):
        return False
    place = list(folder)
    for part in PurePosixPath(target).parts:
        if tuple(place) in links:
            return False
        if part != "..":
            place.append(part)
        elif place:
            place.pop()
        if not place:
            return False
    return True


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, staging: Path) -> None:
    """One checked member. Owner and special modes are not taken over; times are, which decide what a build makes anew."""
    target = staging / member.name
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if member.issym():
        target.symlink_to(member.linkname)
        return
    if member.islnk():
        # not a copy: many links to one large file would be more than the limit allows
        target.hardlink_to(staging / member.linkname)
        return
    source = tar.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name!r} has no content")
    with source, target.open("xb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(target, (member.mtime, member.mtime))
