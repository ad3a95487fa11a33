"""In a rank: what is read of torch's groups, of stacks and of exceptions. Standard library; torch is taken from sys.modules."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

MOST_GROUPS, DEEPEST = 64, 30
Counters = tuple[dict[str, int], tuple[int | None, int | None]]
"""How far a rank is: the sequence numbers of its groups, and its engine's steps and micro steps."""
ROOTS = ("src", "dst", "group_src", "group_dst")


def group_states() -> Iterator[dict[str, Any]]:
    """The process groups of this process with their sequence numbers; those that do not count are left out."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None:
        return
    for group, name in list(world.pg_names.items())[:MOST_GROUPS]:
        try:
            sequence = int(group._get_sequence_number_for_group())
        except RuntimeError:  # a backend that counts nothing
            continue
        ranks = sorted(world.pg_group_ranks.get(group, ()))
        yield {"name": str(name), "ranks": ranks, "sequence": sequence}


def group_name(group: Any) -> str:
    """The name of a process group, as torch calls it; None stands for that of all ranks. "" where it is not known."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    asked = getattr(world, "default_pg", None) if group is None else group
    return str(world.pg_names.get(asked, "")) if world is not None and asked is not None else ""


def handled_exception(thread: int) -> str:
    """The exception that a thread's code handles just now, and where it was raised; "" for none."""
    handled: dict[int, Any] = sys._current_exceptions()
    error = handled.get(thread)
    # before Python 3.12 an entry is what sys.exc_info gives
    error = error[1] if isinstance(error, tuple) else error
    if error is None or isinstance(error, StopIteration):
        return ""
    raised = error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    place = f" (raised at {raised.tb_frame.f_code.co_filename}:{raised.tb_lineno})" if raised is not None else ""
    return f"{words_of(error)}{place}"


def words_of(error: BaseException) -> str:
    """An exception in a line."""
    try:
        return f"{type(error).__name__}: {error}"[:300].removesuffix(": ")
    except Exception:  # a message of its own making
        return type(error).__name__


def frames_of(frame: FrameType | None, outer: int, inner: int) -> list[dict[str, Any]]:
    """A stack, outermost first, of a very deep one the two ends."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append({"file": code.co_filename, "line": frame.f_lineno or 0, "function": code.co_name})
        frame = frame.f_back
    found.reverse()
    return found if len(found) <= outer + inner else found[:outer] + found[-inner:]


def waited_lock(frame: FrameType | None) -> str:
    """The file whose removal torch's FileBaton waits for in a stack; "" where it does not."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("/torch/utils/file_baton.py") and frame.f_code.co_name == "wait":
            return str(getattr(frame.f_locals.get("self"), "lock_file_path", ""))
        frame = frame.f_back
    return ""


def root_of(frame: FrameType | None) -> str:
    """The rank that a collective in a stack is given as its sender or receiver, with the group; "" where there is none."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
            values = frame.f_locals
            given = [f"{name}={values[name]}" for name in ROOTS if isinstance(values.get(name), int)]
            group = group_name(values.get("group"))
            if given and group:
                return f"{given[0]} in group {group}"
        frame = frame.f_back
    return ""


def frames_of_failure(error: BaseException) -> list[dict[str, Any]]:
    """Where an exception came from, outermost frame first."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append({"file": code.co_filename, "line": trace.tb_lineno or 0, "function": code.co_name})
        trace = trace.tb_next
    return found[-DEEPEST:]


def last_failure() -> str:
    """The exception that ended the main thread, in a line, where the script has an excepthook of its own; "" for none."""
    error = getattr(sys, "last_value", None)
    return words_of(error) if isinstance(error, BaseException) else ""


def has_gone_on(before: Counters, now: Counters) -> bool:
    """Whether a rank has trained or communicated between two looks: that groups are taken down is neither.

    >>> looks = ({"0": 5, "1": 2}, (1, 4)), ({"0": 5}, (1, 4)), ({"0": 6}, (1, 4)), ({}, (1, 5))
    >>> [has_gone_on(looks[0], look) for look in looks]
    [False, False, True, True]
    """
    return before[1] != now[1] or any(now[0].get(name, number) > number for name, number in before[0].items())
