"""A file -> which process has it open, and what keeps one from being sure that nobody has. Looks; standard library alone."""

import os
import time
from dataclasses import dataclass

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
AGAIN = 0.1
"""Seconds after which a file that nobody holds is looked at again: one that is given back is closed before it is removed."""


@dataclass(frozen=True, kw_only=True)
class FileHolder:
    """``pid``: a process that has the file open. ``doubt``: why it may be open although none is seen; "" where that is sure."""

    pid: int | None = None
    doubt: str = "it was not looked at"


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
            time.sleep(AGAIN)
    return FileHolder(doubt=doubt_of(path, state.st_uid))


def doubt_of(path: str, owner: int) -> str:
    """Why a process that has a file open may not be seen from here."""
    if os.geteuid() not in {0, owner}:
        return "it is another user's, whose processes do not show their files"
    kind = file_system_of(path)
    if kind.startswith(OF_SEVERAL_MACHINES):
        return f"it lies on {kind}, so a process of another machine may hold it"
    if not kind:
        return "nobody knows on what it lies"
    if not kind.startswith(OF_A_CONTAINER) and namespace() != FIRST_NAMESPACE:
        return "this is a container, and a process outside of it may hold it"
    return ""


def process_with(device: int, number: int) -> int | None:
    """A process that has a file open, of those that show theirs."""
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and _has_open(int(name), device, number):
            return int(name)
    return None


def file_system_of(path: str) -> str:
    """The kind of file system that a path lies on, as the kernel calls it; "" where that is not shown."""
    real, best, kind = os.path.realpath(path), "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
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
