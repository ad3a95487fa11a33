"""What a rank is busy with, as its stack and the kernel show: a kind, in words, and what to do next where others wait for it."""

import enum
import re
from collections.abc import Sequence
from typing import NamedTuple

from dsdoctor.core.finding import Step, step
from dsdoctor.hang.models import Frame, RankView
from dsdoctor.hang.stacks import acting_stack, is_own


class Activity(enum.Enum):
    """A kind, with its words."""

    OWN_CHECK = "runs a check of dsdoctor"
    EXTENSION_LOCK = "waits for the lock of a torch extension"
    EXTENSION = "compiles a torch extension"
    COMPILE = "compiles (torch.compile or Triton)"
    DATA_LOADER = "waits for its data loader"
    DATA = "waits for its data"
    DEBUGGER = "is in a debugger"
    TERMINAL = "waits for a terminal"
    FILE_LOCK = "waits for the lock of a file"
    CHECKPOINT = "reads or writes a checkpoint"
    SAVE = "saves"
    ASYNCIO = "waits in its asyncio loop"
    PROCESS = "waits for another process"
    CHILD_PROCESS = "waits for a child process"
    THREAD_OR_PROCESS = "waits for another thread or process"
    THREAD = "waits for a lock or another thread"
    LOCK = "waits for a lock"
    NETWORK = "waits for the network"
    SERVICE = "waits for a service of this host"
    DATABASE = "waits for a database"
    SLEEP = "sleeps"
    SIGNAL = "waits for a signal"
    DEVICE = "waits for its device"
    PIPE = "waits for a pipe"
    READABLE = "waits for something to read"
    NETWORK_FILE_SYSTEM = "waits for a network file system"
    DISK = "waits for a disk"
    DISK_OR_FILE_SYSTEM = "waits for a disk or a file system"
    FILE = "waits for a file"
    FILE_WRITE = "waits for a file to be written"
    SCRIPT_ENDED = "its script has ended and waits for a non-daemon thread"


class StackActivity(NamedTuple):
    """What one stack is busy with; None where that is not known. ``in_loader``: within its data loader."""

    kind: Activity | None
    in_loader: bool = False

    @property
    def words(self) -> str:
        """As the middle of a sentence; "" where it is not known.

        >>> StackActivity(Activity.SLEEP).words, StackActivity(None, in_loader=True).words, StackActivity(None).words
        ('sleeps', 'in its data loader', '')
        """
        words = self.kind.value if self.kind else ""
        return " ".join(part for part in (words, "in its data loader" if self.in_loader else "") if part)

    @property
    def waits_for_data(self) -> bool:
        """Whether it waits for a batch, or for what its loader does for one."""
        return self.in_loader or self.kind in {Activity.DATA_LOADER, Activity.DATA}

    @property
    def waits_for_thread(self) -> bool:
        """Whether it waits for another thread of its own process, or for what one has."""
        return self.kind in THREADED or self == StackActivity(Activity.LOCK)


