"""Python stacks -> the user's own line, what is done there, which collective is waited in; and many ranks' stacks as few lines."""

import re
from collections.abc import Iterable, Sequence

from dsdoctor.core.user_code import is_user_file
from dsdoctor.hang.models import Frame, RankView, ThreadStack

COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py$")
WRAPPERS = {"wrapper", "wait_tensor", "_barrier", "_wait", "wait"}
NO_CALLS = {"<module>", "_distributed_excepthook"}
"""What stands in the same files and calls nothing: their import, and the printing of a traceback."""
STARTING = {"init_process_group", "_new_process_group_helper", "rendezvous", "new_group", "_new_group_with_tag"}
LOADING = r"/torch/utils/data/"
OF_DISKS = re.compile(r"/nvme/|/swap_tensor/|/(py_libaio|aiofiles|mpi4py)/")
IN_A_DISK = r"read_events|io_|folio|^blk|^nfs|^fuse|ext4|xfs|jbd2"
"""The kernel's functions of a thread that waits for a disk or a file system."""
DATABASE = (
    r"\b(_*(con|cur)\d*|\w*(cursor|conn|connection|database|db|session)\d*|(sqlite3|psycopg2?|duckdb)\.connect\(.*\))"
)
"""What a line calls a database: others are executed or committed, too."""
DOING = (
    (r"/dsdoctor/(config|child_scripts)/", "is in a check of dsdoctor's own"),
    (r"/torch/utils/file_baton\.py$", "waits for the lock of a torch extension"),
    (r"/torch/utils/cpp_extension\.py$", "compiles a torch extension"),
    (r"/(torch/_(inductor|dynamo|functorch)|triton)/", "compiles (torch.compile or Triton)"),
    (LOADING, "waits for its data loader"),
    (r"/(pdb|bdb|ipdb|code)\.py$", "stands in a debugger"),
    (r"/(filelock|fasteners|portalocker)/", "waits for the lock of a file"),
    (r"/torch/serialization\.py$|/safetensors/|/checkpoint_engine/", "reads or writes a checkpoint"),
    (r"/asyncio/", "waits for what its asyncio loop awaits"),
    (r"/multiprocessing/|/subprocess\.py$|/concurrent/futures/process\.py$", "waits for another process"),
    (r"/(threading|queue)\.py$|/concurrent/futures/", "waits for a lock or another thread"),
    (r"/(socket|ssl)\.py$|/http/|/urllib3?/|/requests/|/httpx/|/huggingface_hub/", "waits for the network"),
)
SAYING = (
    (r"\bsleep\(", "sleeps"),
    (r"\binput\(|\bbreakpoint\(", "waits for somebody at a terminal"),
    (r"\bflock\(|\blockf\(|FileLock\(", "waits for the lock of a file"),
    (r"\bsignal\.pause\(|\bsigwait\w*\(", "waits for a signal"),
    (DATABASE + r"(\(\))?\.(execute(many|script)?|commit)\(", "waits for a database"),
    (r"\.acquire\(|\bwith \w*lock", "waits for a lock"),
    (r"\.(recv|recv_into|recvfrom|accept)\(|\burlopen\(", "waits for the network"),
    (r"\.(join|result|get)\(", "waits for another thread or process"),
    (r"\.(item|cpu|tolist|numpy)\(|synchronize\(", "waits for its device"),
    (r"\bnext\(|\bin \w*(loader|dataset)", "waits for its data"),
    (r"\bsave\w*\(", "saves"),
)
GATHERS = re.compile(
    r"/deepspeed/runtime/zero/(parameter_offload|partitioned_param_coordinator|partition_parameters)\.py$"
)
GATHERED = (
    "; under ZeRO-3 a forward gathers parameters, so no rank may run one alone, and experts that only some ranks use "
    "must be one leaf: deepspeed.utils.set_z3_leaf_modules(model, [ItsClass])"
)
FILES = (
    (r"^(flock|fcntl) ", "waits for the lock of a file"),
    (r" pipe:", "waits for a pipe"),
    (r" unix_\w+$", "waits for a service of this host"),
    (r" socket:", "waits for the network"),
    (r" /dev/(pts/|tty|console)", "waits for somebody at a terminal"),
)
"""By a system call, its file and what the kernel says: what a rank waits for."""
ENDED = "its script has ended, and waits for a thread that is no daemon,"
KERNEL = (
    (r"nanosleep", "sleeps"),
    (r"futex", "waits for a lock or another thread"),
    (r"pipe_(read|write)|^wait_for_partner", "waits for a pipe"),
    (r"do_wait|wait4", "waits for a child process"),
    (r"^(nfs|rpc_|lustre|ll_|gpfs|fuse|ceph|request_wait_answer)", "waits for a network file system"),
    (r"^blk|ext4|xfs|jbd2", "waits for a disk"),
    (r"folio|io_schedule", "waits for a disk or a file system"),
    (r"locks_lock_inode|flock_lock", "waits for the lock of a file"),
    (r"sys_pause|sigtimedwait|sigsuspend", "waits for a signal"),
    (r"poll_schedule|do_select|do_sys_poll|epoll_wait|^ep_poll", "waits until something can be read"),
    (r"^(inet_|sk_|tcp_|unix_stream|__skb|skb)", "waits for the network"),
    (r"^n_tty_read", "waits for somebody at a terminal"),
)
ON_A_FILE = (
    (
        r"^(fsync|fdatasync|fallocate|ftruncate|write|pwrite|writev) /(?!(dev|proc|sys)/)",
        "waits for a file to be written",
    ),
    (r"^(read|pread|readv|getdents|stat|access|unlink|mkdir) /(?!(dev|proc|sys)/)", "waits for a file"),
)
"""By the same words as in FILES, where the kernel's own do not tell more."""


