"""What a process says when it fails: its own exception or crash, or only that another one is gone."""

import re
from dataclasses import dataclass

from dsdoctor.diagnosis.speakers import NOBODY, Speaker

EXCEPTION_LINE = re.compile(
    r"(?:(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,80}"
    r"(?:Error|Exception|Exit|Interrupt|Timeout|Warning|Failure|Iteration|Empty|Full"
    r"|NotFound|Stop\w{0,20})(?=: |:?$)"
    r"|(?:[a-z_]{1,40}\.){1,4}(?:gaierror|timeout|error)(?=: )"
    r"|(?:[A-Za-z_]\w{0,60}\.){1,8}[A-Z]\w{0,80}(?=: |:?$)|[A-Z][a-z]\w{0,80}(?=: ))"
)
"""The last line of a traceback: a class with its module, or one that is named like an exception."""

FOLLOWS = re.compile(
    r"[Cc]onnection (?:was )?(?:closed by (?:remote )?peer|reset by peer)|Connection was likely closed"
    r"|ncclRemoteError"
    r"|remote process exited|Timed out waiting \d{1,12}ms for|wait timeout after|[Ww]atchdog|Socket Timeout"
    r"|got 0 bytes|store based barrier|Timed out after \d{1,9} seconds waiting for clients|monitoredBarrier"
    r"|[Cc]ommunicator was aborted"
    r"|NCCL operations have failed|RendezvousConnectionError|RendezvousClosedError|RendezvousTimeoutError"
    r"|^ConnectionResetError"
    r"|^(?:\w{1,40}\.)?BrokenPipeError|^EOFError$|^ConnectionRefusedError"
    r"|c10::DistBackendError|has been marked as aborted|collective timeout"
)
"""Words of an exception, or of a crash, that only says that another rank is gone or does not come."""

LOST = re.compile(r"[Cc]onnection (?:was )?(?:closed|reset)|BrokenPipe|got 0 bytes|ncclRemoteError")
"""That another process is gone: what says so has not waited."""

LAUNCHER = re.compile(
    r"(?:[\w.]{0,120}\.)?ChildFailedError\b"
    r"|(?:subprocess\.)?CalledProcessError: Command .{0,4000}(?:train|python|torchrun|deepspeed)"
    r"|(?:[\w.]{0,120}\.)?SignalException\b|SystemExit\b|(?:[\w.]{0,120}\.)?ProcessExitedException"
)
"""The launcher's own exception, which names no cause."""

PASSES_ON = re.compile(
    r"(?:\w{1,60}\.){0,6}(?:(?:Base)?ExceptionGroup|ProcessRaisedException|PythonException|RayTaskError)\b"
)
"""An exception whose message is the traceback of another one, which stands below."""

NATIVE = re.compile(
    r"terminate called (?:after throwing an instance of '(?P<type>[^']{1,160})'|without an active exception)"
    r"|Assertion [`'\"].{1,400}?['\"]? failed|Assertion failed: |^Fatal Python error: (?P<fatal>.{1,80})"
    r"|^(?:free|malloc|realloc|munmap_chunk|corrupted)\(?\)?: (?:invalid|corrupted|unaligned|double)|double free or corruption"
    r"|\*\*\* stack smashing detected|\.(?:cc|cpp|cu|h):\d{1,6}\S{0,4} {0,3}Check failed: |NVRM: Xid"
)
"""How a program that is not Python says that it breaks off."""


BEGINNINGS = {"<module>", "_run_module_as_main", "_bootstrap", "_wrap"}
"""The functions in which a program, and a process that it started, begin."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A place in a source file."""

    path: str
    line: int
    function: str
    source: str = ""

    @property
    def own(self) -> bool:
        """Whether it is the user's: of no installed package, and not of dsdoctor, which watched it."""
        return not re.search(
            r"site-packages|dist-packages|^<(?!ipython-input)|\.p(?:yx|xi)$|[/\\]lib[/\\]python3"
            r"|[/\\]dsdoctor[/\\](?:overflow|run|memory|hang|checkpoint)[/\\]"
            r"|[/\\]deepspeed[/\\](?:runtime|ops|comm|moe|sequence|inference|module_inject|launcher|utils|checkpoint)[/\\]",
            self.path,
        )

    def __str__(self) -> str:
        return f"{self.place} {self.function}"

    @property
    def place(self) -> str:
        """The file, with the line where it is known."""
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A process failed with these words. ``since``: the first line of what belongs to it. ``frames``: outermost first.

    ``went_on_from``: what stands before this line was followed by steps of the training before this failure; 0: unknown.
    """

    line: int
    text: str
    speaker: Speaker = NOBODY
    since: int = 0
    frames: tuple[Frame, ...] = ()
    step: int | None = None
    native: bool = False
    after_watchdog: bool = False
    went_on_from: int = 0

    @property
    def rooted(self) -> bool:
        """Whether its traceback begins where a program does: what is caught and printed begins where it was caught."""
        return bool(self.frames) and self.frames[0].function in BEGINNINGS

    @property
    def follows(self) -> bool:
        """Whether it only says that another process is gone, or does not come."""
        return self.after_watchdog or bool(FOLLOWS.search(self.text))

    @property
    def of_the_launcher(self) -> bool:
        """Whether a launcher says it of its children."""
        if LAUNCHER.match(self.text):
            return True
        return bool(self.frames) and bool(re.search(r"torch/distributed/(?:run|launcher)", self.frames[-1].path))

    @property
    def own(self) -> bool:
        """Whether the process failed by itself."""
        return not self.follows and not self.of_the_launcher

    @property
    def raised_by_the_script(self) -> bool:
        """Whether the user's own code raised it on purpose, so that its words are the cause."""
        last = self.frames[-1] if self.frames else None
        return bool(last and last.own and last.source.startswith(("raise ", "assert ")))

    @property
    def frame(self) -> Frame | None:
        """The innermost place in the user's own files; without one, the innermost."""
        own = [frame for frame in self.frames if frame.own]
        return (own or list(self.frames) or [None])[-1]  # type: ignore[list-item]
