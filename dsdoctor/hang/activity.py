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

    OWN_CHECK = "is in a check of dsdoctor's own"
    EXTENSION_LOCK = "waits for the lock of a torch extension"
    EXTENSION = "compiles a torch extension"
    COMPILE = "compiles (torch.compile or Triton)"
    DATA_LOADER = "waits for its data loader"
    DATA = "waits for its data"
    DEBUGGER = "stands in a debugger"
    TERMINAL = "waits for somebody at a terminal"
    FILE_LOCK = "waits for the lock of a file"
    CHECKPOINT = "reads or writes a checkpoint"
    SAVE = "saves"
    ASYNCIO = "waits for what its asyncio loop awaits"
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
    READABLE = "waits until something can be read"
    NETWORK_FILE_SYSTEM = "waits for a network file system"
    DISK = "waits for a disk"
    DISK_OR_FILE_SYSTEM = "waits for a disk or a file system"
    FILE = "waits for a file"
    FILE_WRITE = "waits for a file to be written"
    SCRIPT_ENDED = "its script has ended, and waits for a thread that is no daemon,"


class StackActivity(NamedTuple):
    """What one stack is busy with; None where that is not known. ``in_loader``: within its data loader."""

    kind: Activity | None
    in_loader: bool = False

    @property
    def words(self) -> str:
        """As the middle of a sentence; "" where it is not known.

        >>> StackActivity(Activity.SLEEP).words, StackActivity(None, in_loader=True).words, StackActivity(None).words
        ('sleeps', 'it stands in its data loader', '')
        """
        words = self.kind.value if self.kind else ""
        return f"{words or 'it stands'} in its data loader" if self.in_loader else words

    @property
    def waits_for_data(self) -> bool:
        """Whether it waits for a batch, or for what its loader does for one."""
        return self.in_loader or self.kind in {Activity.DATA_LOADER, Activity.DATA}

    @property
    def waits_for_thread(self) -> bool:
        """Whether it waits for another thread of its own process, or for what one has."""
        return self.kind in THREADED or self == StackActivity(Activity.LOCK)


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
    if any(Activity.LOCK.value in line for line in view.workers):
        return f"on {view.host}: {FORKED_LOCK}", ()
    kind = Activity.DATA if seen.waits_for_data and seen.kind is not Activity.DATABASE else seen.kind
    if kind is Activity.DATA and any(frame.file.endswith(FETCHER) for frame in acting_stack(view)):
        return f"on {view.host}: {WITHOUT_WORKERS}", ()
    sentence, command = REMEDIATION.get(kind, UNKNOWN) if kind else UNKNOWN
    return f"on {view.host}: {sentence}", (step(command, pid=view.pid),) if command else ()


