"""What each process of a run did: its steps and losses, its tracebacks and other failures, and how it ended."""

import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from dsdoctor.diagnosis.catalogue import Event
from dsdoctor.diagnosis.lines import EXCEPTION_LINE, Line, last_segment
from dsdoctor.diagnosis.owner import LIBRARIES, PYTHON, is_relay, owner_of
from dsdoctor.rules.store import Table, form, forms

# A raw line of a log -> which process wrote it, as far as its prefix says. Reads only the head of the line.
MAX_HEAD_BYTES = 240

COLOUR_OF_HEAD = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")

RANK_LABEL = re.compile(rb"\[(?:rank ?|Rank )(\d{1,5})\]|(?:^|[\]:|] ?)rank(\d{1,5}): ")

LOCAL_LABEL = re.compile(rb"\[default(\d{1,5})\]:?|^default(\d{1,5}): ")

MPI_LABEL = re.compile(rb"^\[\d{1,5},(\d{1,5})\]<std(?:out|err)>")

TASK_LABEL = re.compile(rb"^ {0,4}(\d{1,5}): ")

RAY_LABEL = re.compile(
    rb"^\(((?:[\w.:\[\]=-]{1,80}(?:, \w{1,20}=[\w.-]{1,40}){0,3},? )?pid=\d{1,9}(?:, ip=[\w.:]{3,40})?"
    rb"|raylet(?:, ip=[\w.:]{3,40})?)\) "
)

HOST_LABEL = re.compile(rb"^(?:\[(?:pod/)?([A-Za-z][\w./-]{0,80})\] |([A-Za-z][\w.-]{0,60}\d[\w.-]{0,20})(?: \| |: ))")


@dataclass(frozen=True)
class Speaker:
    """A process that writes to a log: its rank, its number on its node or in its Slurm step, its host; None where unknown."""

    rank: int | None = None
    local: int | None = None
    task: int | None = None
    host: str = ""

    @property
    def number(self) -> int | None:
        """The rank, or what stands for it where nothing else is known."""
        numbers = (self.rank, self.task, self.local)
        return next((number for number in numbers if number is not None), None)


NOBODY = Speaker()


def speaker_of(raw: bytes, *, tasks: bool = False) -> Speaker:
    """Who wrote a line. ``tasks``: a number at the head is that of a Slurm task.

    >>> speaker_of(b"[default1]:[rank5]: Traceback (most recent call last):").rank
    5
    >>> speaker_of(b"node-2: [rank7]: x").host, speaker_of(b"3: step 1", tasks=True).task, speaker_of(b"3: step 1").number
    ('node-2', 3, None)
    """
    head = raw[:MAX_HEAD_BYTES]
    if b"\x1b" in head:
        head = COLOUR_OF_HEAD.sub(b"", head)
    rank, local, task = RANK_LABEL.search(head), LOCAL_LABEL.search(head), (TASK_LABEL.match(head) if tasks else None)
    if rank is None:
        rank = MPI_LABEL.match(head)
    host = HOST_LABEL.match(head) or RAY_LABEL.match(head)
    return Speaker(
        rank=_number_in(rank),
        local=_number_in(local),
        task=_number_in(task),
        host=next((part for part in host.groups() if part), b"").decode() if host else "",
    )


def same_process(one: Speaker, other: Speaker) -> bool:
    """Whether two lines may be of one process: no number that both have differs.

    >>> same_process(Speaker(local=1), Speaker(rank=1, local=1)), same_process(Speaker(rank=1), Speaker(rank=2))
    (True, False)
    """
    if one.rank is not None and other.rank is not None:
        return one.rank == other.rank
    if one.task is not None and other.task is not None:
        return one.task == other.task
    if one.host and other.host and one.host != other.host:
        return False
    return one.number == other.number


def are_two(one: Speaker, other: Speaker) -> bool:
    """Whether two lines are surely of two processes: both are numbered, and not alike.

    >>> are_two(Speaker(rank=1), Speaker(rank=2)), are_two(Speaker(rank=1), Speaker())
    (True, False)
    """
    return one.number is not None and other.number is not None and not same_process(one, other)


def _number_in(found: re.Match[bytes] | None) -> int | None:
    return next(int(group) for group in found.groups() if group) if found else None


FOLLOWS, LAUNCHER = form("processes", "another-is-gone"), form("processes", "launcher")
PASSES_ON, NATIVE = form("processes", "passes-on"), form("processes", "native")

LOST = re.compile(r"[Cc]onnection (?:was )?(?:closed|reset)|BrokenPipe|got 0 bytes|ncclRemoteError")
"""That another process is gone: what says so has not waited."""

