"""What a process says when it fails: exceptions with their frames, refusals of libraries, or only that another is gone."""

import re
from dataclasses import dataclass, field, replace

from dsdoctor.diagnosis.lines import NOBODY, Speaker
from dsdoctor.diagnosis.owner import PYTHON, is_relay, owner_of

# What a process says when it fails: its own exception or crash, or only that another one is gone.


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
    r"|(?:ActorDied|RayActor|WorkerCrashed)Error: The (?:actor|worker) died (?:unexpectedly|before)|ActorUnavailableError: "
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
    r"|(?:\w{1,60}\.){0,6}(?:ActorDiedError|RayActorError): .{0,40}error raised in its creation task"
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
        last = self.raiser
        return bool(last and last.own and last.source.startswith(("raise ", "assert ")))

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

NUMBERED = re.compile(r"\d{1,7}(?: {2,}| ?[│|])")
"""Another line of source, as rich and notebooks show them around that one."""

NUMBERED_AT_THE_TOP = re.compile(r"\d{1,7} \S")
"""A line of source that is not indented, as notebooks show it."""

BAR = re.compile(r"[|│] ?")
"""What stands before the lines of a group of exceptions, and of a box."""


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


LONGEST = 400
"""After how many lines without an end a traceback is given up."""

MOST_FRAMES, MOST_OPEN = 64, 16
"""How many frames are kept of a traceback, and how many open ones of each writer."""

MAX_HANDLED = 2000
"""Of so many exceptions it is remembered that they were only reported."""

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
        if len(mine) < MOST_OPEN:
            mine.append(OpenTraceback(since=line, last=line, mixed=bool(mine), handled=handled, inset=inset))

    def take(self, text: str, speaker: Speaker, line: int, *, indented: bool) -> Failure | None:
        """Take the next line; the exception, where it ends a traceback."""
        mine = self.open.get(speaker)
        if not mine:
            return None
        first, text = mine[0], without_bar(text)
        if frame := frame_of(text):
            first.frames.append(frame)
            del first.frames[:-MOST_FRAMES]
            first.numbered = shows_numbers(text)
            first.last = line
        elif first.frames and not first.frames[-1].source and (frame := pointed_at(text, first.frames[-1])):
            first.frames[-1] = frame
        elif NUMBERED.match(text) or (first.numbered and NUMBERED_AT_THE_TOP.match(text)):
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
        kept = {speaker: [one for one in mine if line - one.last <= LONGEST] for speaker, mine in self.open.items()}
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


# An exception that a library raised on purpose, and that no rule knows -> what is known of its refusal. Never a cause.


PACKAGE = re.compile(r"(?:^|[/\\])(?P<package>deepspeed|DeepSpeed[/\\]deepspeed)[/\\](?P<file>\w[\w/\\.-]{0,200}\.py)$")
INSTALLED = re.compile(
    r"(?:site|dist)-packages[/\\](?P<package>[A-Za-z]\w{1,60})[/\\](?P<file>\w[\w/\\.-]{0,200}\.py)$"
)
ON_PURPOSE = ("raise ", "assert ")
RAISED_AGAIN = re.compile(
    r"raise (?:self\.\w{1,40}|exception|exc|error|err|ex|e)(?:\.with_traceback\(|\s{0,4}(?:#|$| from ))"
)
"""A place that only passes on what another process, thread or place raised: who stands there refused nothing."""

NAME = re.compile(r"(?<![\w.])(?:self\.|args\.|config\.)?_?([a-z][a-z0-9]{1,30}(?:_[a-z0-9]{1,30}){1,6})\b")
QUOTED = re.compile(r"['\"`<]([A-Za-z][\w.-]{2,50})['\"`>]")
MOST_NAMES = 6
NO_NAMES = {"is_initialized", "get_rank", "get_world_size", "is_tensor", "all_reduce", "value_error", "runtime_error"}
"""Functions that conditions call everywhere: they name no setting."""

TITLES = {"deepspeed": "DeepSpeed"}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Who refused, where, on which condition, and the settings or arguments that message and condition name."""

    package: str
    place: str
    condition: str
    names: tuple[str, ...]


def refusal_of(failure: Failure | None) -> Refusal | None:
    """What is known of an exception that a library raised on purpose; None for any other.

    >>> frame = Frame(path="/v/site-packages/deepspeed/runtime/x.py", line=9, function="step", source="assert self.tile_size > 1")
    >>> refusal_of(Failure(line=3, text="AssertionError: tile_size is 1", frames=(frame,)))
    Refusal(package='DeepSpeed', place='runtime/x.py:9 step', condition='self.tile_size > 1', names=('tile_size',))
    """
    last = failure.frames[-1] if failure and failure.frames else None
    if failure is None or last is None or not last.source.startswith(ON_PURPOSE) or RAISED_AGAIN.match(last.source):
        return None
    found = PACKAGE.search(last.path) or INSTALLED.search(last.path)
    if not found:
        return None
    package = re.split(r"[/\\]", found["package"])[-1]
    words, condition = failure.text.partition(": ")[2], _condition(last)
    return Refusal(
        package=TITLES.get(package, package),
        place=f"{found['file']}:{last.line} {last.function}",
        condition=condition,
        names=_names(f"{words} {condition}"),
    )


def _condition(frame: Frame) -> str:
    """The condition of an assertion; of a raised exception nothing, its words are the message."""
    if not frame.source.startswith("assert "):
        return ""
    return re.split(r",\s{0,4}f?[\"'(]|, \\$|, $|\\$", frame.source.removeprefix("assert "))[0].strip()[:160]


def _names(text: str) -> tuple[str, ...]:
    """The names of settings, arguments and attributes in a text, each once."""
    found = [*NAME.findall(text), *QUOTED.findall(text)]
    return tuple(dict.fromkeys(name for name in found if name not in NO_NAMES))[:MOST_NAMES]


def refused_evidence(refusal: Refusal) -> tuple[str, ...]:
    """The condition that did not hold, and the names in it."""
    named = (f"named in it: {', '.join(refusal.names)}",) if refusal.names else ()
    return (*((f"it asks that {refusal.condition}",) if refusal.condition else ()), *named)
