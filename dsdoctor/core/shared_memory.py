"""A folder of shared memory -> the segments that no process uses, and what keeps one from being sure of that. Looks, never judges.

What it tells is all that it read: no line of another process's maps leaves this file.
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.file_holders import FIRST_NAMESPACE, namespace

SEGMENT = re.compile(r"(?:deepspeed_|nccl-|torch_(?P<maker>\d+)_)[\w.:-]+", re.ASCII)
"""DeepSpeed's collectives on the CPU (csrc/cpu/comm/shm.cpp), NCCL, and torch's tensors in shared memory, whose name begins with
the process that made it (c10's NewProcessWideShmHandle)."""
STARTING = 60.0
"""Seconds: a younger segment may belong to a run that is just starting."""
BLOCK = 512
OTHERS = 0o066
"""The bits of a file's mode that let others open it."""


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


Identity = tuple[int, int]
"""A file, whatever it is called where it is mounted: its device and its number there."""


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
    return state if time.time() - state.st_mtime > STARTING else None


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
    if state.st_uid in hidden or (hidden and state.st_mode & OTHERS):
        return "not every process that may open it shows what it has mapped"
    if namespace() != FIRST_NAMESPACE:
        return "this is a container, and a process outside of it may use it"
    return ""