CONDITION_ENDS = re.compile(r",\s{0,4}f?[\"'(]|, \\$|, $|\\$")
"""Where the condition of an assertion ends, and its message begins."""

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
    def owner(self) -> str:
        """The project that it belongs to; "" for the user's own code."""
        return owner_of(self.path)

    @property
    def own(self) -> bool:
        """Whether it is the user's own: of no project, installed or cloned."""
        return not self.owner

    @property
    def is_relay(self) -> bool:
        """Whether it only passes on what somebody else raised."""
        return is_relay(self.path, self.function)

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
    notice: Line | None = None  # what its process said just before of something that was missing, refused or ignored

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
    def on_purpose(self) -> bool:
        """Whether somebody raised it on purpose, so that its words are a statement."""
        last = self.raiser
        return bool(last and last.source.startswith(("raise ", "assert ")))

    @property
    def raised_by_the_script(self) -> bool:
        """Whether the user's own code raised it on purpose, so that its words are the cause."""
        return bool(self.on_purpose and self.raiser and self.raiser.own)

    @property
    def condition(self) -> str:
        """What an assertion asserts; "" for any other exception."""
        last = self.frames[-1] if self.frames else None
        if last is None or not last.source.startswith("assert ") or not self.text.startswith("AssertionError"):
            return ""
        return CONDITION_ENDS.split(last.source.removeprefix("assert "))[0].strip()[:160]

    @property
    def raiser(self) -> Frame | None:
        """The innermost place that does not only pass on what others raise; the innermost one where all do."""
        return next((frame for frame in reversed(self.frames) if not frame.is_relay), next(reversed(self.frames), None))

    @property
    def last_of_a_project(self) -> Frame | None:
        """The innermost such place that is not Python's own library."""
        frames = (frame for frame in reversed(self.frames) if not frame.is_relay and frame.owner != PYTHON)
        return next(frames, self.raiser)

    @property
    def giver(self) -> Frame | None:
        """The place that passed what was refused to the one who raised it: the nearest above it that is the user's own or of a
        program that one runs, else the nearest of another library; None where there is none above.
        """
        raiser = self.last_of_a_project
        if raiser is None:
            return None
        above = self.frames[: self.frames.index(raiser)]
        others = [one for one in reversed(above) if not one.is_relay and one.owner not in {raiser.owner, PYTHON}]
        return next((one for one in others if one.own or one.owner not in LIBRARIES), next(iter(others), None))

    @property
    def frame(self) -> Frame | None:
        """The innermost place in the user's own files; without one, the innermost of a project."""
        return next((frame for frame in reversed(self.frames) if frame.own), self.last_of_a_project)


# A line of a traceback -> the place it names: as Python prints it, rich in a box, a notebook of today and of old.
#
# Nothing else is read from it; which lines belong to a traceback is known elsewhere.
FRAME = re.compile(
    r"File \"(?P<path>[^\"]{1,400})\", line (?P<line>\d{1,7})(?:, in (?P<function>\S{1,120}))?"
    r"|File (?P<path_n>[^\s:\"]{1,300}):(?P<line_n>\d{1,7}), in (?P<function_n>[\w.<>]{1,120})"  # a notebook
    r"|(?P<path_o>[/~.][^\s:\"]{1,300}\.py|<ipython-input-[\w-]{1,60}>) in (?P<function_o>[\w<>]{1,120})"  # an old one
    r"|(?P<path_r>[/~.\w][^\s:\"]{0,300}\.\w{1,4}):(?P<line_r>\d{1,7}) in (?P<function_r>[\w.<>]{1,120})"  # rich
    r"|(?P<path_c>(?:Cell|Input) In ?\[\d{1,6}\])(?:, line (?P<line_c>\d{1,7})|(?=, in ))"  # a cell of a notebook
    r"(?:, in (?:<cell line: (?P<line_d>\d{1,7})>|(?P<function_c>[\w.<>]{1,120})))?"
)

POINTED_AT = re.compile(r"(?:❱|-{1,6}>) ?(?P<line>\d{1,7})[ │|]{0,40}(?P<source>.{0,200}?)[ │|]{0,200}$")
"""The line of source that rich and notebooks point at."""

NUMBERED_SOURCE = re.compile(r"\d{1,7}(?: {2,}| ?[│|])")
"""Another line of source, as rich and notebooks show them around that one."""

NUMBERED_AT_THE_TOP = re.compile(r"\d{1,7} \S")  # a line of source that is not indented, as notebooks show it
BAR = re.compile(r"[|│] ?")  # what stands before the lines of a group of exceptions, and of a box


def without_bar(text: str) -> str:
    """A line of a box or of a group, without its border."""
    found = BAR.match(text)
    return text[found.end() :].lstrip() if found else text


def frame_of(text: str) -> Frame | None:
    """The place that a line names; its line is 0 where the next lines tell it.

    >>> str(frame_of('File "/w/a.py", line 7, in main')), str(frame_of("File /w/a.py:7, in Table.read(self)"))
    ('/w/a.py:7 main', '/w/a.py:7 Table.read')
    >>> str(frame_of("/w/a.py:7 in main     │")), str(frame_of("/w/a.py in main(x)")), frame_of("at /w/a.py")
    ('/w/a.py:7 main', '/w/a.py main', None)
    >>> str(frame_of("Cell In[5], line 9, in step(batch)")), str(frame_of("Input In [5], in <cell line: 3>()"))
    ('Cell In[5]:9 step', 'Input In [5]:3 <module>')
    """
    found = FRAME.match(text)
    if not found:
        return None
    groups = found.groupdict()
    path, line, function = (
        next((groups[name + kind] for kind in ("", "_n", "_o", "_r", "_c", "_d") if groups.get(name + kind)), "")
        for name in ("path", "line", "function")
    )
    return Frame(path=path, line=int(line or 0), function=function or "<module>")


def shows_numbers(text: str) -> bool:
    """Whether lines of source behind such a frame have numbers.

    >>> shows_numbers("Cell In[5], line 9, in step(batch)"), shows_numbers('File "/w/a.py", line 7, in main')
    (True, False)
    """
    return not text.startswith('File "')


def pointed_at(text: str, frame: Frame) -> Frame | None:
    """The frame with its line of source, where a line points at it.

    >>> frame = Frame(path="/w/a.py", line=0, function="main")
    >>> pointed_at("---> 61     row = rows[key]", frame), pointed_at("60     def f():", frame)
    (Frame(path='/w/a.py', line=61, function='main', source='row = rows[key]'), None)
    """
    found = POINTED_AT.match(text)
    return replace(frame, line=frame.line or int(found["line"]), source=found["source"].strip()) if found else None


# Lines of several processes, mixed -> the exceptions that end their tracebacks, each with its frames.
MAX_OPEN_LINES = 400  # after how many lines without an end a traceback is given up

MAX_FRAMES, MAX_OPEN = 64, 16  # how many frames are kept of a traceback, and how many open ones of each writer
MAX_HANDLED = 2000  # of so many exceptions it is remembered that they were only reported
HOLLOW = re.compile(r"[\w.]{1,120}DatasetGenerationError: An error occurred while generating the dataset$")
"""What is raised on purpose, and says nothing of the exception that it is raised for."""


