"""An exception that ends a rank, a script or a thread, read once: what it says, what it came of, and where it was raised.

Holds nothing of the exception itself, whose traceback keeps the frames and all that they hold. Standard library alone: it is read
in the rank, at its end.
"""

import errno
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dsdoctor.core.script import is_user_file

MAX_LINE_CHARACTERS = 300
MAX_FRAMES = 30
MAX_CAUSES = 32
PEER_DISCONNECT = re.compile(r"(closed|reset) by peer|Broken pipe|remote (process|worker)", re.IGNORECASE)
"""What libraries say when another rank is gone."""


@dataclass(frozen=True, slots=True)
class FailureFrame:
    """A line that an exception came through."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One exception of a failure. ``kinds``: its class and those above it. ``printed``: class and message as Python prints them, of
    code that Python could not read the place, too."""

    kinds: tuple[str, ...]
    message: str
    printed: str
    errno: int | None = None

    @property
    def refuses_memory(self) -> bool:
        """Whether its class says that the host had no memory."""
        return "MemoryError" in self.kinds or self.errno == errno.ENOMEM


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """``line``: its class and message. ``causes``: the exception itself, then what it was raised from or while treating, and the
    parts of a group. ``frames``: outermost first."""

    line: str
    causes: tuple[Cause, ...]
    frames: tuple[FailureFrame, ...]

    @property
    def place(self) -> FailureFrame | None:
        """The innermost line of the user's own; of a failure that has none the innermost."""
        own = [frame for frame in self.frames if is_user_file(frame.file)]
        return (own or list(self.frames))[-1] if self.frames else None


def read_failure(error: BaseException) -> Failure:
    """An exception as a record."""
    return Failure(
        line=line_of(error), causes=tuple(map(_cause, islice(causes_of(error), MAX_CAUSES))), frames=_frames(error)
    )


def line_of(error: BaseException) -> str:
    """The class and message of an exception that is handled or has ended something.

    >>> line_of(KeyError("label")), line_of(MemoryError())
    ("KeyError: 'label'", 'MemoryError')
    """
    return f"{type(error).__name__}: {_message(error)}"[:MAX_LINE_CHARACTERS].removesuffix(": ")


def is_peer_disconnect(line: str) -> bool:
    """Whether an exception, as a line, only says that another rank is gone.

    >>> is_peer_disconnect("RuntimeError: Connection closed by peer [127.0.0.1]:18337"), is_peer_disconnect("KeyError: 'x'")
    (True, False)
    """
    return PEER_DISCONNECT.search(line) is not None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, what caused it, the parts of a group, and so on, the nearest first. They may form a circle: each comes once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            parts = _parts(each)
            group = parts if isinstance(parts, (tuple, list)) else ()
            waiting += [each.__cause__, each.__context__, *(part for part in group if isinstance(part, BaseException))]


def _parts(error: BaseException) -> object:
    """The parts of a group. An exception of the script's own may raise anything where it is asked for what it has not."""
    try:
        return getattr(error, "exceptions", ())
    except Exception:
        return ()


def _cause(error: BaseException) -> Cause:
    return Cause(
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        message=_message(error),
        printed=_printed(error),
        errno=error.errno if isinstance(error, OSError) else None,
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a message of its own making
        return ""


def _printed(error: BaseException) -> str:
    try:
        if isinstance(error, SyntaxError):
            return f"{type(error).__name__}: {error}"
        return "".join(traceback.format_exception_only(type(error), error)).strip()
    except Exception:  # as its message
        return f"{type(error).__name__}: {_message(error)}"


def _frames(error: BaseException) -> tuple[FailureFrame, ...]:
    """The innermost ``MAX_FRAMES``, and the innermost of the user's own where that is further out."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(FailureFrame(code.co_filename, trace.tb_lineno or 0, code.co_name))
        trace = trace.tb_next
    inner = found[-MAX_FRAMES:]
    if any(is_user_file(frame.file) for frame in inner):
        return tuple(inner)
    own = [frame for frame in found if is_user_file(frame.file)]
    return (*own[-1:], *inner)
