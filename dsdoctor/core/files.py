"""The one way in which files are written: under an unpredictable hidden name beside the name, then renamed; and read with a limit.

Whoever may write in that folder too can plant links there: none is written through, and one at the name itself is replaced.
What cannot be written raises NotWritten, an OSError that names the path.

What is made of several files is made in a hidden folder beside its place, on the same disk: removed at the end, also that of a
process that was killed. Nothing that lies in it is run, so the folder around it may be one that others write to, as those of a
cluster's shared disk are.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dsdoctor.core.errors import NotWritten, UsageError

PUBLIC, PRIVATE = 0o644, 0o600
"""The mode from the first moment on, less what the umask takes away: never writable by others."""
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
EXISTING = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
PASSED_ON = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""A folder that may be written to and not be read is enough."""
OWN_STREAM = re.compile(r"/dev/stdin|(/dev/fd|/proc/self/fd)/\d{1,9}", re.ASCII)
MAX_READ_BYTES = 64 << 20
"""A snapshot has a hundredth of it."""
OVERFLOW_NUMBERS = {"uid": Path("/proc/sys/kernel/overflowuid"), "gid": Path("/proc/sys/kernel/overflowgid")}
"""The number that stands for every user, or group, that this user namespace does not map: in a rootless container root of the
host, and every stranger on it."""
DEFAULT_OVERFLOW = 65534
ALL_NUMBERS = (1 << 32) - 1
open_file = io.open
"""As it is before a script runs that we watch: it may put another one in the place of ``open``, and must not see our files."""
MAX_FOLLOWED_LINKS = 20
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_unmapped(kind: str, number: int) -> bool:
    """Whether a number may stand for whoever this user namespace does not map ("uid" or "gid"): then nobody can tell who it is."""
    try:
        overflow = int(OVERFLOW_NUMBERS[kind].read_text(encoding="utf-8"))
        lines = Path(f"/proc/self/{kind}_map").read_text(encoding="utf-8").splitlines()
        mapped = sum(int(line.split()[2]) for line in lines)
    except (OSError, ValueError, IndexError):
        # without /proc this may be such a namespace
        return number == DEFAULT_OVERFLOW
    return number == overflow and mapped < ALL_NUMBERS


def is_this_user(number: int | None) -> bool:
    """Whether an owner is this user. A number that may stand for anybody is nobody's own, not even one's own."""
    return number == os.geteuid() and not is_unmapped("uid", number)


def real_path(path: os.PathLike[str] | str) -> str:
    """The path without links. Python's own raises where a link on the way is exchanged between two looks at it: it is followed
    anew, and taken as it is named where that goes on. Whether the folder can be trusted is asked of what it leads to then."""
    for _ in range(MAX_FOLLOWED_LINKS):
        try:
            return os.path.realpath(path)
        except OSError:
            continue
    return os.path.abspath(path)  # noqa: PTH100


def open_regular(path: Path) -> BinaryIO:
    """Open a file to be read. Raises OSError at once for what is none: a folder, a device, a pipe, which nobody may ever write to.

    A stream of this process, as a shell names it (/dev/stdin, and /dev/fd/63 for what stands in ``<(...)``), is waited for.
    """
    own = OWN_STREAM.fullmatch(str(path)) is not None
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | (0 if own else os.O_NONBLOCK))
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode) or (own and stat.S_ISFIFO(mode)):
        return open_file(number, "rb")
    os.close(number)
    kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(kind, "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file", str(path))


def read_limited(path: Path, most: int = MAX_READ_BYTES) -> bytes:
    """A whole file that a user names. Raises OSError for one that is larger, without reading it, and for what is no file."""
    with open_regular(path) as file:
        content = None if os.fstat(file.fileno()).st_size > most else file.read(most + 1)
        if content is None or len(content) > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return content


def refuse_large(path: Path, named: str, most: int = MAX_READ_BYTES) -> None:
    """Raise UsageError for a file that a child would read whole and that is larger; of a model's folder, for its config.json."""
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.stat().st_size > most:
        raise UsageError(f"{named} is larger than {most >> 20} MiB", hint="name the configuration, not the data")


def check_target(path: Path) -> None:
    """Raise UsageError for a file that could not be written, before anything is done for it."""
    folder = path.absolute().parent
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    elif not _is_stream(path) and not os.access(folder, os.W_OK | os.X_OK):
        why = f"{folder} is not yours to write to"
    if why:
        raise UsageError(f"{path} cannot be written: {why}", hint="choose a file in an existing folder that you own")


