"""What a log shows of health, an end or progress, and the lines after it that are errors by their form alone.

No rule of the catalogue is asked: a log is healthy where something shows it, and not because nothing is known against it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsdoctor.diagnosis.failures import FRAME
from dsdoctor.diagnosis.lines import segments
from dsdoctor.diagnosis.mentions import PROMPT, SHOWN, is_said
from dsdoctor.diagnosis.models import Line
from dsdoctor.diagnosis.progress import FINITE, GOES_ON, STEP

HINTS: tuple[bytes, ...] = (
    *(
        b"rror",
        b"RROR",
        b"xception",
        b"FAILED",
        b"ABORT",
        b"atal",
        b"FATAL",
        b"CRITICAL",
        b"panic",
        b"olution",
        b"solve",
    ),
    *(b"E0", b"E1", b"F0", b"F1", b"C0", b"C1", b'File "', b"\xc3\x97 ", b"x Failed"),
    *(b"EI0", b"EJ0", b"EZ9", b"EE9", b"EH9", b"what():", b"ERR", b"most recent call"),
)
"""Parts of every error by form, and of places of tracebacks: a batch of lines without them is not looked at."""

MAYBE = re.compile(
    rb"(?:Error|Exception)(?:\(\w{1,80}\))?(?::|\s*$)|(?:[Ee]rror|ERROR|[Ff]atal|FATAL)(?: \w{1,20})?: |FAILED: |MPI_ABORT"
    rb"|[EFC][01]\d{3}|\xc3\x97 |x Failed|olution|solve for|panic|Exception in thread|E[EHIJZ]\d|ERR|CRITICAL|FATAL"
    rb"|CMake Error|(?:CUDA|HIP) error|what\(|File \"|most recent call"
)
"""A part of each of them, more closely: only such a line is cleaned."""

PROGRESS_HINTS: tuple[bytes, ...] = (
    *(b"tep", b"STEP", b"ter", b"oss", b"LOSS", b"poch", b"%|", b"build time", b"Would install", b"uccessfully"),
    *(
        b"finished with",
        b"already satisfied",
        b"compiled w.",
        b"Installed ",
        b"Audited ",
        b"Built target",
        b"heckpoint",
    ),
)
NINJA = re.compile(rb"^\[\d{1,6}/", re.MULTILINE)
"""Parts of all progress and all ends."""

MAX_LENGTH = 4000
"""So many bytes of a line are looked at, counted from its end."""

ERROR = re.compile(
    r"(?:[A-Za-z_]\w{0,60}\.){0,8}(?:[A-Z]\w{0,80})?(?:Error|Exception)(?:\(\w{1,80}\))?(?:: |:?$)"
    r"|(?:[\w./+-]{1,120}(?:\[\d{1,9}\])?: )?(?:fatal |internal |catastrophic )?(?:[Ee]rror|ERROR|[Ff]atal|FATAL)(?: \w{1,20})?: "
    r"|FAILED: \S|(?:.{0,40} )?MPI_ABORT was (?:invoked|called)|[EFC]\d{4}(?:\d{4})? \d\d:\d\d:\d\d\.\d"  # ninja, MPI, glog
    r"|[×x] (?:No solution found|Failed to)|ResolutionImpossible|.{0,60}[Uu]nsatisfiable\w{0,20}Error"  # solvers
    r"|Could not solve for environment|(?:thread '.{0,80}' panicked at|panic: |Exception in thread \")"  # conda, Rust, Go, Java
    r"|CMake Error|npm ERR!|(?:CUDA|HIP) error: |what\(\): "
)
"""How a line begins that is an error by its form."""

ASCEND = re.compile(rb"\bE[EHIJZ]\d{4}: |\bERR\d{5} \w")
"""The number of an error of Ascend's runtime; as a label it is no part of the clean line."""

LEVEL = re.compile(r"(?:^|[\s\[|])(?:ERROR|CRITICAL|FATAL)(?:[\s\]|]|:\S{0,60}:)")
"""The level of a logger's line that is an error. It stands near the head."""

NO_ERROR = re.compile(
    r"(?:ERROR: )?pip's dependency resolver|collect2: error: ld returned|fatal: not a git repository"
    r"|.{0,160}Unable to register cu\w{2,6} factory"
)
"""What looks like an error and is printed by runs that are well."""

