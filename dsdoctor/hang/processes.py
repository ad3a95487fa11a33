"""What the kernel tells of processes that are not ours: state, processor time, bytes, what they sleep in and about which file,
and which of them are the ranks that a user means. Looks.

Standard library alone: a rank asks it of itself, which the kernel always allows; of another process not always.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import open_file
from dsdoctor.core.processes import ending_of, wait_until, whole_number
from dsdoctor.ranks.launchers import RANKS, TORCHRUN

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
IO_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")
INTERPRETER_LOOK_SECONDS, MIN_INTERPRETER_WAKES = 0.2, 3
LISTENING = "0A"
SERVANTS = re.compile(rb"multiprocessing\.resource_tracker|compile_worker")
"""What stands in the command lines of processes that wait for the orders of the one that started them: they do no work of
their own. A loader's worker calls itself LOADER_WORKER, in newer releases of torch."""
LOADER_WORKER = b"pt_data_worker"
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
MAX_PATH_BYTES = 4096
WORKING_FOLDER = -100 & 0xFFFFFFFF
"""AT_FDCWD, which stands for the folder in which the process works."""
WORLD_VARIABLES = (
    "WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
PYTHONS = ("python", "pypy")


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """A process at one moment. ``started``: tells it from a later process of that number. ``cpu``: seconds. ``bytes``: read
    and written, 0 where the kernel does not tell. ``exit_status``: of one that is dead, as wait gives it."""

    state: str
    started: int
    parent: int
    cpu: float
    exit_status: int = 0


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank's process. ``rank``: as its environment says, else its place among those that were named. ``world``: 0 where that
    is not known."""

    pid: int
    rank: int
    world: int


def owner_of(pid: int) -> int | None:
    """The user as whom a process acts; None where there is no such process. Not whose /proc/PID is: root's, where a process
    has changed its user."""
    try:
        with open_file(f"/proc/{pid}/status", "rb") as file:
            found = re.search(rb"^Uid:\s+\d+\s+(\d+)", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def facts_of(pid: int) -> ProcessFacts | None:
    """None where there is no such process (any more)."""
    try:
        with open_file(f"/proc/{pid}/stat", "rb") as file:  # once a second for each rank
            fields = file.read().rpartition(b")")[2].split()
        status = int(fields[49]) if len(fields) > 49 else 0
        return ProcessFacts(
            state=fields[0].decode(),
            started=int(fields[19]),
            parent=int(fields[1]),
            cpu=(int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND,
            exit_status=status,
        )
    except (OSError, ValueError, IndexError):
        return None


def is_in_disk_sleep(pid: int, thread: int) -> bool:
    """Whether a thread waits in the kernel for a device, and cannot be interrupted."""
    try:
        with open_file(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"D"
    except (OSError, IndexError):
        return False


def began_at(pid: int, thread: int) -> int | None:
    """When a thread began, in nanoseconds of the wall clock; None where that is not shown."""
    try:
        with open_file(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    ago = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // TICKS_PER_SECOND
    return time.time_ns() - ago


def ending_words(facts: ProcessFacts) -> str:
    """How a dead process ended, as far as its status is shown."""
    return ending_of(facts.exit_status) or "exit status 0"


def moved_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far, 0 where that is not shown.

    Of a system call the kernel counts them at its end, and one that writes a checkpoint may take minutes; what reaches a disk's
    pages it counts at once. Both together count some bytes twice, which harms nothing: asked is whether they grow.
    """
    try:
        with open_file(f"/proc/{pid}/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(IO_COUNTERS))
    except (OSError, ValueError, IndexError):
        return 0


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal at this moment: without one SIGUSR2 ends it."""
    return number in caught(pid)


def caught(pid: int) -> frozenset[int]:
    """The signals for which a process has handlers at this moment, none where that is not shown."""
    try:
        with open_file(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith("SigCgt:")]
        mask = int(masks[0], 16)
    except (OSError, ValueError, IndexError):
        return frozenset()
    return frozenset(number + 1 for number in range(64) if mask >> number & 1)


def wanted_cpu(pid: int, thread: int = 0) -> float:
    """Seconds that a process's main thread, or another one, has run, or could have run and was given no processor; 0 where that is
    not shown."""
    try:
        with open_file(f"/proc/{pid}/task/{thread or pid}/schedstat", encoding="ascii") as file:
            ran, waited, _ = file.read().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return 0.0


def waits_for_interpreter(pid: int, thread: int) -> bool:
    """Whether a thread waits for Python's interpreter (the GIL), as far as that is seen: it wakes every 5 ms then, to ask for it.
    One that waits for anything else sleeps on."""
    before = wakes_of(pid, thread)
    time.sleep(INTERPRETER_LOOK_SECONDS)
    after = wakes_of(pid, thread)
    return before is not None and after is not None and after - before >= MIN_INTERPRETER_WAKES


def wakes_of(pid: int, thread: int) -> int | None:
    """How often a thread has gone to sleep so far, and so has been woken; None where that is not shown."""
    try:
        with open_file(f"/proc/{pid}/task/{thread}/status", "rb") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(b"voluntary_ctxt_switches"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def is_unserved(pid: int, address: str) -> bool:
    """Whether nothing listens at an address, host:port, of a process's own host; False where that is another one, or not shown."""
    host, _, port = address.rpartition(":")
    if not (host in {"localhost", "::1", os.uname().nodename} or host.startswith("127.")) or not port.isdigit():
        return False
    ports: set[int] = set()
    for family in ("tcp", "tcp6"):
        try:
            with open_file(f"/proc/{pid}/net/{family}", encoding="ascii") as file:
                fields = [line.split() for line in file][1:]
            ports.update(int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == LISTENING)
        except FileNotFoundError:  # a kernel without IPv6
            continue
        except (OSError, ValueError, IndexError):
            return False
    return int(port) not in ports


def waits_in(pid: int, thread: int = 0) -> str:
    """The kernel's function in which the main thread, or another one, sleeps; "" where that is not shown."""
    try:
        with open_file(f"/proc/{pid}/task/{thread or pid}/wchan", encoding="ascii", errors="replace") as file:
            name = file.read(64).strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def all_parents() -> dict[int, int]:
    """Each process with its parent."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
        facts = facts_of(int(name)) if name.isdigit() else None
        if facts is not None:
            found[int(name)] = facts.parent
    return found


def is_servant(pid: int) -> bool:
    """Whether a process does only what the one that started it orders."""
    try:
        with open_file(f"/proc/{pid}/comm", "rb") as name, open_file(f"/proc/{pid}/cmdline", "rb") as line:
            return name.read().strip() == LOADER_WORKER or SERVANTS.search(line.read(4096)) is not None
    except OSError:
        return False


def work_of_children(pid: int, parents: dict[int, int], loader_workers: Iterable[int] = ()) -> tuple[float, int, int]:
    """Seconds of processor time, of their main threads also those of waiting to be given one, bytes read and written, and the
    number of those that live, are not stopped and do not only serve the one above, of all processes below one."""
    living = {child: facts for child in descendants(pid, parents) if (facts := facts_of(child)) is not None}
    seconds = sum(max(facts.cpu, wanted_cpu(child)) for child, facts in living.items())
    return (
        seconds,
        sum(map(moved_bytes, living)),
        sum(
            facts.state not in {"Z", "X", "T", "t"} and child not in loader_workers and not is_servant(child)
            for child, facts in living.items()
        ),
    )


def descendants(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """The processes that a process started, and those that they started."""
    for child, parent in parents.items():
        if parent == pid:
            yield child
            yield from descendants(child, parents)


def wait_until_ended(pid: int, seconds: float) -> bool:
    """Whether a process has ended, or does so in this time."""
    return wait_until(lambda: (facts := facts_of(pid)) is None or facts.state in {"Z", "X"}, seconds)


def file_call(pid: int, thread: int = 0) -> tuple[str, str]:
    """The system call in which a thread sleeps, and the file that it is about; two empty words for a call about no file, and
    where that is not shown.

    >>> file_call(1 << 22)
    ('', '')
    """
    try:
        # as bytes: a rank's watching thread imports nothing, not even the codec of a file
        with open_file(f"/proc/{pid}/task/{thread or pid}/syscall", "rb") as file:
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
    with open_file(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        path = os.fsdecode(os.pread(memory.fileno(), MAX_PATH_BYTES, address).partition(b"\0")[0])
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
        with open_file(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
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


def rank_processes(pids: Iterable[int]) -> tuple[RankProcess, ...]:
    """The ranks among some processes and below them. Raises UsageError for processes that are not there, or of two runs."""
    parents = all_parents()
    found: list[RankProcess] = []
    for pid in dict.fromkeys(pids):
        if facts_of(pid) is None:
            raise UsageError(f"no such process: {pid}", hint="pgrep -af python lists running ones")
        for each in dict.fromkeys(python_below(rank, parents) for rank in ranks_below(pid, parents)):
            if all(each != known.pid for known in found):
                found.append(_known(each, len(found)))
    by_rank: dict[int, RankProcess] = {}
    for process in found:
        if process.rank in by_rank:
            pair = f"{by_rank[process.rank].pid} and {process.pid}"
            raise UsageError(f"processes {pair} both are rank {process.rank}", hint="name the processes of one run")
        by_rank[process.rank] = process
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def ranks_below(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """A rank itself; of what is none, a launcher, the topmost ranks that it started; the process itself where there are none."""
    if TORCHRUN.rank in environment_of(pid):
        return (pid,)
    ranks = tuple(_topmost(pid, parents, (TORCHRUN.rank,)))
    if ranks or any(name in environment_of(pid) for name in RANKS):
        return ranks or (pid,)
    return tuple(_topmost(pid, parents, RANKS)) or (pid,)


def python_below(pid: int, parents: Mapping[int, int]) -> int:
    """The Python that a wrapper around it (a shell, numactl) runs; the process itself where there is none."""
    if is_python(pid):
        return pid
    children = sorted(child for child, parent in parents.items() if parent == pid)
    return next((found for child in children if is_python(found := python_below(child, parents))), pid)


def is_python(pid: int) -> bool:
    """By the name of its program."""
    try:
        return os.readlink(f"/proc/{pid}/exe").rpartition("/")[2].startswith(PYTHONS)  # noqa: PTH115
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty where this user may not read it."""
    try:
        with open_file(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read(1 << 20).decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, mark, value in (pair.partition("=") for pair in pairs) if mark}


def _topmost(pid: int, parents: Mapping[int, int], names: tuple[str, ...]) -> Iterator[int]:
    for child in sorted(child for child, parent in parents.items() if parent == pid):
        if any(name in environment_of(child) for name in names):
            yield child
        else:
            yield from _topmost(child, parents, names)


def _known(pid: int, place: int) -> RankProcess:
    environment = environment_of(pid)
    return RankProcess(
        pid=pid,
        rank=next((rank for name in RANKS if (rank := whole_number(environment.get(name, ""))) is not None), place),
        world=next((world for name in WORLD_VARIABLES if (world := whole_number(environment.get(name, "")))), 0),
    )
