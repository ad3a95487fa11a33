"""The state of one op while it is compiled: its progress, its log, its result. Runs nothing itself."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsdoctor.builder.make.commands import Command, OpCommands
from dsdoctor.builder.make.first_error import first_error
from dsdoctor.builder.make.op_cache import Made
from dsdoctor.core.build_models import OpPlan, OpProgress
from dsdoctor.core.files import PRIVATE, append_text
from dsdoctor.core.host import Completed
from dsdoctor.core.redaction import Hidden


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of one op. ``library`` is the shared object, None where there is none; ``because`` is why.

    ``cpu_seconds`` and ``peak_memory`` (bytes, of the largest process) are those of its compilers: 0 where it was ``cached``.
    """

    op: str
    library: Path | None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    cached: bool = False
    because: str | None = None
    log: Path


Watch = Callable[[OpProgress], None]


@dataclass
class OpWork:
    """One op that is being compiled. Its commands run in several threads; ``lock`` guards the log and the figures.

    ``wrong`` holds the lines that may name the error, ``linked`` what the linker printed; ``hidden`` is what no line may hold.
    """

    plan: OpPlan
    commands: OpCommands
    log: Path
    hidden: Hidden = field(default_factory=lambda: Hidden({}))
    error: str | None = None
    started: float | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    done: int = 0
    library: Path | None = None
    cached: bool = False
    interrupted: bool = False
    expected: float | None = None
    wrong: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> str:
        """How it ended, as OpProgress names it."""
        if self.library is None:
            return "interrupted" if self.interrupted and not self.wrong else "failed"
        return "cached" if self.cached else "built"

    def progress(self, state: str) -> OpProgress:
        """How far it is."""
        total = len(self.commands.compile)
        return OpProgress(op=self.plan.op, state=state, done=self.done, total=total, expected=self.expected)

    def write(self, *lines: str) -> None:
        """Add lines to its log, together: other commands of it may write at the same time."""
        with self.lock:
            append_text(self.log, "".join(f"{self.hidden.out_of(line)}\n" for line in lines), mode=PRIVATE)

    def fail(self, *lines: str) -> None:
        """Add lines to its log that say why it failed."""
        self.wrong += [self.hidden.out_of(line) for line in lines]
        self.write(*lines)

    def interrupt(self, line: str) -> None:
        """Add a line to its log that says that the user ended it."""
        self.interrupted = True
        self.write(line)

    def begin(self) -> None:
        """A command begins."""
        with self.lock:
            if self.started is None:
                self.started = time.monotonic()

    def end(self, command: Command, ended: Completed, output: list[str]) -> None:
        """A command has ended, with that output."""
        with self.lock:
            self.seconds = time.monotonic() - (self.started or 0.0)
            self.cpu_seconds += ended.cpu_seconds
            self.peak_memory = max(self.peak_memory, ended.peak_memory)
            self.done += 1 if command.source and not ended.status else 0
            self.linked += [] if command.source else output

    def made(self, library: Path) -> Made:
        """What the cache keeps of it."""
        return Made(
            library=library,
            commands=self.commands,
            linked=tuple(self.linked),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
        )

    def ended(self) -> Compiled:
        """Its result."""
        because = None if self.library else self.error or first_error(self.wrong) or "interrupted"
        return Compiled(
            op=self.plan.op,
            library=self.library,
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            peak_memory=self.peak_memory,
            cached=self.cached,
            because=because,
            log=self.log,
        )
