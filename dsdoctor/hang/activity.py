"""What a rank is busy with, as its stack and the kernel show: a kind, in words, and what to do next where others wait for it."""

import enum
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dsdoctor.core.finding import Fix
from dsdoctor.hang.models import Frame, RankView
from dsdoctor.hang.stacks import acting_stack, is_own
from dsdoctor.rules import book

LOADING = r"/torch/utils/data/"
DATABASE_CALL = (
    r"\b(_*(con|cur)\d*|\w*(cursor|conn|connection|database|db|session)\d*|(sqlite3|psycopg2?|duckdb)\.connect\(.*\))"
)
"""What a line calls a database: others are executed or committed, too."""
FETCHER = "/torch/utils/data/_utils/fetch.py"
"""Runs in a loader's workers; in the rank itself where it has none, and then DataLoader refuses a timeout."""


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
SAME_REMEDY = {
    Activity.DATA_LOADER: Activity.DATA,
    Activity.EXTENSION: Activity.COMPILE,
    Activity.FILE_WRITE: Activity.FILE,
    Activity.CHILD_PROCESS: Activity.PROCESS,
}


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


def remediation(view: RankView) -> Fix:
    """What to do about a rank that others wait for."""
    stopped = next((worker.stopped for worker in view.workers if worker.stopped), view.pid)
    fix = book.remedy("hang", _remedy_of(view), pid=stopped)
    return replace(fix, text=f"on {view.host}: {fix.text}")


def _remedy_of(view: RankView) -> str:
    """The name of the book's remedy."""
    seen = activity_of(view)
    if view.sample is not None and seen.waits_for_thread:
        if view.sample.deaths:
            return "thread-died"
        if view.sample.all_threads and all(thread.main for thread in view.sample.threads) and seen.kind in THREADED:
            return "no-thread-left"
    if any(worker.stopped for worker in view.workers):
        return "stopped-worker"
    if any(worker.at_lock for worker in view.workers):
        return "forked-lock"
    kind = Activity.DATA if seen.waits_for_data and seen.kind is not Activity.DATABASE else seen.kind
    if kind is Activity.DATA and any(frame.file.endswith(FETCHER) for frame in acting_stack(view)):
        return "without-workers"
    return remedy_name(kind)


CANNOT_END = {"thread-died", "no-thread-left", "stopped-worker", "forked-lock"}
"""Remedies of waits for a thread that is not there any more, or for a process that does not run."""


def can_end(view: RankView) -> bool:
    """Whether what a rank waits for may still come, as far as seen: a sleep, a server, a disk, not a thread that has died."""
    return _remedy_of(view) not in CANNOT_END


def remedy_name(kind: Activity | None) -> str:
    """What the book calls the remedy of an activity; several may have one.

    >>> remedy_name(Activity.EXTENSION_LOCK), remedy_name(Activity.CHILD_PROCESS), remedy_name(None)
    ('extension-lock', 'process', 'unknown')
    """
    return SAME_REMEDY.get(kind, kind).name.lower().replace("_", "-") if kind else "unknown"
