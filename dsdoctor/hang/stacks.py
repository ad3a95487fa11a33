"""Python stacks -> the user's own line, what is done there, which collective is waited in; and many ranks' stacks as few lines."""

import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsdoctor.core.files import open_regular
from dsdoctor.core.script import is_user_file
from dsdoctor.hang.models import Frame, RankView, ThreadStack
from dsdoctor.ranks.nodelist import ranks_in_words

COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py$")
WRAPPERS = {"wrapper", "wait_tensor", "_barrier", "_wait", "wait"}
NO_CALLS = {"<module>", "_distributed_excepthook"}
"""What stands in the same files and calls nothing: their import, and the printing of a traceback."""
STARTING = {"init_process_group", "_new_process_group_helper", "rendezvous", "new_group", "_new_group_with_tag"}
RENDEZVOUS = "/torch/distributed/rendezvous.py"
OF_DISKS = re.compile(r"/nvme/|/swap_tensor/|/(py_libaio|aiofiles|mpi4py)/")
IN_A_DISK = r"read_events|io_|folio|^blk|^nfs|^fuse|ext4|xfs|jbd2"
"""The kernel's functions of a thread that waits for a disk or a file system."""
GATHERS = re.compile(
    r"/deepspeed/runtime/zero/(parameter_offload|partitioned_param_coordinator|partition_parameters)\.py$"
)
OLD_STACK = 3.0
"""Seconds: an older stack is shown with its age."""
MAX_SOURCE_BYTES = 16 << 20
"""Of one file, and of all that are kept."""
MAX_LINE_CHARACTERS = 160
READ_TIMEOUT_SECONDS = 2.0
MAX_UNREAD_FILES = 3
"""Files that did not come in that time, after which no more are read: each keeps a thread."""


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


def pauses(frames: Sequence[Frame]) -> bool:
    """Whether a stack sleeps in the user's own line, which goes on at every wake: `time.sleep(1)`, `stop.wait(1)`. A library
    that waits may go round a loop of its own.

    >>> files = {"f": "/a/t.py", "get": "/usr/lib/python3.11/queue.py", "wait": "/usr/lib/python3.11/threading.py"}
    >>> stacks = (["f"], ["f", "wait"], ["f", "get", "wait"])
    >>> [pauses([Frame(file=files[name], line=1, function=name) for name in stack]) for stack in stacks]
    [True, True, False]
    """
    last = max((number for number, frame in enumerate(frames) if is_own(frame)), default=None)
    if last is None:
        return False
    below = frames[last + 1 :]
    return all(frame.file.endswith("/threading.py") and frame.function == "wait" for frame in below)


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
    """Whether a stack stands in the making of a process group, or of the store for one, as torch's RPC does."""
    return collective_in(frames) in STARTING or any(frame.file.endswith(RENDEZVOUS) for frame in frames)


def frame_text(frame: Frame) -> str:
    """A line as it is told.

    >>> frame_text(Frame(file="/home/a/train.py", line=41, function="main", text="batch = next(it)"))
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
        lines.append(f"{ranks_in_words(view.rank for view in members)}{age}:")
        frames = acting_stack(members[0])
        lines += [f"    {frame.file}:{frame.line} in {frame.function}" for frame in frames[-most:]]
        if not stack:
            lines.append("    no stack available")
    return lines


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


class Sources:
    """The text of regular files as they were when they were first asked for; empty where there is none: what a stack names may be
    a pipe, a device, or in no file."""

    def __init__(self) -> None:
        self._lines: dict[str, list[bytes]] = {}
        self._kept = self._unread = 0

    def line(self, file: str, number: int) -> str:
        """A line as it is shown; "" where there is none."""
        lines = self._of(file)
        found = lines[max(0, number - 1)] if number <= len(lines) else b""
        return found.decode("utf-8", "replace").strip()[:MAX_LINE_CHARACTERS]

    def text(self, file: str, size: int) -> bytes:
        """The begin of a file."""
        return b"\n".join(self._of(file))[:size]

    def _of(self, file: str) -> list[bytes]:
        lines = self._lines.get(file)
        if lines is None:
            lines = self._read(file).split(b"\n")
            size = sum(map(len, lines))
            if self._kept + size > MAX_SOURCE_BYTES:
                self._lines.clear()
                self._kept = 0
            self._lines[file] = lines
            self._kept += size
        return lines

    def _read(self, file: str) -> bytes:
        if self._unread >= MAX_UNREAD_FILES:
            return b""
        texts: list[bytes] = []
        reader = threading.Thread(target=lambda: texts.append(_begin_of(file)), daemon=True)
        reader.start()
        reader.join(READ_TIMEOUT_SECONDS)
        self._unread += not texts
        return texts[0] if texts else b""


def _begin_of(file: str) -> bytes:
    try:
        with open_regular(Path(file)) as source:
            return source.read(MAX_SOURCE_BYTES)
    except (OSError, ValueError):
        return b""