PROGRESS = re.compile(rb"\b[Ee]poch['\"]?[ =:\[(]{1,3}\d|\d{1,3}%\|.{0,200}?\|\s{0,9}\d|^\[\d{1,6}/\d{1,6}\] \S")
"""An epoch, a progress bar, a step of ninja."""

END = re.compile(
    rb"deepspeed build time = |^Would install |Successfully (?:installed|built|uninstalled) |finished with status 'done'"
    rb"|Requirement already satisfied: |deepspeed wheel compiled w\.|^(?:Installed|Audited) \d{1,6} packages? in |Built target "
    rb"|[Ss]av(?:ed|ing) (?:model )?checkpoint"
)
"""The end of a part of an installation, a build, a report or a training."""

WENT_ON = 3
"""After so many lines of progress an error by form is known to have been survived."""


A_WARNING = b": warning: "
"""What compilers only warn of."""

MAX_ERRORS = 64
"""So many lines that are errors by their form are remembered."""

HEADER = b"(most recent call "
"""How Python begins the places of a traceback."""


@dataclass
class Health:
    """A log while it is read. ``progress`` and ``end``: the last line that shows it, 0 where none does.

    ``errors``: the lines that are errors by their form, ``frame``: the first place of a traceback without its head, after which
    there was neither an end nor enough progress. ``steps``: how many lines of progress there were since.
    """

    progress: int = 0
    end: int = 0
    errors: list[Line] = field(default_factory=list)
    frame: Line | None = None
    steps: int = 0
    begun: bool = False
    """Whether a traceback has begun and not yet ended."""

    def pass_lines(self, batch: Sequence[bytes], first: int) -> None:
        """Take the next lines; ``first`` is the number of the first of them."""
        whole = b"\n".join(batch).replace(b"\0", b"")
        # why: what is searched line by line costs as much as all else, and most batches have nothing of it
        hints = [hint for hint in HINTS if hint in whole] if len(self.errors) < MAX_ERRORS else []
        shows = any(hint in whole for hint in PROGRESS_HINTS) or NINJA.search(whole)
        if not hints and (not shows or not self._wants_progress):
            return
        for number, raw in enumerate(batch, first):
            if any(hint in raw.replace(b"\0", b"") for hint in hints) and self._is_trouble(raw, number):
                continue
            if shows and self._wants_progress:
                self._take_progress(raw, number)

    @property
    def _wants_progress(self) -> bool:
        """Whether one more line of progress would add to what is known."""
        return not (self.progress or self.end) or bool(self.errors) or self.frame is not None or self.begun

    def _is_trouble(self, raw: bytes, number: int) -> bool:
        """Whether a line is an error by its form, or a place of a traceback. It is remembered."""
        raw = raw[-MAX_LENGTH:].replace(b"\0", b"")
        if A_WARNING in raw or not MAYBE.search(raw):
            return False
        texts = segments(raw)
        if HEADER in raw:
            self.begun, self.steps = True, 0
        elif any(text.startswith('File "') and FRAME.match(text) for text in texts):
            if not self.begun and self.frame is None:
                self.frame, self.steps = Line(number, texts[-1]), 0
        elif text := next((text for text in texts if is_error(text, raw)), ""):
            self.begun = False
            self.steps = 0
            if len(self.errors) < MAX_ERRORS:
                self.errors.append(Line(number, text))
        else:
            return False
        return True

    def _take_progress(self, raw: bytes, number: int) -> None:
        tail = raw[-400:]
        if END.search(raw[:400]):
            self.end = number
        elif STEP.search(tail) or FINITE.search(tail) or PROGRESS.search(tail):
            self.progress = number
            self.steps += 1
        else:
            return
        if self.end == number or self.steps >= WENT_ON:
            self.errors.clear()
            self.frame, self.begun = None, False


def is_error(text: str, raw: bytes = b"") -> bool:
    """Whether a clean line is an error by its form.

    >>> [is_error(text) for text in ("FAILED: x.cuda.o", "RayTaskError(ActorDiedError)", "ld: error: cannot find -lx")]
    [True, True, True]
    >>> [is_error(text) for text in ("errors: 0", "ERROR tracker: refused, will retry", "$ grep 'KeyError: x' run.log")]
    [False, False, False]
    """
    known = ERROR.match(text) or LEVEL.search(text[:120]) or ASCEND.search(raw[:200])
    if not known or NO_ERROR.match(text):
        return False
    return not (GOES_ON.search(text) or PROMPT.match(text) or SHOWN.match(text) or is_said(raw))
