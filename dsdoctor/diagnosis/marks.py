"""Patterns of lines that show how a log went: it failed, it ended well, a compile began. They name no cause."""

import enum
from dataclasses import dataclass


class Event(enum.Enum):
    """What a mark shows."""

    FAILED = "failed"
    ENDED_WELL = "ended well"
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


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A pattern of lines that show an event; ``words`` and ``pattern`` as in Signature."""

    event: Event
    words: str
    pattern: str


MARKS = (
    Mark(event=Event.TRACEBACK, words="traceback", pattern=r"Traceback \(most recent call last\)"),
    Mark(
        event=Event.COMPLAINED,
        words="error",
        pattern=r"^(?:error|ERROR(?!: pip's dependency))[: ]|[^2]: error:",
    ),
    Mark(event=Event.FAILED, words="fatal", pattern=r"fatal error\b(?! LNK1181: .{0,60}(?:aio|cufile)\.lib)"),
    Mark(
        event=Event.FAILED,
        words="exits exitcode main+received exit+code exit+status exited+code exited+status complete+code zero+code",
        pattern=r"exits with return code = -?[1-9]|Main process received SIG|exitcode\s*: -?[1-9]|non-zero code: [1-9]"
        r"|(?:[Ee]xit(?:ed)?|did not complete).{0,60}?(?:code|status):? {0,8}-?[1-9]\d*\b",
    ),
    Mark(
        event=Event.FAILED,
        words="failed+building failed+build subprocess metadata+generation ninja+stopped wheels+build",
        pattern=r"Failed (?:building|to build)|subprocess-exited-with-error|metadata-generation-failed|ninja: "
        r"build stopped|Could not build wheels",
    ),
    Mark(
        event=Event.FAILED,
        words="childfailederror aborted segmentation dumped killed",
        pattern=r"ChildFailedError|Aborted\b|Segmentation fault|core dumped|^Killed\b|\sKilled\s",
    ),
    Mark(event=Event.FAILED, words="nvcc+fatal ptxas+fatal", pattern=r"(?:nvcc|ptxas) fatal"),
    Mark(
        event=Event.FAILED,
        words="make fatal mpirun",
        pattern=r"^(?:fatal(?!: not a git)[: ]|make(?:\[\d\])?: \*\*\*|mpirun (?:has|was))",
    ),
    Mark(
        event=Event.EXCEPTION,
        words="runtimeerror valueerror typeerror keyerror attributeerror importerror modulenotfounderror assertionerror "
        "indexerror oserror connectionerror floatingpointerror filenotfounderror permissionerror nameerror "
        "outofmemoryerror exception distbackenderror "
        "diststoreerror distnetworkerror calledprocesserror validationerror",
        pattern=r"^(?:[\w.]{1,80}\.)?[A-Z]\w{2,60}(?:Error|Exception): ",
    ),
    Mark(
        event=Event.ENDED_WELL,
        words="successfully finished",
        pattern=r"Successfully (?:installed|built) .{0,400}\bdeepspeed\b|exits successfully|Finished processing "
        r"dependencies for deepspeed",
    ),
    Mark(
        event=Event.ENDED_WELL,
        words="train_runtime training+completed training+finished training+complete training+done",
        pattern=r"'train_runtime':|[Tt]raining (?:completed|finished|complete|done)\b",
    ),
    Mark(
        event=Event.WAITING,
        words="extensions+root patching+ldflags extension+directory waited+lock",
        pattern=r"as PyTorch extensions root|Waited on lock file|Detected CUDA files, patching ldflags"
        r"|Creating extension directory",
    ),
    Mark(
        event=Event.COMPILING,
        words="dtorch_extension_name building failed+o failed+code",
        pattern=r"-DTORCH_EXTENSION_NAME|[Bb]uilding (?:extension|wheel for|')|^FAILED: \S",
    ),
    Mark(event=Event.LOADED, words="time+load", pattern=r"Time to load \w+ op"),
    Mark(event=Event.CANCELLED, words="cancelled keyboardinterrupt", pattern=r"CANCELLED AT|^KeyboardInterrupt"),
    Mark(
        event=Event.NO_GPU,
        words="torch+did cuda+runtime",
        pattern=r"Torch did not find cuda available|No CUDA runtime is found",
    ),
    Mark(
        event=Event.WINDOWS,
        words="appdata users winerror pyd lnk1181 lnk1104 lnk1120 c1083",
        pattern=r"\b[A-Z]:\\|WinError|\.pyd\b|LNK1\d\d\d|C1083",
    ),
    Mark(
        event=Event.COMPILER_ERROR,
        words="error fatal",
        pattern=r"^\S{1,300}(?::\d+|\(\d+\))(?::\d+)?: (?:fatal |catastrophic )?error: |^(?:nvcc|ptxas"
        r"|nvlink) (?:fatal|error) {1,4}: "
        r"|^(?:\S{0,200}/)?(?:clang(?:\+\+)?|ld\.lld|cc1plus|g\+\+|gcc|c\+\+): (?:fatal )?error: "
        r"(?!linker command|no input)",
    ),
    Mark(
        event=Event.GPU_FAULT,
        words="cuda+memory cuda+error outofmemoryerror hip+memory hip+error",
        pattern=r"\b(?:CUDA|HIP) out of memory|\bOutOfMemoryError: |\b(?:CUDA|HIP) error: (?:out of memory|an illegal memory access"
        r"|device-side assert|unspecified launch|misaligned address|uncorrectable ECC|an illegal instruction|unknown error)",
    ),
)