def check_folder(folder: Path, option: str) -> None:
    """Raise UsageError for a folder that could neither be made nor written to, before anything is done for it."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "is not yours to write to" if place.is_dir() else "is no folder"
        raise UsageError(f"{folder} cannot be written: {place} {why}", hint=f"name another folder: {option} DIR")


def absolute(path: str) -> str:
    """A path from the root, whether something is there or not; as it is where the current folder has been removed.

    >>> absolute("/a/../b")
    '/b'
    """
    try:
        return os.path.abspath(path)  # noqa: PTH100 - pathlib keeps the dots
    except FileNotFoundError:
        return path


def make_folder(folder: Path, *, mode: int = 0o755) -> None:
    """Make a folder and those above it that are missing, all with that mode: no umask lets others write. Raises NotWritten."""
    with _named(folder):
        missing = [above for above in (folder, *folder.parents) if not above.is_dir()]
        for above in reversed(missing):
            # another process may make it at the same time
            above.mkdir(mode=mode, exist_ok=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """A folder for what the block writes. Where the block fails, those that were made for it go again if they are empty."""
    missing = [above for above in (folder, *folder.parents) if not above.is_dir()]
    make_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for above in missing:
                above.rmdir()
        raise


@contextmanager
def replacing(path: Path, *, mode: int = PUBLIC) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends without an error, and leaves nothing otherwise.

    A pipe or a device (/dev/stdout) is written to as it is. NotWritten names ``path``. After a kill the hidden file may be left.
    """
    with _named(path):
        if _is_stream(path):
            with open_file(os.open(path, EXISTING), "wb") as stream:
                yield stream
            return
        with _folder_of(path) as folder:
            hidden = f".dsdoctor-{os.urandom(8).hex()}.tmp"
            try:
                with open_file(os.open(hidden, NEW, mode, dir_fd=folder), "w+b") as file:
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
        hidden = f".dsdoctor-{os.urandom(8).hex()}.tmp"
        number = os.open(hidden, NEW, mode, dir_fd=folder)
        try:
            os.rename(hidden, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.close(number)
            os.unlink(hidden, dir_fd=folder)
            raise
    return open_file(number, "wb")


def append_text(path: Path, text: str, *, mode: int = PUBLIC) -> None:
    """Add to the end of a file, in UTF-8. A link is followed where it is this user's own; another's, and another's pipe, which
    nobody may ever read, raises NotWritten, and so does a file with a second name, which may be a link to what is not meant."""
    with _named(path):
        is_stream = _is_stream(path)
        target = real_path(path) if not is_stream and _is_own_link(path) else path
        new = 0 if is_stream else os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open_file(os.open(target, EXISTING | new, mode), "ab") as file:
            if not is_stream:
                _refuse_foreign(file.fileno(), path, target)
            file.write(text.encode("utf-8", errors="backslashreplace"))


def _refuse_foreign(number: int, path: Path, target: os.PathLike[str] | str) -> None:
    """Raise NotWritten for an open file that is none, or that is not what its one name still leads to."""
    opened, named = os.fstat(number), os.lstat(target)
    if not stat.S_ISREG(opened.st_mode):
        raise NotWritten(errno.EINVAL, "it is not a regular file", str(path))
    if not os.path.samestat(opened, named) or named.st_nlink > 1:
        raise NotWritten(errno.EMLINK, "it has hard links, or was exchanged", str(path))


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
    """Errors that name no file, or only the hidden one, are about ``path``."""
    try:
        yield
    except OSError as error:
        own_names = {str(path), str(path.parent), *map(str, path.parents)}
        ours = (
            error.filename is None or str(error.filename).startswith(".dsdoctor-") or str(error.filename) in own_names
        )
        if error.errno is None or not ours or isinstance(error, NotWritten):
            raise
        raise NotWritten(error.errno, error.strerror, str(path)) from error


def _is_stream(path: Path) -> bool:
    """Whether a path is no file that could be replaced: something in /dev or /proc, or this user's own pipe."""
    if re.match(r"/(dev(?!/shm)|proc)/", str(path.absolute())) and path.exists():
        return True
    try:
        state = path.lstat()
    except OSError:
        return False
    return stat.S_ISFIFO(state.st_mode) and is_this_user(state.st_uid)


def _is_own_link(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:
        return False
    return stat.S_ISLNK(state.st_mode) and is_this_user(state.st_uid)


@contextmanager
def hidden_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """A fresh folder that only this user may enter. Raises OSError."""
    prefix = f".dsdoctor-{purpose}-"
    sweep(parent, prefix)
    folder, held = held_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def held_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A fresh folder, and its descriptor that holds the lock on it."""
    while True:
        folder = parent / f"{prefix}{os.urandom(8).hex()}"
        folder.mkdir(mode=0o700)
        # another process that sweeps may take a folder that nobody holds yet for what a kill left
        with suppress(FileNotFoundError):
            held = os.open(folder, OPEN)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.path.samestat(os.fstat(held), folder.lstat())
            except (BlockingIOError, FileNotFoundError):
                is_ours = False
            except OSError:  # a file system without locks keeps what a kill leaves
                is_ours = True
            if is_ours:
                return folder, held
            os.close(held)


def _always(_: Path) -> bool:
    return True


def sweep(parent: Path, prefix: str, is_left: Callable[[Path], bool] = _always) -> None:
    """Remove what killed processes of this user left: the folders that nobody holds, and that ``is_left`` takes for such."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            held = os.open(folder, OPEN)
            try:
                if is_this_user(os.fstat(held).st_uid):
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if is_left(folder):
                        shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def sha256_of(path: Path) -> str:
    """The sha256 of a file of any size, in hexadecimal digits."""
    import hashlib  # most commands need none, and its library takes longer to be loaded than they take

    total = hashlib.sha256()
    with open_file(path, "rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()
