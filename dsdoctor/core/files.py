"""The one way in which a file that a user names is written: under an unpredictable hidden name beside it, then renamed.

Whoever may write in that folder too can plant links there: none is written through, and one at the name itself is replaced.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PUBLIC, PRIVATE = 0o644, 0o600
"""The mode from the first moment on, less what the umask takes away: never writable by others."""

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
EXISTING = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
PASSED_ON = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""A folder that may be written to and not be read is enough."""


@contextmanager
def replacing(path: Path, *, mode: int = PUBLIC) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends without an error, and leaves nothing otherwise.

    A pipe or a device (/dev/stdout) is written to as it is. An OSError names ``path``. After a kill the hidden file may be left.
    """
    with _named(path):
        if _is_stream(path):
            with os.fdopen(os.open(path, EXISTING), "wb") as stream:
                yield stream
            return
        with _folder_of(path) as folder:
            hidden = f".dsdoctor-{secrets.token_hex(8)}.tmp"
            try:
                with os.fdopen(os.open(hidden, NEW, mode, dir_fd=folder), "w+b") as file:
                    yield file
                    file.flush()
                    # a network file system says only now that it is full
                    os.fsync(file.fileno())
                os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(hidden, dir_fd=folder)
                raise


def write_bytes(path: Path, content: bytes, *, mode: int = PUBLIC) -> None:
    """Write a whole file as ``replacing`` does."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_text(path: Path, text: str, *, mode: int = PUBLIC, errors: str = "strict") -> None:
    """Write a whole file as ``replacing`` does, in UTF-8."""
    write_bytes(path, text.encode("utf-8", errors), mode=mode)


def open_new(path: Path, *, mode: int = PUBLIC) -> BinaryIO:
    """An empty file in place of ``path``, to be filled while others read it: a log, a trace."""
    with _named(path), _folder_of(path) as folder:
        hidden = f".dsdoctor-{secrets.token_hex(8)}.tmp"
        number = os.open(hidden, NEW, mode, dir_fd=folder)
        try:
            os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.close(number)
            os.unlink(hidden, dir_fd=folder)
            raise
    return os.fdopen(number, "wb")


def append_text(path: Path, text: str, *, mode: int = PUBLIC) -> None:
    """Add to the end of a file, in UTF-8. A link is followed where it is this user's own; another's raises OSError."""
    with _named(path):
        new = 0 if _is_stream(path) else os.O_CREAT | os.O_NOFOLLOW
        target = path.resolve() if new and _is_own_link(path) else path
        with os.fdopen(os.open(target, EXISTING | new, mode), "ab") as file:
            file.write(text.encode())


@contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """The folder of a path, held open: a folder that is exchanged meanwhile changes nothing."""
    number = os.open(path.parent, PASSED_ON)
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors that name no file, or only the hidden one, name ``path``."""
    try:
        yield
    except OSError as error:
        ours = str(error.filename).startswith(".dsdoctor-") or str(error.filename) == str(path.parent)
        if error.errno is None or (error.filename is not None and not ours):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_stream(path: Path) -> bool:
    """Whether a path is no file that could be replaced: something in /dev or /proc, or this user's own pipe."""
    if re.match(r"/(dev(?!/shm)|proc)/", str(path.absolute())) and path.exists():
        return True
    try:
        state = path.lstat()
    except OSError:
        return False
    return stat.S_ISFIFO(state.st_mode) and state.st_uid == os.geteuid()


def _is_own_link(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:
        return False
    return stat.S_ISLNK(state.st_mode) and state.st_uid == os.geteuid()
