"""Processes that we start, the files that processes hold open, and shared memory that none uses any more. Standard library alone.

A fork dies with its parent, and a session is ended whole. For a file, and for a segment in a folder of shared memory: which process
has it open, and what keeps one from being sure that nobody has. No line of another process's maps leaves this file.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.files import open_file, real_path

PR_SET_PDEATHSIG = 1
STARTTIME = 19
"""Where the 22nd field of /proc/PID/stat stands behind the name."""
LETTERS = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device, and cannot be interrupted",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, but not reaped",
    "X": "dead",
}
MAX_SWEEPS = 20
"""How often to look again: a process may fork while it is being ended."""
FIRST_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the process numbers of the whole machine, and not of a container."""
OF_SEVERAL_MACHINES = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "glusterfs",
    "9p",
    "virtiofs",
    "fuse",
    "afs",
)
OF_A_CONTAINER = ("overlay", "aufs")
RETRY_SECONDS = 0.1
"""Seconds after which a file that nobody holds is looked at again: one that is given back is closed before it is removed."""
SEGMENT = re.compile(r"(?:deepspeed_|nccl-|torch_(?P<maker>\d+)_)[\w.:-]+", re.ASCII)
"""DeepSpeed's collectives on the CPU (csrc/cpu/comm/shm.cpp), NCCL, and torch's tensors in shared memory, whose name begins with
the process that made it (c10's NewProcessWideShmHandle)."""
STARTING_SECONDS = 60.0
"""Seconds: a younger segment may belong to a run that is just starting."""
BLOCK = 512
OPEN_TO_OTHERS = 0o066
"""The bits of a file's mode that let others open it."""
Identity = tuple[int, int]
"""A file, whatever it is called where it is mounted: its device and its number there."""


def whole_number(text: str) -> int | None:
    """A number as a variable of the environment gives it, of nine digits at most; None for anything else.

    >>> [whole_number(text) for text in ("80", "", "-1", "\u00b2", "9" * 5000)]
    [80, None, None, None, None]
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def fork(main: Callable[[], None]) -> int:
    """Run ``main`` in a child that is killed when this process dies; returns its pid. Nothing of the parent's stack runs in
    the child: it leaves by ``os._exit`` with 0, with the status of a SystemExit, or 1 after an exception that is printed to
    its stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with(parent)
        main()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (prctl(2)); a parent that is gone already ends it now."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def age() -> float:
    """Seconds since this process was started, imports and all, by the kernel's clock; 0 where it does not tell (proc(5))."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - int(stat.rpartition(")")[2].split()[STARTTIME]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def redirect(path: Path) -> None:
    """Send this process's stdout and stderr to a file, whatever writes to them."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def state_of(pid: int) -> str:
    """The kernel's letter for a process ("S", "T" ...), "" where there is none (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return parse_state(stat)


def parse_state(stat: str) -> str:
    """The third field of /proc/PID/stat; the second is a name in brackets that may hold anything.

    >>> parse_state("4711 (a) b) T 1 4711")
    'T'
    """
    return stat.rpartition(")")[2].strip()[:1]


def ending_of(status: int) -> str | None:
    """How a process died, in words, from its wait status; None for success.

    >>> ending_of(9), ending_of(256), ending_of(0)
    ('killed by SIGKILL', 'exit status 1', None)
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    code = os.WEXITSTATUS(status)
    return f"exit status {code}" if code else None


def wait_until(condition: Callable[[], bool], seconds: float, *, pause: float = 0.05) -> bool:
    """Whether a condition holds, now or within so many seconds. ``pause``: between two looks.

    >>> wait_until(lambda: True, 0.0), wait_until(lambda: False, 0.01, pause=0.01)
    (True, False)
    """
    last = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= last:
            return False
        time.sleep(pause)
    return True


def end_session(session: int) -> None:
    """Kill every process of a session that we started: a member may have a process group of its own.

    The leader goes last: it waits for its children, and who else would reap them may take its time.
    """
    for _ in range(MAX_SWEEPS):
        members = [pid for pid in _pids() if _session_of(pid) == session and pid != session]
        if not members:
            break
        for pid in members:
            _kill(os.kill, pid)
    _kill(os.killpg, session)