@dataclass
class OpenTraceback:
    """A traceback that has begun.

    ``handled``: it is part of a warning. ``inset``: it stands within a summary, all its lines further in.
    ``numbered``: its lines of source have numbers.
    ``mixed``: another one of the same writer has begun within it, so frames may be anybody's.
    """

    since: int
    frames: list[Frame] = field(default_factory=list)
    mixed: bool = False
    last: int = 0
    handled: bool = False
    inset: bool = False
    numbered: bool = False


@dataclass
class Tracebacks:
    """The tracebacks that are open, by who writes them, and the exceptions that ended some."""

    open: dict[Speaker, list[OpenTraceback]] = field(default_factory=dict)
    ended: dict[Speaker, Failure] = field(default_factory=dict)
    chained: dict[Speaker, Failure] = field(default_factory=dict)
    """The exception that the next one of the same writer goes on from."""

    handled_line: int = 0
    handled_lines: set[int] = field(default_factory=set)
    """The last line, and the first lines, with an exception that was only reported in a warning, or ignored."""

    def begin(self, speaker: Speaker, line: int, *, handled: bool = False, inset: bool = False) -> None:
        """A traceback begins on this line."""
        mine = self.open.setdefault(speaker, [])
        for other in mine:
            other.mixed = True
        if len(mine) < MAX_OPEN:
            mine.append(OpenTraceback(since=line, last=line, mixed=bool(mine), handled=handled, inset=inset))

    def take(self, text: str, speaker: Speaker, line: int, *, indented: bool) -> Failure | None:
        """Take the next line; the exception, where it ends a traceback."""
        mine = self.open.get(speaker)
        if not mine:
            return None
        first, text = mine[0], without_bar(text)
        if frame := frame_of(text):
            first.frames.append(frame)
            del first.frames[:-MAX_FRAMES]
            first.numbered = shows_numbers(text)
            first.last = line
        elif first.frames and not first.frames[-1].source and (frame := pointed_at(text, first.frames[-1])):
            first.frames[-1] = frame
        elif NUMBERED_SOURCE.match(text) or (first.numbered and NUMBERED_AT_THE_TOP.match(text)):
            return None
        elif (indented or first.inset) and first.frames and not first.frames[-1].source:
            first.frames[-1] = replace(first.frames[-1], source=text[:200])
        elif (first.inset or not indented) and EXCEPTION_LINE.match(text):
            return self._end(speaker, text, line)
        return None

    def note_handled(self, line: int) -> None:
        """The exception of this line was only reported."""
        self.handled_line = line
        if len(self.handled_lines) < MAX_HANDLED:
            self.handled_lines.add(line)

    def stand(self) -> None:
        """What was taken for a report of a logger is the process's own: all its lines are passed on so."""
        for one in (one for mine in self.open.values() for one in mine):
            one.handled = False

    def goes_on(self, speaker: Speaker) -> Failure | None:
        """A line between two exceptions of a chain: the first one of them."""
        if before := self.ended.get(speaker):
            self.chained[speaker] = before
        return before

    def forget(self, line: int) -> None:
        """Give up tracebacks that never ended."""
        kept = {
            speaker: [one for one in mine if line - one.last <= MAX_OPEN_LINES] for speaker, mine in self.open.items()
        }
        self.open = {speaker: mine for speaker, mine in kept.items() if mine}

    def _end(self, speaker: Speaker, text: str, line: int) -> Failure | None:
        mine = self.open[speaker].pop(0)
        left = self.open[speaker]
        if not left:
            del self.open[speaker]
        elif len(left) == 1:
            left[0].mixed = False  # why: the frames that still come are its own
        if mine.handled:
            self.note_handled(line)
            return None
        frames = () if mine.mixed else tuple(mine.frames)
        failure = Failure(line=line, text=text, speaker=speaker, since=mine.since, frames=frames)
        before = self.chained.pop(speaker, None)
        self.ended[speaker] = _told_best(before, failure) if before else failure
        return self.ended[speaker]


def _told_best(first: Failure, last: Failure) -> Failure:
    """Of two exceptions, the second raised while the first was handled, the one that says what is the matter.

    A second one that was raised on purpose puts the first into words; one that only happened came of cleaning up.
    """
    if HOLLOW.match(last.text):
        return first
    on_purpose = last.frames and last.frames[-1].source.startswith("raise ")
    told = last if on_purpose and not last.follows else first
    return replace(told, since=first.since)


# Lines of a run and frames of a traceback -> what it was doing: loading, training in step 812, saving.
STEP = re.compile(
    rb"(?:\b(?:global[_ ])?(?:[Ss]tep|[Ii]ter(?:ation)?)['\"]?\]?\s{0,3}[=:#]?\s{0,3}(\d{1,9})\b(?![.%]))"
    rb"|(?:^|\r|\] ?:?)\s{0,3}\d{1,3}%\|[^|\r]{0,200}\|\s{0,9}(\d{1,9})/\d{1,9} \[\d"
    rb"|\bglobal_step/max_steps['\"]: ?['\"](\d{1,9})/\d|\b[Ee]poch(?:\(train\))?:? {0,3}\[\d{1,6}\]\[ {0,6}(\d{1,9})/\d"
)
"""A step of training: ``step 812``, ``global_step=812``, ``iteration 812/2000``, the 812/2000 of a progress bar,
``Epoch [3][812/2000]``.

A bar with a name, and ``steps = 703``, are of something else.
"""

ENGINE = re.compile(r"checkpoint_engine[/\\]\w{1,60}\.py$")
"""A file of DeepSpeed whose load and save are of checkpoints."""

DOING = tuple((doing["text"], doing["pattern"]) for doing in forms("processes")["doing"])