AT_LOCK = {Activity.LOCK, Activity.THREAD}
"""A wait within one process, which a fork leaves nobody to end."""
LOCKED = AT_LOCK | {Activity.FILE_LOCK, Activity.EXTENSION_LOCK}
THREADED = {Activity.THREAD, Activity.THREAD_OR_PROCESS, Activity.SCRIPT_ENDED}
OUTSIDE_THE_RUN = {
    Activity.NETWORK,
    Activity.PROCESS,
    Activity.CHILD_PROCESS,
    Activity.NETWORK_FILE_SYSTEM,
    Activity.FILE_LOCK,
    Activity.DATABASE,
    Activity.SERVICE,
    Activity.ASYNCIO,
}
"""Waits for what is not seen from here, and may well work."""
LOADING = r"/torch/utils/data/"
DATABASE_CALL = (
    r"\b(_*(con|cur)\d*|\w*(cursor|conn|connection|database|db|session)\d*|(sqlite3|psycopg2?|duckdb)\.connect\(.*\))"
)
"""What a line calls a database: others are executed or committed, too."""
BY_LIBRARY_FILE = (
    (r"/dsdoctor/(config|child_scripts)/", Activity.OWN_CHECK),
    (r"/torch/utils/file_baton\.py$", Activity.EXTENSION_LOCK),
    (r"/torch/utils/cpp_extension\.py$", Activity.EXTENSION),
    (r"/(torch/_(inductor|dynamo|functorch)|triton)/", Activity.COMPILE),
    (LOADING, Activity.DATA_LOADER),
    (r"/(pdb|bdb|ipdb|code)\.py$", Activity.DEBUGGER),
    (r"/(filelock|fasteners|portalocker)/", Activity.FILE_LOCK),
    (r"/torch/serialization\.py$|/safetensors/|/checkpoint_engine/", Activity.CHECKPOINT),
    (r"/asyncio/", Activity.ASYNCIO),
    (r"/multiprocessing/|/subprocess\.py$|/concurrent/futures/process\.py$", Activity.PROCESS),
    (r"/(threading|queue)\.py$|/concurrent/futures/", Activity.THREAD),
    (r"/(socket|ssl)\.py$|/http/|/urllib3?/|/requests/|/httpx/|/huggingface_hub/", Activity.NETWORK),
)
BY_SOURCE_LINE = (
    (r"\bsleep\(", Activity.SLEEP),
    (r"\binput\(|\bbreakpoint\(", Activity.TERMINAL),
    (r"\bflock\(|\blockf\(|FileLock\(", Activity.FILE_LOCK),
    (r"\bsignal\.pause\(|\bsigwait\w*\(", Activity.SIGNAL),
    (DATABASE_CALL + r"(\(\))?\.(execute(many|script)?|commit)\(", Activity.DATABASE),
    (r"\.acquire\(|\bwith \w*lock", Activity.LOCK),
    (r"\.(recv|recv_into|recvfrom|accept)\(|\burlopen\(", Activity.NETWORK),
    (r"\.(join|result|get)\(", Activity.THREAD_OR_PROCESS),
    (r"\.(item|cpu|tolist|numpy)\(|synchronize\(", Activity.DEVICE),
    (r"\bnext\(|\bin \w*(loader|dataset)", Activity.DATA),
    (r"\bsave\w*\(", Activity.SAVE),
)
BY_OPEN_FILE = (
    (r"^(flock|fcntl) ", Activity.FILE_LOCK),
    (r" pipe:", Activity.PIPE),
    (r" unix_\w+$", Activity.SERVICE),
    (r" socket:", Activity.NETWORK),
    (r" /dev/(pts/|tty|console)", Activity.TERMINAL),
)
"""By a system call, its file and what the kernel says: what a rank waits for."""
BY_KERNEL_FUNCTION = (
    (r"nanosleep", Activity.SLEEP),
    (r"futex", Activity.THREAD),
    (r"pipe_(read|write)|^wait_for_partner", Activity.PIPE),
    (r"do_wait|wait4", Activity.CHILD_PROCESS),
    (r"^(nfs|rpc_|lustre|ll_|gpfs|fuse|ceph|request_wait_answer)", Activity.NETWORK_FILE_SYSTEM),
    (r"^blk|ext4|xfs|jbd2", Activity.DISK),
    (r"folio|io_schedule", Activity.DISK_OR_FILE_SYSTEM),
    (r"locks_lock_inode|flock_lock", Activity.FILE_LOCK),
    (r"sys_pause|sigtimedwait|sigsuspend", Activity.SIGNAL),
    (r"poll_schedule|do_select|do_sys_poll|epoll_wait|^ep_poll", Activity.READABLE),
    (r"^(inet_|sk_|tcp_|unix_stream|__skb|skb)", Activity.NETWORK),
    (r"^n_tty_read", Activity.TERMINAL),
)
BY_CALL_ON_A_FILE = (
    (
        r"^(fsync|fdatasync|fallocate|ftruncate|write|pwrite|writev) /(?!(dev|proc|sys)/)",
        Activity.FILE_WRITE,
    ),
    (r"^(read|pread|readv|getdents|stat|access|unlink|mkdir) /(?!(dev|proc|sys)/)", Activity.FILE),
)
"""By the same words as in BY_OPEN_FILE, where the kernel's own do not tell more."""