THREAD_DIED = "mend what ended that thread: what it was to give, or had locked, does not come any more"
NO_THREAD_LEFT = "no thread of this process is left that could end that wait: see where the one ended"
FORKED_LOCK = (
    "see who holds that lock: one that another thread of the rank held when the worker was forked is never given back there; take "
    "no lock of the rank's in a dataset, or give the loader multiprocessing_context='spawn'"
)
FETCHER = "/torch/utils/data/_utils/fetch.py"
"""Runs in a loader's workers; in the rank itself where it has none, and then DataLoader refuses a timeout."""
WITHOUT_WORKERS = (
    "see what its dataset stands in: the loader has no workers (num_workers=0) and reads in this very process; only with "
    "num_workers=1 or more DataLoader(timeout=60) turns such a wait into an error"
)
CHILDREN = "ps -o pid,stat,etime,wchan:24,args --ppid {pid}"
THREADS = "py-spy dump --pid {pid}"
FILES = "ls -l /proc/{pid}/fd"
LOCKS = "lslocks"
SOCKETS = "ls -l /proc/{pid}/fd /proc/{pid}/net/tcp"
DISKS = "df -h"
GPU = "nvidia-smi"
NO_COMMAND = ""
UNKNOWN = ("see in C what that line waits for", "py-spy dump --native --pid {pid}")
LOADER_STUCK = (
    "see what its loader's workers stand in, and read that rank's part of the data by itself; "
    "DataLoader(timeout=60) turns such a wait into an error"
)
REMEDIATION = {
    Activity.OWN_CHECK: ("it ends by itself; dsdoctor.run --config-check off leaves it out", NO_COMMAND),
    Activity.DATABASE: ("see who has its lock, or whether its server answers, and give that call a timeout", FILES),
    Activity.DATA_LOADER: (LOADER_STUCK, CHILDREN),
    Activity.DATA: (LOADER_STUCK, CHILDREN),
    Activity.EXTENSION_LOCK: ("see who compiles that extension; where surely nobody does, remove the lock", FILES),
    Activity.FILE_LOCK: (
        "see which process has that lock, here or on another host of a shared file system; where none has, remove it",
        LOCKS,
    ),
    Activity.SERVICE: ("see whether that service answers, and give the call a timeout", SOCKETS),
    Activity.READABLE: ("see who has the other end of what it reads from, and give that wait a timeout", FILES),
    Activity.ASYNCIO: ("see what its coroutine awaits, and give that a timeout (asyncio.wait_for)", THREADS),
    Activity.SIGNAL: ("see who is to send that signal", NO_COMMAND),
    Activity.SCRIPT_ENDED: (
        "have that thread end before the script does, or make it a daemon; and see why this rank ends before the "
        "others",
        THREADS,
    ),
    Activity.COMPILE: (
        "see whether its compiler works; a wheel that holds the ops compiles nothing at run time",
        CHILDREN,
    ),
    Activity.EXTENSION: (
        "see whether its compiler works; a wheel that holds the ops compiles nothing at run time",
        CHILDREN,
    ),
    Activity.DEBUGGER: ("take the breakpoint out: the other ranks cannot wait for a person", NO_COMMAND),
    Activity.TERMINAL: ("take the question out: a rank has no terminal, and the others wait", NO_COMMAND),
    Activity.CHECKPOINT: ("see whether the file system of the checkpoint answers and has room", DISKS),
    Activity.DISK_OR_FILE_SYSTEM: (
        "see whether the disk, or the server of that file system, answers and has room",
        DISKS,
    ),
    Activity.NETWORK_FILE_SYSTEM: ("see which file system does not answer, and tell who runs it", DISKS),
    Activity.FILE: ("see on which file system that file lies, and whether it answers and has room", DISKS),
    Activity.FILE_WRITE: ("see on which file system that file lies, and whether it answers and has room", DISKS),
    Activity.DISK: ("see whether the disk answers and has room", DISKS),
    Activity.SAVE: ("see whether the file system answers and has room, and that every rank makes this call", DISKS),
    Activity.THREAD: ("see which of its threads has that lock, or what the thread waits for that it joins", THREADS),
    Activity.LOCK: (
        "see which of its threads has that lock: one that ended with an exception may never give it back",
        THREADS,
    ),
    Activity.THREAD_OR_PROCESS: ("see what the thread or process that it waits for stands in", THREADS),
    Activity.PROCESS: ("see what the process that it waits for stands in, and give that wait a timeout", CHILDREN),
    Activity.CHILD_PROCESS: (
        "see what the process that it waits for stands in, and give that wait a timeout",
        CHILDREN,
    ),
    Activity.NETWORK: ("see whether the server at the other end answers, and give that call a timeout", SOCKETS),
    Activity.DEVICE: ("see whether its GPU works on something, and which error the driver told last", GPU),
    Activity.PIPE: ("see who has the other end of that pipe, and whether it still lives", FILES),
    Activity.SLEEP: (
        "take that sleep out of the training, or have every rank do it; a loop that waits for something needs an end",
        NO_COMMAND,
    ),
}
"""What to do next, and the command that shows more."""