def step_of(raw: bytes) -> int | None:
    """The number of the step that a line is about.

    >>> step_of(b"{'loss': 2.1, 'step': 812}"), step_of(b" 16%|#  | 118/703 [08:15<40:57,  4.20s/it]"), step_of(b"steps 1.5")
    (812, 118, None)
    """
    found = None
    for found in STEP.finditer(raw):  # noqa: B007
        pass
    return next(int(group) for group in found.groups() if group) if found else None


def last_step(lines: Iterable[bytes]) -> int | None:
    """The step of the last of these lines that names one. ``lines``: the last one first."""
    return next((step for raw in lines if (step := step_of(raw[-400:])) is not None), None)


def activity(frames: tuple[Frame, ...], step: int | None) -> str:
    """What a process was doing, by the functions it was in and the last step before; "" where nothing is known.

    >>> activity((Frame(path="a.py", line=1, function="save_checkpoint"),), 812)
    'while a checkpoint was saved, after step 812'
    >>> activity((Frame(path="d/runtime/checkpoint_engine/torch_checkpoint_engine.py", line=1, function="load"),), None)
    'while a checkpoint was loaded'
    """
    names = [frame.function.rpartition(".")[2] for frame in frames]
    names += [f"{name}_checkpoint" for name, frame in zip(names, frames, strict=True) if ENGINE.search(frame.path)]
    doing = next((text for text, pattern in DOING if any(re.fullmatch(pattern, name) for name in names)), "")
    if step is None:
        return doing
    return f"{doing}, after step {step}" if doing else f"after step {step}"


# Lines with losses and gradient norms -> the series of those that are no numbers.
NAN_LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?-?nan\b", re.IGNORECASE)

NAN_NORM = re.compile(rb"\bgrad_?(?:ient_?)?norm['\"]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?-?nan\b", re.IGNORECASE)

ZERO_LOSS = re.compile(rb"\bloss['\"]?\s{0,3}[:=]\s{0,3}['\"]?0(?:\.0{1,9})?(?![\d.])", re.IGNORECASE)

FINITE = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?\d{1,9}(?:\.\d{1,20})?\b", re.IGNORECASE)


@dataclass
class Series:
    """Losses, or gradient norms, that are no numbers."""

    count: int = 0
    first: int = 0
    last: int = 0
    text: str = ""
    step: int | None = None
    of_norms: bool = False
    before: str = ""  # the step before, where its gradient was no number and its loss was one

    def note(self, raw: bytes, line: int, recent: Sequence[bytes]) -> None:
        """A line with nan, perhaps that of a loss. ``recent``: the lines before it."""
        of_norms = not NAN_LOSS.search(raw)
        if of_norms and not NAN_NORM.search(raw):
            return
        if of_norms and FINITE.search(raw) and not ZERO_LOSS.search(raw):
            if not self.count:
                self.before = last_segment(raw)[:200]
            return  # why: fp16 finds its loss scale by steps whose gradients overflow, and skips them
        if not self.count:
            step = last_step([raw, *reversed(recent)])
            self.first, self.text, self.step, self.of_norms = line, last_segment(raw)[:200], step, of_norms
        self.count += 1
        self.last = line

    def finite_again(self, last_line: int, recent: Sequence[bytes]) -> bool:
        """Whether a loss after the last nan is a number."""
        after = list(recent)[-(last_line - self.last) :] if last_line > self.last else []
        return any(FINITE.search(raw) and not NAN_LOSS.search(raw) and not ZERO_LOSS.search(raw) for raw in after)


# The lines before a process's end -> what its logger said last of an error; a program that catches all prints no traceback.
NEAR_AN_EXIT = 6  # so many lines before the end, at most, stands what a program said of it
A_LOGGER = re.compile(r"(?:^|[\s\[|])(?:ERROR|CRITICAL|FATAL)(?:[\s\]|]|:\S{0,60}:)")
"""The level of a line that tells of an error."""

NO_PROGRAM = re.compile(
    r"torch/distributed|launch\.py:\d|launcher/|srun: |slurm|mpirun|elastic|Root Cause|^ERROR: |exit(?:ed|s|code)?\b.{0,20}\d"
)
"""Lines of launchers and of tools, which tell of another process."""

GOES_ON = re.compile(r"[Rr]etry|[Ss]kip|[Cc]ontinu|again|[Ii]gnor|non-fatal|fall(?:ing)? back")


def last_words(before: Iterable[bytes], line: int) -> tuple[int, str] | None:
    """The number and the text of the line. ``before``: the lines before this one, the last one first.

    >>> last_words([b"", b"2026-11-23 ERROR trainer: Fatal: no rows"], 9), last_words([b"ERROR trainer: bad row, skipping it"], 9)
    ((7, '2026-11-23 ERROR trainer: Fatal: no rows'), None)
    """
    for age, raw in enumerate(islice(before, NEAR_AN_EXIT), 1):
        if STEP.search(raw[-400:]) or FINITE.search(raw[-400:]):
            return None
        text = raw.decode("utf-8", "replace").strip()
        if A_LOGGER.search(text[:200]) and not NO_PROGRAM.search(text):
            return None if GOES_ON.search(text) else (line - age, last_segment(raw)[:400])
    return None


LOCAL_RANK = re.compile(r"--local_rank=(\d{1,5})")

BLOCK_RANK = re.compile(r"^rank\s{1,10}: (\d{1,6}) \(local_rank: (\d{1,5})\)")

EXIT_FORMS = tuple(map(re.compile, forms("processes")["exits"]))