def activity_in(frames: Sequence[Frame], kernel: str = "", call: Sequence[str] = ()) -> StackActivity:
    """What a stack is busy with. ``kernel``: what the kernel says that the thread sleeps in. ``call``: the system call there, and
    the file that it is about.

    >>> get = Frame(file="/usr/lib/python3.11/queue.py", line=1, function="get")
    >>> activity_in([Frame(file="/a/t.py", line=3, function="f", text="x = next(it)"), get]).words
    'waits for a lock or another thread'
    >>> activity_in([Frame(file="/a/t.py", line=3, function="f", text="time.sleep(9)")]).words
    'sleeps'
    """
    last = max((number for number, frame in enumerate(frames) if is_own(frame)), default=-1)
    below = frames[last + 1 :]
    if any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in below):
        return StackActivity(Activity.SCRIPT_ENDED)
    for file, kind in BY_LIBRARY_FILE:
        if any(re.search(file, frame.file) for frame in below):
            return StackActivity(kind)
    text = frames[last].text if last >= 0 else ""
    asked = " ".join((*call, kernel))
    tables = (
        (BY_SOURCE_LINE, text),
        (BY_OPEN_FILE, asked),
        (BY_KERNEL_FUNCTION, kernel),
        (BY_CALL_ON_A_FILE, asked),
    )
    kinds = (kind for table, seen in tables for pattern, kind in table if re.search(pattern, seen))
    return StackActivity(next(kinds, None), in_loader=any(re.search(LOADING, frame.file) for frame in frames))


def activity_of(view: RankView) -> StackActivity:
    """What a rank is busy with."""
    return activity_in(acting_stack(view), view.waits, view.call)


def remediation(view: RankView) -> tuple[str, tuple[Step, ...]]:
    """What to do about a rank that others wait for: a sentence, and the commands that go with it."""
    seen = activity_of(view)
    if view.sample is not None and seen.waits_for_thread:
        if view.sample.deaths:
            return f"on {view.host}: {THREAD_DIED}", ()
        if view.sample.all_threads and all(thread.main for thread in view.sample.threads) and seen.kind in THREADED:
            return f"on {view.host}: {NO_THREAD_LEFT}", ()
    if any(worker.at_lock for worker in view.workers):
        return f"on {view.host}: {FORKED_LOCK}", ()
    kind = Activity.DATA if seen.waits_for_data and seen.kind is not Activity.DATABASE else seen.kind
    if kind is Activity.DATA and any(frame.file.endswith(FETCHER) for frame in acting_stack(view)):
        return f"on {view.host}: {WITHOUT_WORKERS}", ()
    sentence, command = REMEDIATION.get(kind, UNKNOWN) if kind else UNKNOWN
    known = {"pid": str(view.pid)} if command and "{pid}" in command.template else {}
    return f"on {view.host}: {sentence}", (command.filled(known),) if command else ()