def is_own(frame: Frame) -> bool:
    """Whether a line is the user's own, and not a library's.

    >>> files = "/home/a/train.py", "/usr/lib/python3.11/queue.py", "<frozen x>"
    >>> [is_own(Frame(file=file, line=1, function="f")) for file in files]
    [True, False, False]
    """
    return is_user_file(frame.file)


def own_frame(frames: Sequence[Frame], *, only: bool = False) -> Frame | None:
    """The innermost line of the user's own code; of a program that is all library the innermost line, or None with ``only``."""
    return next((frame for frame in reversed(frames) if is_own(frame)), frames[-1] if frames and not only else None)


def collective_in(frames: Sequence[Frame]) -> str | None:
    """The name of the collective that a stack stands in, as Python calls it; None where it stands in none.

    >>> collective_in([Frame(file="/x/torch/distributed/distributed_c10d.py", line=9, function="barrier")])
    'barrier'
    """
    names = [each.function for each in frames if COLLECTIVES.search(each.file) and each.function not in NO_CALLS]
    return next((name for name in names if name not in WRAPPERS), names[0] if names else None)


def in_earlier_call(frames: Sequence[Frame], kernel: str = "") -> bool:
    """Whether a stack ends in what may be the wait for a collective that was begun before, which is C++: `work.wait()`. A wait
    for a disk is written alike.

    >>> text = "handle.wait()"
    >>> files = "/a/t.py", "/v/site-packages/deepspeed/nvme/ds_aio_handle.py"
    >>> [in_earlier_call([Frame(file=file, line=1, function="f", text=text)]) for file in files]
    [True, False]
    """
    last = frames[-1] if frames else None
    return (
        last is not None
        and re.search(r"\b(work|works|handle|handles|req|reqs|request|requests)\b.*\.wait\(\)", last.text) is not None
        and not any(OF_DISKS.search(frame.file) for frame in frames)
        and re.search(IN_A_DISK, kernel) is None
    )


def waits_on_work_handle(frames: Sequence[Frame]) -> bool:
    """Whether what a stack waits for last is called as torch calls a collective that was begun: `work`."""
    return bool(frames) and re.search(r"\bworks?\b.*\.wait\(\)", frames[-1].text) is not None


def in_backward(frames: Sequence[Frame]) -> bool:
    """Whether a stack ends in autograd's engine, which is C++."""
    return bool(frames) and frames[-1].function == "_engine_run_backward"


def is_starting(frames: Sequence[Frame]) -> bool:
    """Whether a stack stands in the making of a process group."""
    return collective_in(frames) in STARTING


