"""The only door to the machine: files, variables, commands. Nothing else starts a process or reads the environment.

``Host`` is what can be asked; ``LocalHost`` is this machine, or a folder that plays one. ``dsdoctor.core.snapshot`` writes
down what was asked and answered, and answers from such a record.

What a child prints is read until it has ended, and never waits for whoever else holds its pipes: a compiler wrapper may start a
server that stays (sccache, an nvcc with a daemon), which inherits the pipes, and their end never comes.
"""

import errno
import functools
import itertools
import os
import re
import selectors
import shutil
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dsdoctor.core.files import open_file, real_path
from dsdoctor.core.processes import FileHolder, SharedMemory, end_session, holder_of, look_shared_memory
from dsdoctor.core.trust import distrust

CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.05
"""Seconds between two looks at whether the child has ended, while nothing comes. A pipe that is closed is seen at once."""
GRACE_SECONDS = 0.25
"""Seconds without output, after the end of a child, that are the end of its output. What is in a pipe by then is read."""
MAX_READ_BYTES = 8 * 1024 * 1024
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Bytes of what a command prints that are kept: a tool that is asked something prints kilobytes, listings of GPU code some MB."""
CHILD_SCRIPTS = Path(__file__).parents[1] / "child_scripts"


class TooLate(Exception):
    """The child did not end in time."""


def chunks(process: "subprocess.Popen[bytes]", *, deadline: float | None = None) -> Iterator[tuple[int, bytes]]:
    """What the child prints: 1 or 2 for its stdout or stderr, and some bytes. Ends when the child has, or has closed both.

    Raises TooLate at ``deadline`` (``time.monotonic()``).
    """
    silent_since: float | None = None
    with selectors.DefaultSelector() as selector:
        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(POLL_SECONDS)
            for key, _ in ready:
                if data := os.read(key.fd, CHUNK_BYTES):
                    yield key.data, data
                else:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if ready or not has_ended(process.pid):
                silent_since = None
            else:
                silent_since = silent_since or now
                if now - silent_since >= GRACE_SECONDS:
                    return
            if deadline is not None and now >= deadline:
                raise TooLate


def lines(process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """The same by lines, without their ends, stdout and stderr as they come. The last one needs no end.

    Of a line beyond ``MAX_ANSWER_BYTES`` bytes the beginning is kept, and the rest is read and dropped, as ``run`` does.
    """
    line = bytearray()
    for _, data in chunks(process):
        continued, *begun = data.split(b"\n")
        line += continued[: MAX_ANSWER_BYTES - len(line)]
        for each in begun:
            yield bytes(line)
            line = bytearray(each)
    if line:
        yield bytes(line)


def has_ended(pid: int) -> bool:
    """Whether a child of ours has ended. It is not reaped: its exit status stays for who waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command answered. ``returncode`` is None when it ran past its time limit, 127 when it is not there."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with success."""
        return self.returncode == 0


@dataclass(frozen=True, kw_only=True)
class Completed:
    """How long work ended: its exit status (negative for a signal), and what it and its children took.

    ``cpu_seconds`` is user and system time of all, ``peak_memory`` the bytes of the largest single process.
    """

    status: int
    cpu_seconds: float
    peak_memory: int


class Host(Protocol):
    """A machine that can be asked. Paths are absolute; every question is answered, with None where nothing is there."""

    def variable(self, name: str) -> str | None:
        """An environment variable."""

    def variables(self, prefix: str) -> dict[str, str]:
        """The environment variables whose names begin with ``prefix``."""

    def names(self, prefix: str) -> tuple[str, ...]:
        """The names alone of the environment variables that begin with ``prefix``: their values may be secrets."""

    def read(self, path: str) -> str | None:
        """The text of a file (its first 8 MiB), None when it cannot be read."""

    def search(self, path: str, pattern: str, *, most: int = 64) -> str:
        """The parts of a file (its first 8 MiB) that match a regular expression, a line each; "^" begins a line.

        For files of others: a snapshot then holds the facts in them, and not the files.
        """

    def glob(self, pattern: str) -> tuple[str, ...]:
        """The existing paths that match, sorted."""

    def exists(self, path: str) -> bool:
        """Whether a path leads somewhere."""

    def age(self, path: str) -> float | None:
        """Seconds since a file was last written."""

    def holder(self, path: str) -> FileHolder | None:
        """Which process has a file open; None where there is no such file (any more)."""

    def shared_memory(self, folder: str) -> SharedMemory | None:
        """What is left in a folder as /dev/shm of segments that no process uses; None where there is no such folder."""

    def writable(self, path: str) -> bool:
        """Whether this user may write to a folder, or make it."""

    def which(self, name: str) -> str | None:
        """The program that PATH gives for a name."""

    def resolve(self, path: str) -> str:
        """The path with every symbolic link followed."""

    def free(self, path: str) -> int | None:
        """Free bytes for this user on the file system of ``path`` (or of its nearest existing parent)."""

    def distrust(self, path: str, inside: str = "", *, existing: bool = False) -> str | None:
        """Why nothing in a folder, or what a pattern names inside of it, is to be run: others may write there (``core.trust``).

        ``existing``: that there is no such folder is a reason, too.
        """

    def cpus(self) -> int:
        """Processors that this process may use."""

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
        """Ask a command, with variables added to the environment."""

    def ask(self, python: str, script: str, *arguments: str, timeout: float) -> Answer:
        """Run one of the scripts of ``dsdoctor/child_scripts`` with an interpreter; it answers with one JSON line."""

    def stop(self) -> None:
        """End everything that is being asked, and whatever is asked from now on."""