FROM_OUTSIDE = {1, 2, 15}  # Hangup, interrupt and termination: signals that somebody else sends
SIGNALS: Table = forms("processes")["signals"]


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A process ended: with a positive code, or by a signal. ``root``: torchrun says that it was the first one."""

    line: int
    text: str
    code: int
    signal: int | None = None
    rank: int | None = None
    local: int | None = None
    pid: int | None = None
    host: str = ""
    root: bool = False
    time: str = ""
    error_file: str = ""

    @property
    def number(self) -> int | None:
        """The rank, or the number on the node where only that is known."""
        return self.rank if self.rank is not None else self.local

    @property
    def name(self) -> str:
        """``SIGSEGV``, or ``exit code 3``."""
        return signal_name(self.signal) if self.signal else f"exit code {self.code}"


def signal_name(number: int) -> str:
    """The name of a signal.

    >>> signal_name(11), signal_name(99)
    ('SIGSEGV', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_of(text: str, line: int, above: Callable[[], list[str]]) -> Exit | None:
    """What a clean line says of a process that ended badly. ``above``: the lines before it, the last one first.

    >>> exit_of("exitcode  : -11 (pid: 7)  (SIGSEGV)", 9, lambda: ["rank      : 3 (local_rank: 1)", "host: a"]).rank
    3
    >>> exit_of("command terminated with exit code 137", 1, list).name
    'SIGKILL'
    """
    found = next(filter(None, (one.search(text) for one in EXIT_FORMS)), None)
    if found is None:
        return None
    groups = {name: value for name, value in found.groupdict().items() if value}
    code, number = _code_and_signal(groups)
    if not code and not number:
        return None
    several = "more" in groups
    block = above() if text.startswith("exitcode") else []
    rank, local, root = _of_the_block(block)
    if "task" in groups and not several:
        rank = int(groups["task"])
    if "exits with return code" in text and (found := LOCAL_RANK.search(text)):
        local = int(found[1])
    return Exit(
        line=line,
        text=text[:300],
        code=code,
        signal=number,
        rank=rank,
        local=local if local is not None else _int(groups.get("local")),
        pid=_int(groups.get("pid")),
        host=groups.get("host", "") or _entry("host", block),
        root=root,
        time=_entry("time", block),
    )


def _code_and_signal(groups: dict[str, str]) -> tuple[int, int | None]:
    if "name" in groups:
        named = SIGNALS.get(groups["name"])
        number = named or int(getattr(signal, groups["name"], 0))
        return 128 + number, number or None
    if "kill" in groups or "segv" in groups:
        number = 9 if "kill" in groups else 11
        return 128 + number, number
    if "signal" in groups:
        return 128 + int(groups["signal"]), int(groups["signal"])
    code = int(groups["code"])
    if code < 0:
        return code, -code
    if 128 < code <= 128 + 31:
        return code, code - 128
    # why: some agents print a negative code as an unsigned byte, 247 for -9
    return (code, 256 - code) if 256 - 31 <= code <= 255 and 256 - code in {4, 6, 7, 8, 9, 11, 15} else (code, None)


def _of_the_block(above: list[str]) -> tuple[int | None, int | None, bool]:
    """The rank of an entry of torchrun's summary, and whether it stands under "Root Cause"."""
    rank = next((found for text in above[:3] if (found := BLOCK_RANK.match(text))), None)
    root = any(text.startswith("Root Cause") for text in above[:6])
    return (int(rank[1]), int(rank[2]), root) if rank else (None, None, root)


def _entry(name: str, block: list[str]) -> str:
    """What an entry of the summary says of a name."""
    return next((text.partition(": ")[2] for text in block[:4] if text.startswith(name)), "")


def _int(text: str | None) -> int | None:
    return int(text) if text else None


# The lines of a test suite -> whether its summary answers for what stands above it.
#
# pytest ends with how many tests passed, and then what its tests printed was expected. That is true only of what was printed
# since pytest began, and only if no training ran, and no launcher ended badly, between: else the summary is of something else.
LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?(?:\d|-?nan\b)", re.IGNORECASE)

TROUBLES = (Event.FAILED, Event.EXITED, Event.EXCEPTION, Event.TRACEBACK, Event.COMPLAINED, Event.GPU_FAULT)

SUITE_NEAR_THE_END = 8  # so few lines stand at most below the summary of a suite by which the log ended


@dataclass
class Suite:
    """The test suite that is open. ``since``: the line on which pytest began, 0 where none is known to have."""

    since: int = 0
    captured: bool = False  # whether pytest has begun to print what its tests had printed

    def note(self, event: Event, line: int) -> None:
        """pytest begins, says how many tests it has collected, or prints what its tests had printed."""
        self.since = self.since or (line if event is Event.SUITE_BEGAN else 0)
        self.captured = event is Event.SUITE_CAPTURED

    def pass_lines(self, batch: Iterable[bytes]) -> None:
        """A step or a loss is of a training: the summary that comes answers for nothing any more."""
        if self.since and any(STEP.search(raw[-400:]) or LOSS.search(raw[-400:]) for raw in batch):
            self.since = 0

    def answers(
        self, first: Mapping[Event, Line], last: Mapping[Event, Line], hits: Sequence[int], exits: Sequence[Exit]
    ) -> bool:
        """Whether the summary of a suite that passed answers for all that went wrong: nothing had before it began."""
        captured, since, self.since, self.captured = self.captured, self.since, 0, False
        ends = [last[event].number for event in (Event.FAILED, Event.EXITED) if event in last]
        ends += [ended.line for ended in exits]
        if not since or (not captured and max(ends, default=0) > since):
            return False
        return all(line > since for line in (*hits, *(first[event].number for event in TROUBLES if event in first)))


MAX_RECENT = 512  # how many lines are kept to look back for the step of a failure

MAX_FAILURES, MAX_WATCHED, MAX_FULLY_DATED = 2000, 64, 8
"""How many failures and exits are remembered; of how many is read whether the process went on, and the step in all lines."""

UNFINISHED_MESSAGE, MESSAGE_LINES = re.compile(r":$|\d validation errors? for "), 3
"""A message whose first line does not say what is the matter, and how many lines of it are taken."""

NOTICED_BEFORE = 8  # so many lines before a failure stands at most what its process said of its reason
NOTICE = re.compile(
    rb"does not (?:contain|exist|have|match)|[Nn]ot found|[Cc]ould not|[Cc]annot |[Ff]ailed to|[Ii]gnoring|[Mm]issing|[Uu]nable to"
    rb"|[Ii]nvalid |is not (?:set|supported|available|installed|initialized|valid|compatible)"
)
"""Words by which a program says that something is missing, refused or ignored."""

BUT_GOES_ON = re.compile(
    rb"[Rr]etry|[Ss]kipp|[Cc]ontinu|will proceed|[Dd]eprecat|by default|[Ff]all(?:ing|s)? back|[Uu]sing "
)

JUST_BEFORE = 16
"""So many lines back stands at most what the same process wrote just before a traceback, where several write in turns."""

LAST_ERROR = "Last error:"  # below it NCCL says what went wrong
A_CERTIFICATE = "certificate"  # a server that was not trusted. What goes on with losses did not need it
WENT_ON = 3  # after so many steps of the same process a failure is known to have been survived
REPORTED = re.compile(r"\b(?:WARNING|WARN|INFO|DEBUG)\b.{0,160}Traceback \(")
"""A traceback within a message of a logger, of something that the program bore."""

INSET = ("traceback :", "+ Exception Group", "| Traceback")
"""How a traceback begins whose lines all stand further in: in torchrun's summary, and in a group of exceptions."""

IGNORED = b"Exception ignored "  # how Python begins what it says of an exception that nobody could take
AT_EXIT, IN_A_THREAD = b"Error in atexit._run_exitfuncs", b"Exception in thread "
"""How it begins what a function at exit raises, and what a thread does: after the program's last words neither ended it."""

AFTER_WATCHDOG = 200  # within so many lines after a watchdog has given up, a process breaks off because of it
BY_WATCHDOG = re.compile(
    r"terminate called (?:after throwing an instance of '(?:std::runtime_error|c10::\w{1,60})'|without)"
)
"""How the thread of a watchdog ends its process."""

WORLD = re.compile(r"dist_world_size=(\d{1,6})(?!\d)")
"""How many ranks DeepSpeed's launcher says that there are."""

A_TASK = re.compile(rb" {0,3}\d{1,5}: ")

TASK_LINES, TASK_SAMPLE = 0.8, 2000
"""What share of the first lines has a number in front where srun labelled them."""


@dataclass
class Watched:
    """A failure after which the lines of its process are watched for further steps."""

    failure: Failure
    steps: int = 0


@dataclass
class Timeline:
    """What happened in a log, by process."""

    failures: list[Failure] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    nans: Series = field(default_factory=Series)
    speakers: dict[Speaker, None] = field(default_factory=dict)
    world: int = 0
    waited: list[str] = field(default_factory=list)  # lines that say which ranks did not come
    watchdogs: dict[Speaker, int] = field(default_factory=dict)  # who gave up waiting, and on which line last
    first_watchdog: int = 0

    collectives: list[str] = field(default_factory=list)
    """What watchdogs say of the collectives in which ranks waited."""

    before_waiting: list[bytes] = field(default_factory=list)  # the lines before the first of them
    tasks: bool = False
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    survived: list[Failure] = field(default_factory=list)
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    head: list[bytes] = field(default_factory=list)  # the first lines: the command, the configuration
    watched: list[Watched] = field(default_factory=list)
    trouble: int = 0  # the line of the first failure or exit
    step: int | None = None
    last_step_line: int = 0
    went_on_until: int = 0
    """Up to which line, at least, steps of training followed before that, or before the end."""

    recoveries: deque[tuple[int, Speaker]] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))
    """Lines by which a process says that it goes on."""

    steps_since_exit: int = 0
    survived_exit: int = 0
    """The line of the last exit after which the training went on, as it does where a launcher starts its workers again."""

    ignored: int = 0  # the last line by which Python says that it ignores an exception
    unsaid: int = 0  # how many more lines belong to the message of the last failure, this one included
    suite: Suite = field(default_factory=Suite)
    went_on_to_exit: int = 0
    """What stands before this line was followed by steps of the training before a process ended first."""

    last_words: tuple[int, str] | None = None
    """What a logger said of an error just before a process ended first, and on which line."""

    reasons: list[Line] = field(default_factory=list)
    """What stands below "Last error:", of one process each."""

    asked_by: tuple[int, Speaker] | None = None  # the line of the last "Last error:", and who wrote it
    steps_seen: int = 0  # how many steps were looked at, to see whether a process goes on
    steps_before: dict[int, int] = field(default_factory=dict)  # and how many of them before the failure of each line
    done: int = 0  # the last line by which a program says that it is done
    asked_for_exits: int = 0
    numbered: int = 0
    sampled: int = 0

    def pass_lines(self, batch: list[bytes]) -> None:
        """Remember lines for looking back, and see whether processes that failed go on."""
        self.recent.extend(batch)
        self.suite.pass_lines(batch)
        if self.sampled < TASK_SAMPLE:
            self.sampled += sum(1 for raw in batch if raw.strip())
            self.numbered += sum(1 for raw in batch if A_TASK.match(raw))
            self.tasks = self.numbered > TASK_LINES * self.sampled
            for raw in batch:
                self.speaker(raw)
        if self.watched or self.exits:
            self._watch(batch)
        if self.unsaid:
            self._go_on(batch)
        if self.asked_by:
            self._take_reason(batch)

    def take(self, event: Event, text: str, raw: bytes, line: int, above: deque[bytes]) -> bool:
        """Take what a line shows, and tell whether no more exits are needed. ``text``: the clean part of the line that shows it;
        ``raw``: all of it. Nothing is searched here.
        """
        if event in {Event.EXCEPTION, Event.USAGE}:
            self.exception(raw, text, line)
        elif event in {Event.SUITE_BEGAN, Event.SUITE_CAPTURED}:
            self.suite.note(event, line)
        elif event is Event.TRACEBACK:
            self.begin_traceback(raw, text, line)
        elif event is Event.ERROR_FILE and self.exits and not self.exits[-1].error_file:
            self.exits[-1] = replace(self.exits[-1], error_file=text.partition(": ")[2][:300])
        elif event is Event.CHAINED:
            self.chain(raw)
        elif event is Event.IGNORED:
            self.ignored = line
        elif event is Event.CRASHED:
            self.crash(raw, text, line)
        elif event is Event.EXITED:
            self.end(raw, text, line, lambda: list(above)[-1:-8:-1])
        elif event is Event.NO_NUMBER:
            self.nans.note(raw, line, self.recent)
        elif event is Event.WATCHDOG:
            self.watchdogs[self.speaker(raw)] = line
            self.first_watchdog = self.first_watchdog or line
        elif event is Event.RECOVERED:
            self.recoveries.append((line, self.speaker(raw)))
        elif event is Event.MISSING and len(self.waited) < MAX_WATCHED:
            self.waited.append(text[:400])
        elif event is Event.WORK:
            self.before_waiting = self.before_waiting if self.collectives else list(self.recent)
            self.collectives += [text[:600]] if len(self.collectives) < MAX_FAILURES else []
        elif event is Event.LAST_ERROR and len(self.reasons) < MAX_WATCHED:
            self.asked_by = (line, self.speaker(raw))
        elif event is Event.ENDED_WELL:
            self.done = line
        elif event is Event.WORLD and (found := WORLD.search(text)):
            self.world = int(found[1])
        return self.has_exits_enough

    def speaker(self, raw: bytes) -> Speaker:
        """Who wrote a line; writers are counted."""
        speaker = speaker_of(raw, tasks=self.tasks)
        if len(self.speakers) < MAX_FAILURES:
            self.speakers.setdefault(speaker)
        return speaker

    def begin_traceback(self, raw: bytes, text: str, line: int) -> None:
        """A traceback begins."""
        before = self._said_before(raw)[:200]
        handled = bool(REPORTED.search(text)) or IGNORED in before or AT_EXIT in before
        handled = handled or (self.done > 0 and IN_A_THREAD in before)
        handled = handled or (
            text.startswith("Traceback") and bool(REPORTED.search(raw[:200].decode("utf-8", "replace")))
        )
        self.tracebacks.begin(self.speaker(raw), line, handled=handled, inset=text.startswith(INSET))

    def is_reported(self, raw: bytes, line: int) -> bool:
        """Whether an exception was only reported: in a warning, or by Python, which ignores what a destructor raises."""
        near = self.ignored and line - self.ignored <= JUST_BEFORE
        if near and self.tracebacks.handled_line != line and IGNORED in self._said_before(raw)[:200]:
            self.tracebacks.note_handled(line)
        return self.tracebacks.handled_line == line

    def _said_before(self, raw: bytes) -> bytes:
        """The line before this one, of the same process where others write between."""
        last = list(islice(reversed(self.recent), JUST_BEFORE))
        speaker = self.speaker(raw)
        return next((other for other in last if self.speaker(other) == speaker), last[0] if last else b"")

    def follow(self, raw: bytes, text: str, line: int) -> Failure | None:
        """Take a line while tracebacks are open."""
        failure = self.tracebacks.take(text, self.speaker(raw), line, indented=_indented(raw, text))
        if failure:
            self.add(failure)
        if line % 50 == 0:
            self.tracebacks.forget(line)
        return failure

    def chain(self, raw: bytes) -> None:
        """A line between the two exceptions of a chain: the first one is not told by itself."""
        before = self.tracebacks.goes_on(self.speaker(raw))
        if before:
            self._drop(before.line)

    def add(self, failure: Failure) -> None:
        """A process failed."""
        if len(self.failures) >= MAX_FAILURES or any(other.line == failure.line for other in self.failures[-4:]):
            return
        if len(self.failures) < MAX_WATCHED:
            back = MAX_RECENT if len(self.failures) < MAX_FULLY_DATED else MAX_RECENT // 8
            before = list(islice(self._before(failure), back))
            failure = replace(failure, step=last_step(before), went_on_from=self._steps_before(before, failure))
            if len(self.failures) < MAX_FULLY_DATED:
                failure = replace(failure, notice=self._noticed(failure))
            self._note_progress(self._before(failure), failure.since)
            self.watched.append(Watched(failure))
            self.steps_before[failure.line] = self.steps_seen
        self.failures.append(failure)
        self.unsaid = MESSAGE_LINES if UNFINISHED_MESSAGE.search(failure.text) else 0

    def _go_on(self, batch: list[bytes]) -> None:
        """Add the next lines to a message that its first line only announces."""
        for raw in batch[: self.unsaid]:
            last = self.failures[-1] if self.failures else None
            if last and self.unsaid < MESSAGE_LINES and same_process(self.speaker(raw), last.speaker):
                self.failures[-1] = replace(last, text=f"{last.text} {last_segment(raw)[:160]}")
            self.unsaid -= 1

    def _take_reason(self, batch: list[bytes]) -> None:
        """Take the line of the same process that follows "Last error:"."""
        line, speaker = self.asked_by or (0, NOBODY)
        for raw in batch:
            text = last_segment(raw)
            if text and text != LAST_ERROR and same_process(self.speaker(raw), speaker):
                self.reasons.append(Line(line + 1, text[:400]))
                self.asked_by = None
                return

    def _noticed(self, failure: Failure) -> Line | None:
        """The last line of the same process just before a failure that says what was missing, refused or ignored."""
        for age, raw in enumerate(islice(self._before(failure), NOTICED_BEFORE), 1):
            if NOTICE.search(raw) and not BUT_GOES_ON.search(raw) and not are_two(self.speaker(raw), failure.speaker):
                text = last_segment(raw)
                return None if frame_of(text) or EXCEPTION_LINE.match(text) else Line(failure.since - age, text[:400])
        return None

    def _drop(self, line: int) -> None:
        self.failures = [failure for failure in self.failures if failure.line != line]
        self.watched = [one for one in self.watched if one.failure.line != line]

    def exception(self, raw: bytes, text: str, line: int) -> None:
        """A line that is an exception, with or without a traceback above it, and no part of the message of one before."""
        last = self.failures[-1] if self.failures else None
        if last and last.frames and self.unsaid and same_process(self.speaker(raw), last.speaker):
            return
        if not any(failure.line == line for failure in self.failures[-4:]):
            self.add(Failure(line=line, text=text, speaker=self.speaker(raw), since=line))

    def crash(self, raw: bytes, text: str, line: int) -> None:
        """A line of a program that is not Python and breaks off."""
        last = self.failures[-1] if self.failures else None
        if text.startswith("what():") and last and last.native and line - last.line <= 3:
            self.failures[-1] = replace(last, text=f"{last.text} {text}")
        elif NATIVE.search(text):
            speaker = self.speaker(raw)
            gave_up = any(
                at > line - AFTER_WATCHDOG and same_process(speaker, one) for one, at in self.watchdogs.items()
            )
            gave_up = gave_up or (speaker.number is None and bool(self.watchdogs))
            after = gave_up and bool(BY_WATCHDOG.match(text))
            self.add(Failure(line=line, text=text, speaker=speaker, since=line, native=True, after_watchdog=after))

    def end(self, raw: bytes, text: str, line: int, above: Callable[[], Iterable[bytes]]) -> None:
        """A line that may say how a process ended."""
        if self.has_exits_enough:
            return
        ended = exit_of(text, line, lambda: [last_segment(raw) for raw in above()])
        if ended and not ended.signal and not ended.root and ended.local is None and "pid=" in self.speaker(raw).host:
            return  # why: a worker of Ray that has ended says nothing, so this is of a program that it ran
        if ended:
            self._note_progress(reversed(self.recent), line)
            if not self.exits:
                self.went_on_to_exit = _went_on_from(reversed(self.recent), line)
                self.last_words = last_words(reversed(self.recent), line)
                # why: what went wrong before that was survived
                self.step = self.step if self.failures else last_step(reversed(self.recent)) or self.step
            writer = self.speaker(raw)
            if ended.number is None:
                ended = replace(ended, rank=writer.number, host=ended.host or writer.host)
            self.exits.append(ended)
            self.steps_since_exit = 0
        else:
            self.asked_for_exits += 1

    @property
    def has_exits_enough(self) -> bool:
        """Whether no more lines are read for exits."""
        return self.asked_for_exits >= MAX_FAILURES or len(self.exits) >= MAX_FAILURES

    def lengthen(self, line: int, text: str) -> None:
        """A terminal had cut a failure's words: this is all of them."""
        last = self.failures[-1] if self.failures else None
        if last and last.line == line:
            self.failures[-1] = replace(last, text=text)

    def stepped_between(self, first: int, last: int) -> bool:
        """Whether a step of the training stands between the lines of two failures."""
        return self.steps_before.get(first, 0) < self.steps_before.get(last, 0)

    def finish(self, line: int) -> None:
        """The log has ended."""
        self._note_progress(reversed(self.recent), line)
        if not self.exits and not self.failures:
            self.went_on_until = max(self.went_on_until, _went_on_from(reversed(self.recent), line))

    @property
    def ranks(self) -> set[int]:
        """The numbers of all ranks that the log knows of."""
        numbers = {speaker.number for speaker in self.speakers} | {end.rank for end in self.exits}
        return {number for number in numbers if number is not None} | set(range(self.world))

    def _before(self, failure: Failure) -> Iterator[bytes]:
        """The lines before a failure, the last one first."""
        return islice(reversed(self.recent), max(0, failure.line - failure.since), None)

    def _steps_before(self, before: list[bytes], failure: Failure) -> int:
        """The line of the third last step before a failure that no other process wrote."""
        steps = (None if are_two(self.speaker(raw), failure.speaker) else raw for raw in before)
        return _went_on_from((raw or b"" for raw in steps), failure.since)

    def _note_progress(self, lines: Iterator[bytes], before: int) -> None:
        """Remember, once, how far the training had come when the first thing went wrong."""
        if self.trouble:
            return
        self.trouble = before
        last = list(lines)
        self.step = last_step(last)
        ages = [age for age, raw in enumerate(last, 1) if STEP.search(raw[-400:])]
        self.went_on_until = before - ages[WENT_ON - 1] if len(ages) >= WENT_ON else 0
        self.last_step_line = before - ages[0] if ages else 0

    def _watch(self, batch: list[bytes]) -> None:
        for raw in batch:
            step = STEP.search(raw[-400:])
            if not step and not FINITE.search(raw[-400:]):
                continue
            self.steps_seen += step is not None
            speaker = self.speaker(raw)
            for watched in self.watched if b"Error" not in raw else ():
                if step or A_CERTIFICATE in watched.failure.text:
                    watched.steps += same_process(speaker, watched.failure.speaker)
            self.steps_since_exit += bool(self.exits and step)
        if self.exits and self.steps_since_exit >= WENT_ON:
            self.survived_exit = self.exits[-1].line
            self.exits.clear()
        for watched in [one for one in self.watched if one.steps >= WENT_ON]:
            self.survived.append(watched.failure)
            self._drop(watched.failure.line)


def _went_on_from(lines: Iterable[bytes], before: int) -> int:
    """The line of the third last step before a line; 0 where there are fewer. ``lines``: those before it, the last one first."""
    steps = (age for age, raw in enumerate(lines, 1) if STEP.search(raw[-400:]) or FINITE.search(raw[-400:]))
    return before - next(islice(steps, WENT_ON - 1, None), before)


def _indented(raw: bytes, text: str) -> bool:
    """Whether a line of source or a frame stands further in than the exception would."""
    head = raw.decode("utf-8", "replace")
    place = head.find(text[:20])
    return place >= 2 and head[place - 2 : place] in ("  ", " \t", "\t\t", ": ") and head[place - 2] in " \t"