THREAD_DIED = "fix the error that ended that thread: its result, or the lock that it held, will not come"
NO_THREAD_LEFT = "no thread of this process is left to end the wait; find out where the other one ended"
FORKED_LOCK = (
    "find the holder of that lock: a lock that a thread of the rank held at the fork is never released in the worker. Take no lock "
    "of the rank in a dataset, or pass multiprocessing_context='spawn' to the loader"
)
FETCHER = "/torch/utils/data/_utils/fetch.py"
"""Runs in a loader's workers; in the rank itself where it has none, and then DataLoader refuses a timeout."""
WITHOUT_WORKERS = (
    "find out what its dataset waits for: with num_workers=0 the loader reads in this process. With num_workers=1 or more, "
    "DataLoader(timeout=60) turns such a wait into an error"
)
CHILDREN = step("ps -o pid,stat,etime,wchan:24,args --ppid {pid}")
THREADS = step("py-spy dump --pid {pid}")
FILES = step("ls -l /proc/{pid}/fd")
LOCKS = step("lslocks")
SOCKETS = step("ls -l /proc/{pid}/fd /proc/{pid}/net/tcp")
DISKS = step("df -h")
GPU = step("nvidia-smi")
NO_COMMAND = None
UNKNOWN: tuple[str, Step | None] = (
    "dump the native stack to see what that line waits for",
    step("py-spy dump --native --pid {pid}"),
)
LOADER_STUCK = (
    "find out what the workers of its data loader wait for, and read that rank's part of the data separately. "
    "DataLoader(timeout=60) turns such a wait into an error"
)
BUILD_STUCK = "check that its compiler works; with prebuilt ops nothing is compiled at run time"
FILE_STUCK = "check whether the file system of that file responds and has space"
CHILD_STUCK = "find out what that process waits for, and give the wait a timeout"
REMEDIATION: dict[Activity, tuple[str, Step | None]] = {
    Activity.OWN_CHECK: ("it ends by itself; dsdoctor.run --config-check off skips it", NO_COMMAND),
    Activity.DATABASE: ("check who holds its lock and whether its server responds, and give the call a timeout", FILES),
    Activity.DATA_LOADER: (LOADER_STUCK, CHILDREN),
    Activity.DATA: (LOADER_STUCK, CHILDREN),
    Activity.EXTENSION_LOCK: ("find the process that compiles the extension; if there is none, remove the lock", FILES),
    Activity.FILE_LOCK: (
        "find the process that holds the lock, here or on another host of a shared file system; if there is none, remove it",
        LOCKS,
    ),
    Activity.SERVICE: ("check whether that service responds, and give the call a timeout", SOCKETS),
    Activity.READABLE: ("find the other end of what it reads from, and give the wait a timeout", FILES),
    Activity.ASYNCIO: ("find out what its coroutine awaits, and give it a timeout (asyncio.wait_for)", THREADS),
    Activity.SIGNAL: ("find out who should send that signal", NO_COMMAND),
    Activity.SCRIPT_ENDED: (
        "end that thread before the script ends, or make it a daemon; check why this rank ends before the others",
        THREADS,
    ),
    Activity.COMPILE: (BUILD_STUCK, CHILDREN),
    Activity.EXTENSION: (BUILD_STUCK, CHILDREN),
    Activity.DEBUGGER: ("remove the breakpoint: the other ranks can't wait for a person", NO_COMMAND),
    Activity.TERMINAL: ("remove the prompt: a rank has no terminal", NO_COMMAND),
    Activity.CHECKPOINT: ("check whether the file system of the checkpoint responds and has space", DISKS),
    Activity.DISK_OR_FILE_SYSTEM: (
        "check whether the disk, or the server of the file system, responds and has space",
        DISKS,
    ),
    Activity.NETWORK_FILE_SYSTEM: ("find the file system that does not respond, and notify its administrator", DISKS),
    Activity.FILE: (FILE_STUCK, DISKS),
    Activity.FILE_WRITE: (FILE_STUCK, DISKS),
    Activity.DISK: ("check whether the disk responds and has space", DISKS),
    Activity.SAVE: ("check whether the file system responds and has space, and that every rank makes this call", DISKS),
    Activity.THREAD: ("find the thread that holds the lock, or what the joined thread waits for", THREADS),
    Activity.LOCK: (
        "find the thread that holds the lock; a thread that ended with an exception may never have released it",
        THREADS,
    ),
    Activity.THREAD_OR_PROCESS: ("find out what that thread or process waits for", THREADS),
    Activity.PROCESS: (CHILD_STUCK, CHILDREN),
    Activity.CHILD_PROCESS: (CHILD_STUCK, CHILDREN),
    Activity.NETWORK: ("check whether the server responds, and give the call a timeout", SOCKETS),
    Activity.DEVICE: ("check whether its GPU is busy, and for the last error of the driver", GPU),
    Activity.PIPE: ("find the other end of the pipe, and check whether it is alive", FILES),
    Activity.SLEEP: ("remove this sleep, or run it on every rank; a polling loop needs a timeout", NO_COMMAND),
}
"""What to do next, and the command that shows more."""
