"""Patterns of lines that show how a log went: it failed, it ended well, a compile began. They name no cause."""

import enum
from dataclasses import dataclass

from dsdoctor.rules.store import forms


class Event(enum.Enum):
    """What a mark shows."""

    FAILED = "failed"
    ENDED_WELL = "ended well"
    EXITED_ZERO = "exited with zero"
    ASKED_FOR_STATUS = "asked for status"
    NCCL_WARNED = "nccl warned"
    LAST_ERROR = "last error"
    COMPLAINED = "complained"
    TRACEBACK = "traceback"
    EXCEPTION = "exception"
    WAITING = "waiting"
    COMPILING = "compiling"
    LOADED = "loaded"
    CANCELLED = "cancelled"
    NO_GPU = "no gpu"
    WINDOWS = "windows"
    COMPILER_ERROR = "compiler error"
    GPU_FAULT = "gpu fault"
    CHAINED = "chained"
    IGNORED = "ignored"
    USAGE = "usage"
    ERROR_FILE = "error file"
    CRASHED = "crashed"
    EXITED = "exited"
    NO_NUMBER = "no number"
    MISSING = "missing"
    WORLD = "world"
    BUILDING = "building"
    STOPPED = "stopped"
    WATCHDOG = "watchdog"
    RECOVERED = "recovered"
    WORK = "work"
    SUITE_BEGAN = "suite began"
    SUITE_CAPTURED = "suite captured"
    SUITE_PASSED = "suite passed"
    SUITE_FAILED = "suite failed"

    __hash__ = object.__hash__  # why: an event is looked up for each mark of each line, and this one is in C


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A pattern of lines that show an event; ``words`` and ``pattern`` as in Signature.

    ``first_hand``: it shows nothing where a warning or a sentence has it. ``after``: must be found in the lines just above.
    """

    event: Event
    words: str
    pattern: str
    first_hand: bool = False
    after: str = ""


MARKS = tuple(Mark(**{**mark, "event": Event(mark["event"])}) for mark in forms("marks")["mark"])