def doing(frames: Sequence[Frame], kernel: str = "", call: Sequence[str] = ()) -> str:
    """What a stack is about, in words; "" where that is not known. ``kernel``: what the kernel says that the thread sleeps in.
    ``call``: the system call there, and the file that it is about.

    >>> get = Frame(file="/usr/lib/python3.11/queue.py", line=1, function="get")
    >>> doing([Frame(file="/a/t.py", line=3, function="f", text="x = next(it)"), get])
    'waits for a lock or another thread'
    >>> doing([Frame(file="/a/t.py", line=3, function="f", text="time.sleep(9)")])
    'sleeps'
    """
    last = max((number for number, frame in enumerate(frames) if is_own(frame)), default=-1)
    below = frames[last + 1 :]
    if any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in below):
        return ENDED
    known = [(file, words) for file, words in DOING if any(re.search(file, frame.file) for frame in below)]
    if known:
        return known[0][1]
    text = frames[last].text if last >= 0 else ""
    words = next((words for pattern, words in SAYING if re.search(pattern, text)), "")
    asked = " ".join((*call, kernel))
    for table, told in ((FILES, asked), (KERNEL, kernel), (ON_A_FILE, asked)):
        words = words or next((words for pattern, words in table if re.search(pattern, told)), "")
    loading = any(re.search(LOADING, frame.file) for frame in frames)
    return f"{words or 'it stands'} in its data loader" if loading else words


def place(frame: Frame) -> str:
    """A line as it is told.

    >>> place(Frame(file="/home/a/train.py", line=41, function="main", text="batch = next(it)"))
    'train.py:41 in main: batch = next(it)'
    """
    said = f": {frame.text}" if frame.text else ""
    return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}{said}"


def main_stack(view: RankView) -> tuple[Frame, ...]:
    """The stack of the thread that trains; empty where nothing is known."""
    return main_of(view.sample.threads) if view.sample else ()


def main_of(threads: Iterable[ThreadStack]) -> tuple[Frame, ...]:
    """The stack of the main thread among some."""
    return next((thread.frames for thread in threads if thread.main), ())


def acting_stack(view: RankView) -> tuple[Frame, ...]:
    """The stack that tells what a rank does: the training thread's, or that of a thread that runs backward for it."""
    main = main_stack(view)
    if collective_in(main) or view.sample is None:
        return main
    backward = [thread.frames for thread in view.sample.threads if not thread.main and collective_in(thread.frames)]
    return backward[0] if backward and any("autograd" in frame.file for frame in main[-4:]) else main


def gathers(view: RankView) -> bool:
    """Whether a rank stands in a gather of ZeRO-3, or was ended in one."""
    stack = (view.sample.failed_in if view.sample else ()) or acting_stack(view)
    return any(GATHERS.search(frame.file) for frame in stack)


def doing_of(view: RankView) -> str:
    """What a rank is about, in words; "" where that is not known."""
    return doing(acting_stack(view), view.waits, view.call)


def waits_for_thread(view: RankView) -> bool:
    """Whether a rank waits for another thread of its own, or for what one has."""
    words = doing_of(view)
    return "thread" in words or words == "waits for a lock"


def ranks_words(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    >>> ranks_words([3]), ranks_words([0, 2, 3, 4])
    ('rank 3', 'ranks 0, 2-4')
    """
    found = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in found:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(parts)}"


def grouped_stacks(views: Iterable[RankView], *, most: int = 12) -> list[str]:
    """The stacks of all ranks, those that are equal together: a heading with the ranks, and the age where they are old, then lines
    from the outermost to the innermost."""
    groups: dict[tuple[str, tuple[tuple[str, int, str], ...]], list[RankView]] = {}
    for view in views:
        stack = tuple((frame.file, frame.line, frame.function) for frame in acting_stack(view))
        age = f", {view.age:.0f} s ago" if view.age >= OLD_STACK and not view.ended else ""
        groups.setdefault((age, stack), []).append(view)
    lines: list[str] = []
    for (age, stack), members in sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0].rank)):
        lines.append(f"{ranks_words(view.rank for view in members)}{age}:")
        frames = acting_stack(members[0])
        lines += [f"    {frame.file}:{frame.line} in {frame.function}" for frame in frames[-most:]]
        if not stack:
            lines.append("    no stack is known")
    return lines


OLD_STACK = 3.0
"""Seconds: an older stack is shown with its age."""


def with_texts(threads: Iterable[ThreadStack], text_of: dict[tuple[str, int], str]) -> tuple[ThreadStack, ...]:
    """The same stacks with source lines."""
    return tuple(
        ThreadStack(
            name=thread.name,
            main=thread.main,
            frames=tuple(
                Frame(
                    file=frame.file,
                    line=frame.line,
                    function=frame.function,
                    text=text_of.get((frame.file, frame.line), ""),
                )
                for frame in thread.frames
            ),
        )
        for thread in threads
    )
