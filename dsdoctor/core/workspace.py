"""The private folders a build works in: made with mode 0700, removed at the end, also those of a build that was killed.

What locks is imported where a folder is made: every command asks this file where the cache is, and few work in it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.files import is_this_user, make_folder
from dsdoctor.core.host import Host
from dsdoctor.core.trust import Distrusted, distrust, trusted


def cache_folder(host: Host) -> Path:
    """Where sdists, assembled toolkits, logs and running builds lie: $DSDOCTOR_CACHE, else the user's cache folder."""
    named = host.variable("DSDOCTOR_CACHE")
    if not named:
        from platformdirs import user_cache_path

        try:
            return user_cache_path("dsdoctor")
        except RuntimeError:
            raise ImpossiblePlan(
                "this user has no home folder", hint="export DSDOCTOR_CACHE=/a/folder/you/own"
            ) from None
    # os.path.expanduser leaves an unknown user as it is, where Path.expanduser raises
    return Path(os.path.expanduser(named)).absolute()  # noqa: PTH111


LOCK = ".lock"
ATTEMPTS = 100
FIXED = Path("/tmp")
TEMPORARY = ("/tmp", "/var/tmp")
TEMPORARY_VARIABLES = ("TMPDIR", "TMP", "TEMP")


@contextmanager
def workspace(cache: Path) -> Iterator[Path]:
    """A fresh folder for one build, removed whatever happens. Raises ImpossiblePlan when the cache is not writable."""
    from filelock import FileLock

    builds = private_folder(cache / "builds", "*")
    folder = builds / uuid.uuid4().hex
    held = FileLock(folder / LOCK, mode=0o600)
    try:
        with FileLock(builds / LOCK, mode=0o600):
            _sweep(builds)
            folder.mkdir(mode=0o700)
            held.acquire()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        held.release()


@contextmanager
def fixed_folder(name: str, *, say: Callable[[str], None]) -> Iterator[Path | None]:
    """An empty folder whose path is the same for every user, cache and hour; None where it cannot be had.

    One build at a time has it. nvcc puts a digest of a source's real path into the names of what the source keeps to itself.
    """
    folder = FIXED / f"dsdoctor-{name}"
    lock = _locked(folder, say)
    if lock is None:
        yield None
        return
    try:
        for left in folder.iterdir():
            if left.name != LOCK:
                shutil.rmtree(left, ignore_errors=True)
        yield folder
    finally:
        # the name goes while the lock is held: who waits for it looks again
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path, say: Callable[[str], None]) -> int | None:
    """The locked file of a folder that is this user's alone; None for another's."""
    for _ in range(ATTEMPTS):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            seen = folder.lstat()
            if not stat.S_ISDIR(seen.st_mode) or not is_this_user(seen.st_uid) or seen.st_mode & 0o077:
                return None
            if distrust(folder) is not None:
                # a /tmp without the sticky bit: another could put a folder in its place
                return None
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            # whoever had it has just removed it
            continue
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build of this DeepSpeed for this torch: it has {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if (folder / LOCK).stat().st_ino == os.fstat(lock).st_ino:
                return lock
        os.close(lock)
    return None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A private folder for temporary files, removed at the end: below TMPDIR, or /tmp or /var/tmp where others could put another
    folder in its place there. Raises ImpossiblePlan where they could everywhere, OSError where there is no room."""
    with ExitStack() as kept:
        refusals: list[str] = []
        for place in dict.fromkeys((tempfile.gettempdir(), *TEMPORARY)):
            if refusals and not Path(place).is_dir():
                continue
            made = kept.enter_context(tempfile.TemporaryDirectory(prefix="dsdoctor-", dir=place))
            try:
                real = trusted(Path(made))
            except Distrusted as refusal:
                refusals.append(str(refusal))
            else:
                if real is not None:
                    yield real
                    return
        raise ImpossiblePlan(
            f"no folder for temporary files can be used: {' '.join(refusals[:1])}",
            hint="export TMPDIR=/a/folder/you/own",
        )


def trusted_temporary(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment whose temporary files lie where nobody else could put others in their place: the variables that name another
    folder are left out. Raises ImpossiblePlan where that is so of /tmp and /var/tmp, too."""
    refused = {name for name in TEMPORARY_VARIABLES if name in environment and is_exchanged(environment[name])}
    left = {name: value for name, value in environment.items() if name not in refused}
    if any(name in left for name in TEMPORARY_VARIABLES):
        return left
    place = next((place for place in TEMPORARY if not is_exchanged(place)), None)
    if place is None:
        raise ImpossiblePlan(
            "no folder for temporary files can be used: others could replace what a compiler writes there",
            hint="export TMPDIR=/a/folder/you/own",
        )
    return left if place == TEMPORARY[0] else left | {TEMPORARY_VARIABLES[0]: place}


def is_exchanged(place: str) -> bool:
    """Whether others could put a file of theirs in the place of one in a folder, which may be one with the sticky bit."""
    return distrust(Path(place) / uuid.uuid4().hex) is not None


def log_folder(cache: Path) -> Path:
    """A fresh folder for one build's logs, named after the time; it stays."""
    return private_folder(cache / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}")


def private_folder(folder: Path, inside: str = "") -> Path:
    """Make a folder that only this user may enter, and return the path without links that leads to it. Raises ImpossiblePlan
    when that cannot be done.

    ``inside`` is a pattern of what lies in it and is used: that must be this user's own as well.
    """
    try:
        make_folder(folder, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {folder}")
    except OSError as error:
        raise ImpossiblePlan(
            f"the cache folder cannot be written: {error}", hint="export DSDOCTOR_CACHE=/a/folder/you/own"
        ) from None
    try:
        real = trusted(folder, inside)
    except Distrusted as refusal:
        raise untrusted(str(refusal)) from None
    if real is None:
        raise untrusted(f"{folder} was removed during the inspection")
    return real


def untrusted(why: str) -> ImpossiblePlan:
    """The cache cannot be used: others may put there what would be run."""
    return ImpossiblePlan(f"the cache is not used: {why}", hint="export DSDOCTOR_CACHE=/a/folder/you/own")


def _sweep(builds: Path) -> None:
    """Remove what killed builds left behind: theirs are the folders that nobody holds the lock of."""
    from filelock import FileLock, Timeout

    for folder in filter(Path.is_dir, builds.iterdir()):
        lock = FileLock(folder / LOCK, mode=0o600, timeout=0)
        try:
            with lock:
                shutil.rmtree(folder, ignore_errors=True)
        except (Timeout, OSError):
            continue