def _pids() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(number, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class FileHolder:
    """``pid``: a process that has the file open. ``doubt``: why it may be open although none is seen; "" where that is sure."""

    pid: int | None = None
    doubt: str = "it was not inspected"


def holder_of(path: str) -> FileHolder | None:
    """None where there is no such file (any more)."""
    for again in (False, True):
        try:
            state = os.stat(path)  # noqa: PTH116 - what stands in a rank's way must be quick
        except OSError:
            return None
        pid = process_with(state.st_dev, state.st_ino)
        if pid is not None:
            return FileHolder(pid=pid, doubt="")
        if not again:
            time.sleep(RETRY_SECONDS)
    return FileHolder(doubt=doubt_of(path, state.st_uid))


def doubt_of(path: str, owner: int) -> str:
    """Why a process that has a file open may not be seen from here."""
    if os.geteuid() not in {0, owner}:
        return "it is another user's, whose processes do not show their files"
    kind = file_system_of(path)
    if kind.startswith(OF_SEVERAL_MACHINES):
        return f"it is on {kind}, so a process on another machine may hold it"
    if not kind:
        return "its file system is unknown"
    if not kind.startswith(OF_A_CONTAINER) and namespace() != FIRST_NAMESPACE:
        return "this is a container, so a process outside it may hold it"
    return ""


def process_with(device: int, number: int) -> int | None:
    """A process that has a file open, of those that show theirs."""
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and _has_open(int(name), device, number):
            return int(name)
    return None


def file_system_of(path: str) -> str:
    """The kind of file system that a path lies on, as the kernel calls it; "" where that is not shown."""
    real, best, kind = real_path(path), "", ""
    try:
        with open_file("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                mounted = before.split()[4].encode().decode("unicode_escape")
                inside = real == mounted or real.startswith(mounted.rstrip("/") + "/")
                # of two mounts at one place the later one is seen
                if inside and len(mounted) >= len(best):
                    best, kind = mounted, after.split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
    return kind


def namespace() -> str:
    """Which process numbers this process sees."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""


def _has_open(pid: int, device: int, number: int) -> bool:
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except OSError:
        return False
    for name in names:
        try:
            state = os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116
        except OSError:
            continue
        if (state.st_dev, state.st_ino) == (device, number):
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A segment that no process is seen to use. ``size``: the bytes it takes. ``doubt``: why one may all the same, "" for none."""

    path: str
    size: int
    age: float
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """``total``: bytes of the file system. ``leftovers``: the largest first."""

    total: int
    leftovers: tuple[Leftover, ...] = ()


def look_shared_memory(folder: str) -> SharedMemory | None:
    """What is left in a folder as /dev/shm; None where there is none. Without any old segment, no process is looked at."""
    try:
        disk, names = os.statvfs(folder), os.listdir(folder)  # noqa: PTH208
    except OSError:
        return None
    found = {name: state for name in names if (state := _old_segment(folder, name)) is not None}
    used, hidden = _users({_identity(state) for state in found.values()}, {*found}) if found else (set(), set())
    now = time.time()
    left = [
        Leftover(
            path=f"{folder}/{name}",
            size=state.st_blocks * BLOCK,
            age=now - state.st_mtime,
            doubt=doubt_about(state, hidden),
        )
        for name, state in found.items()
        if _identity(state) not in used
    ]
    return SharedMemory(
        total=disk.f_frsize * disk.f_blocks, leftovers=tuple(sorted(left, key=lambda each: (-each.size, each.path)))
    )


def _old_segment(folder: str, name: str) -> os.stat_result | None:
    """What a file is, if it is a segment of ours to judge: of a name we know, not just made, its maker gone."""
    match = SEGMENT.fullmatch(name)
    # a tensor on its way to another process is mapped by nobody, as long as its maker lives
    if match is None or (match["maker"] and Path(f"/proc/{match['maker']}").exists()):
        return None
    try:
        state = Path(folder, name).lstat()
    except OSError:
        return None
    return state if time.time() - state.st_mtime > STARTING_SECONDS else None


def _identity(state: os.stat_result) -> Identity:
    return state.st_dev, state.st_ino


def _users(wanted: set[Identity], names: set[str]) -> tuple[set[Identity], set[int]]:
    """Those of the files that a process has mapped or open, and the users of whom a process does not show what it has."""
    used: set[Identity] = set()
    hidden: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        process = Path("/proc", name)
        try:
            maps = (process / "maps").read_bytes()
            used.update(_mapped(maps, wanted))
            used.update(_open(process, wanted, names))
        except PermissionError:
            hidden.update(_owner(process))
        except OSError:
            # it has ended
            continue
    return used, hidden


def _owner(process: Path) -> Iterator[int]:
    """Whose it is; nobody's, if it has ended or is a thread of the kernel, which has no memory of its own."""
    try:
        if not (process / "statm").read_text().startswith("0 "):
            yield process.stat().st_uid
    except OSError:
        return


def _mapped(maps: bytes, wanted: set[Identity]) -> Iterator[Identity]:
    numbers = {b"%02x:%02x" % (os.major(device), os.minor(device)): device for device, _ in wanted}
    for line in maps.split(b"\n"):
        # address, permissions, offset, device, number of the file, name
        fields = line.split(None, 5)
        if len(fields) > 4 and (device := numbers.get(fields[3])) is not None and (device, int(fields[4])) in wanted:
            yield device, int(fields[4])


def _open(process: Path, wanted: set[Identity], names: set[str]) -> Iterator[Identity]:
    """A descriptor of a file on a dead server is not asked what it is: that would wait as long as the server is dead."""
    for name in os.listdir(process / "fd"):  # noqa: PTH208
        try:
            if not may_be_segment(os.readlink(process / "fd" / name), names):  # noqa: PTH115
                continue
            state = os.stat(process / "fd" / name)  # noqa: PTH116
        except OSError:
            continue
        if _identity(state) in wanted:
            yield _identity(state)


def may_be_segment(target: str, names: set[str]) -> bool:
    """Whether what a descriptor leads to may be one of these segments, by its path alone: another mount may be elsewhere.

    >>> paths = "/dev/shm/x", "/run/shm/nccl-aB3xYz", "/nccl-gone (deleted)", "/home/x/data", "socket:[7]"
    >>> [may_be_segment(path, {"nccl-aB3xYz"}) for path in paths]
    [True, True, True, False, False]
    """
    return target.startswith("/dev/shm/") or target.endswith(" (deleted)") or target.rpartition("/")[2] in names


def doubt_about(state: os.stat_result, hidden: set[int]) -> str:
    """Why a process that uses a segment may not be seen from here."""
    own = os.geteuid()
    if own not in {0, state.st_uid}:
        return "it is another user's, whose processes do not show what they have mapped"
    if state.st_uid in hidden or (hidden and state.st_mode & OPEN_TO_OTHERS):
        return "not every process that may open it shows what it has mapped"
    if namespace() != FIRST_NAMESPACE:
        return "this is a container, so a process outside it may use it"
    return ""