def _with_own_path(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment whose PATH leads a child to no program of the current folder, which anybody may have put there.

    >>> _with_own_path({"PATH": ":/usr/bin:.:bin:/bin", "A": "."})
    {'PATH': '/usr/bin:/bin', 'A': '.'}
    """
    listed = environment.get("PATH")
    if listed is None:
        return dict(environment)
    return {**environment, "PATH": ":".join(each for each in listed.split(":") if each.startswith("/"))}


def _with_own_temporary(environment: dict[str, str]) -> dict[str, str]:
    """An environment without the folders for temporary files in which others could exchange what a child writes."""
    named = [name for name in ("TMPDIR", "TMP", "TEMP") if name in environment]
    if not named:
        return environment
    refused = {name for name in named if distrust(Path(environment[name]) / uuid.uuid4().hex) is not None}
    return {name: value for name, value in environment.items() if name not in refused}


class LocalHost:
    """This machine; with ``root``, a folder that plays one: absolute paths are looked up below it, for tests."""

    def __init__(self, *, root: str | os.PathLike[str] = "/", env: Mapping[str, str] | None = None) -> None:
        self._root = real_path(root)
        self._env = dict(os.environ if env is None else env)
        self._running: set[int] = set()
        self._stopped = threading.Event()

    def variable(self, name: str) -> str | None:
        value = self._env.get(name)
        return None if value is None else _readable(value)

    def variables(self, prefix: str) -> dict[str, str]:
        return {_readable(k): _readable(v) for k, v in sorted(self._env.items()) if k.startswith(prefix)}

    def names(self, prefix: str) -> tuple[str, ...]:
        return tuple(self.variables(prefix))

    def environment(self) -> dict[str, str]:
        """The whole environment, as the base of a child's: never recorded, never printed."""
        return _with_own_path(self._env)

    def read(self, path: str) -> str | None:
        try:
            # a FIFO without a writer, or a device, would keep whoever opens it waiting
            handle = os.open(self._inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            with open_file(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                return file.read(MAX_READ_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def search(self, path: str, pattern: str, *, most: int = 64) -> str:
        found = re.finditer(pattern, self.read(path) or "", re.MULTILINE)
        return "\n".join(match[0] for match in itertools.islice(found, most))

    def glob(self, pattern: str) -> tuple[str, ...]:
        try:
            found = sorted(Path("/").glob(self._inside(pattern).lstrip("/")))
        except (OSError, ValueError):
            return ()
        return tuple(_readable(self._outside(str(path))) for path in found if _is_there(path))

    def exists(self, path: str) -> bool:
        return _is_there(Path(self._inside(path)))

    def age(self, path: str) -> float | None:
        try:
            return max(0.0, time.time() - Path(self._inside(path)).stat().st_mtime)
        except (OSError, ValueError):
            return None

    def holder(self, path: str) -> FileHolder | None:
        return holder_of(self._inside(path))

    def shared_memory(self, folder: str) -> SharedMemory | None:
        found = look_shared_memory(self._inside(folder))
        left = tuple(replace(each, path=self._outside(each.path)) for each in found.leftovers) if found else ()
        return replace(found, leftovers=left) if found else None

    def writable(self, path: str) -> bool:
        place = Path(self._inside(path))
        while not _is_there(place) and place != place.parent:
            place = place.parent
        return os.access(place, os.W_OK | os.X_OK)

    def which(self, name: str) -> str | None:
        for folder in (self._env.get("PATH") or "").split(":"):
            candidate = f"{folder}/{name}"
            if folder.startswith("/") and _executable(self._inside(candidate)):
                return candidate
        return None

    def resolve(self, path: str) -> str:
        try:
            return self._outside(os.path.realpath(self._inside(path)))
        except (OSError, ValueError):
            return path

    def free(self, path: str) -> int | None:
        place = Path(self._inside(path))
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            return shutil.disk_usage(place).free
        except OSError:
            return None

    def distrust(self, path: str, inside: str = "", *, existing: bool = False) -> str | None:
        return distrust(Path(self._inside(path)), inside, existing=existing)

    def cpus(self) -> int:
        return len(os.sched_getaffinity(0))

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
        try:
            process = subprocess.Popen(
                [self._inside(argv[0]), *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_with_own_temporary({**_with_own_path(self._env), **(env or {})}),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return Answer(returncode=127, stderr=str(error))
        self._begin(process.pid)
        try:
            return _answer(process, timeout)
        except TooLate:
            return Answer(returncode=None, stderr=f"no answer within {timeout:g} s")
        finally:
            # on the way out by an exception, too, nothing of ours is left
            if process.poll() is None:
                end_session(process.pid)
                process.wait()
            self._running.discard(process.pid)
            _close(process)

    def ask(self, python: str, script: str, *arguments: str, timeout: float) -> Answer:
        return self.run([python, str(CHILD_SCRIPTS / script), *arguments], timeout=timeout)

    def stream(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
        """Run long work as ``work`` does; the exit status alone."""
        return self.work(argv, cwd=cwd, env=env, on_line=on_line).status

    def work(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        stdin: int = subprocess.DEVNULL,
    ) -> Completed:
        """Run long work and hand over each line as it comes (stdout and stderr together).

        ``env`` is the whole environment, ``stdin`` a file descriptor. ``stop`` from another thread, any exception here, and the
        end of this process, by kill -9 too, end the whole session. Raises FileNotFoundError for a program that is not there.
        """
        if shutil.which(argv[0], path=env.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
        pipe = _closes_with_us()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD_SCRIPTS / "end_with_parent.py"), str(pipe), *argv],
            pass_fds=(pipe,),
            cwd=cwd,
            env=dict(env),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._begin(process.pid)
        try:
            for line in lines(process):
                on_line(_text(line))
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            return Completed(
                status=process.returncode, cpu_seconds=used.ru_utime + used.ru_stime, peak_memory=used.ru_maxrss * 1024
            )
        finally:
            self._running.discard(process.pid)
            if process.poll() is None:
                end_session(process.pid)
                process.wait()
            _close(process)

    def leave_running(self, argv: Sequence[str]) -> None:
        """Start a process that outlives this one: a session of its own, of our streams only stderr. It has to make itself
        nobody's child by a fork, and to leave its first process at once: for that one is waited. Raises OSError."""
        process = subprocess.Popen(
            list(argv),
            env=self._env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.wait()

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called: work that ended by a signal since then was ended by us."""
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()
        for pid in tuple(self._running):
            end_session(pid)

    def _begin(self, pid: int) -> None:
        self._running.add(pid)
        if self._stopped.is_set():
            end_session(pid)

    def _inside(self, path: str) -> str:
        if self._root == "/" or not path.startswith("/"):
            return path
        return self._root + path

    def _outside(self, path: str) -> str:
        if self._root == "/" or not path.startswith(self._root):
            return path
        return path[len(self._root) :] or "/"


@functools.cache
def _closes_with_us() -> int:
    """The reading end of a pipe whose writing end nobody else holds, and nobody closes: its end is the end of this process."""
    reading, _ = os.pipe()
    return reading


def _answer(process: "subprocess.Popen[bytes]", timeout: float) -> Answer:
    """What a child answers, each stream up to a limit; what comes after that is read and dropped. Raises TooLate."""
    deadline = time.monotonic() + timeout
    kept = {1: bytearray(), 2: bytearray()}
    for number, data in chunks(process, deadline=deadline):
        room = MAX_ANSWER_BYTES - len(kept[number])
        kept[number] += data[:room]
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TooLate from None
    return Answer(returncode=status, stdout=_text(bytes(kept[1])), stderr=_text(bytes(kept[2])))


def _close(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _readable(value: str) -> str:
    """Text of the environment with what is no UTF-8 replaced: it goes into documents."""
    return value.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _is_there(path: Path) -> bool:
    """Whether a path leads somewhere: a dangling link does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _executable(path: str) -> bool:
    try:
        return Path(path).is_file() and os.access(path, os.X_OK)
    except (OSError, ValueError):
        return False
