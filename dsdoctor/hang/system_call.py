"""What a thread asks of the kernel just now, and of which file: a read from a pipe, an open on a network file system that does not
answer. Looks. Standard library alone: a rank asks it of itself, which the kernel always allows; of another process not always."""

import os
import re
from collections.abc import Iterable

OF_OPEN_FILES = {
    "x86_64": {
        0: "read",
        1: "write",
        17: "pread",
        18: "pwrite",
        19: "readv",
        20: "writev",
        43: "accept",
        44: "send",
        45: "recv",
        46: "sendmsg",
        47: "recvmsg",
        72: "fcntl",
        73: "flock",
        74: "fsync",
        75: "fdatasync",
        77: "ftruncate",
        217: "getdents",
        285: "fallocate",
        288: "accept",
    },
    "aarch64": {
        25: "fcntl",
        32: "flock",
        46: "ftruncate",
        47: "fallocate",
        61: "getdents",
        63: "read",
        64: "write",
        65: "readv",
        66: "writev",
        67: "pread",
        68: "pwrite",
        82: "fsync",
        83: "fdatasync",
        202: "accept",
        206: "send",
        207: "recv",
        211: "sendmsg",
        212: "recvmsg",
        242: "accept",
    },
}
"""The calls whose first argument is the number of an open file, by machine and number."""
OF_PATHS = {
    "x86_64": {257: "open", 258: "mkdir", 262: "stat", 263: "unlink", 269: "access", 332: "stat"},
    "aarch64": {34: "mkdir", 35: "unlink", 48: "access", 56: "open", 79: "stat", 291: "stat"},
}
"""Those whose first argument is the folder's open file, and whose second is where a path stands in the process's memory."""
LONGEST = 4096
WORKING_FOLDER = -100 & 0xFFFFFFFF
"""AT_FDCWD, which stands for the folder in which the process works."""


def file_call(pid: int, thread: int = 0) -> tuple[str, str]:
    """The system call in which a thread sleeps, and the file that it is about; two empty words for a call about no file, and
    where that is not shown.

    >>> file_call(1 << 22)
    ('', '')
    """
    try:
        with open(f"/proc/{pid}/task/{thread or pid}/syscall", encoding="ascii") as file:  # noqa: PTH123
            words = file.read().split()
        number, first, second = int(words[0]), int(words[1], 16), int(words[2], 16)
        machine = os.uname().machine
        if name := OF_OPEN_FILES.get(machine, {}).get(number):
            return name, _as_text(os.readlink(f"/proc/{pid}/fd/{first}"))  # noqa: PTH115
        name = OF_PATHS.get(machine, {}).get(number, "")
        return (name, _as_text(_path_at(pid, first, second))) if name else ("", "")
    except (OSError, ValueError, IndexError):
        return "", ""


def _as_text(path: str) -> str:
    """A path that can be written as UTF-8: a name may hold any bytes."""
    return os.fsencode(path).decode("utf-8", "replace")


def _path_at(pid: int, folder: int, address: int) -> str:
    """A path in a process's memory, read as a file: what is not there any more is an error and no crash. It may hold `..`, and
    go over links."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        path = os.fsdecode(os.pread(memory.fileno(), LONGEST, address).partition(b"\0")[0])
    if path.startswith("/"):
        return path
    number = folder & 0xFFFFFFFF
    base = os.readlink(f"/proc/{pid}/{'cwd' if number == WORKING_FOLDER else f'fd/{number}'}")  # noqa: PTH115
    # an empty path is the open file itself
    return os.path.join(base, path) if path else base  # noqa: PTH118


def is_of_open_file(name: str) -> bool:
    """Whether a call is one of those about an open file, whose path the kernel has resolved."""
    return any(name in names.values() for names in OF_OPEN_FILES.values())


def file_system_of(pid: int, path: str) -> str:
    """The file system on which a path without links lies, as a process sees it, in words; "" where that is not shown."""
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return mounted_at(file, path)
    except (OSError, ValueError, IndexError):
        return ""


def mounted_at(lines: Iterable[str], path: str) -> str:
    r"""The file system of a path among the lines of a mountinfo.

    >>> lines = ["1 0 8:1 / / rw - ext4 /dev/sda1 rw", r"2 1 8:2 / /mnt/my\040data rw - xfs /dev/sdb1 rw"]
    >>> mounted_at(lines, "/mnt/my data/x")
    'xfs at /mnt/my data'
    """
    best, found = -1, ""
    for line in lines:
        place, _, rest = line.partition(" - ")
        # a blank, a tab, the end of a line and a backslash stand there as three digits
        mounted = re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), place.split()[4])
        # what is mounted may hold a password
        kind = rest.split()[0]
        inside = path == mounted or path.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= best:
            best, found = len(mounted), f"{kind} at {mounted}"
    return found
