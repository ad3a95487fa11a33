"""One log -> the story of each rank: its own failures, what only follows, how it ended, what became of its losses."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from dsdoctor.diagnosis.exits import Exit, exit_of
from dsdoctor.diagnosis.failures import NATIVE, Failure, Tracebacks
from dsdoctor.diagnosis.lines import Above, Speaker, are_two, last_segment, same_process, speaker_of
from dsdoctor.diagnosis.marks import Event
from dsdoctor.diagnosis.models import Line
from dsdoctor.diagnosis.progress import FINITE, STEP, Series, last_step, last_words

# The lines of a test suite -> whether its summary answers for what stands above it.
#
# pytest ends with how many tests passed, and then what its tests printed was expected. That is true only of what was printed
# since pytest began, and only if no training ran, and no launcher ended badly, between: else the summary is of something else.


LOSS = re.compile(rb"\bloss['\"]?[\])]?\s{0,3}[:=]?\s{0,3}(?:tensor\()?['\"]?(?:\d|-?nan\b)", re.IGNORECASE)
TROUBLES = (Event.FAILED, Event.EXITED, Event.EXCEPTION, Event.TRACEBACK, Event.COMPLAINED, Event.GPU_FAULT)
NEAR_THE_END = 8
"""So few lines stand at most below the summary of a suite by which the log ended."""


@dataclass
class Suite:
    """The test suite that is open. ``since``: the line on which pytest began, 0 where none is known to have."""

    since: int = 0
    captured: bool = False
    """Whether pytest has begun to print what its tests had printed."""

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


RECENT = 512
"""How many lines are kept to look back for the step of a failure."""

MOST, MOST_WATCHED, FULLY_DATED = 2000, 64, 8
"""How many failures and exits are remembered; of how many is read whether the process went on, and the step in all lines."""

UNSAID, MESSAGE_LINES = re.compile(r":$|\d validation errors? for "), 3
"""A message whose first line does not say what is the matter, and how many lines of it are taken."""

JUST_BEFORE = 16
"""So many lines back stands at most what the same process wrote just before a traceback, where several write in turns."""

A_CERTIFICATE = "certificate"
"""A server that was not trusted. What goes on with losses did not need it."""

WENT_ON = 3
"""After so many steps of the same process a failure is known to have been survived."""

REPORTED = re.compile(r"\b(?:WARNING|WARN|INFO|DEBUG)\b.{0,160}Traceback \(")
"""A traceback within a message of a logger, of something that the program bore."""

INSET = ("traceback :", "+ Exception Group", "| Traceback")
"""How a traceback begins whose lines all stand further in: in torchrun's summary, and in a group of exceptions."""

IGNORED = b"Exception ignored "
"""How Python begins what it says of an exception that nobody could take."""

AFTER_WATCHDOG = 200
"""Within so many lines after a watchdog has given up, a process breaks off because of it."""

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
    waited: list[str] = field(default_factory=list)
    """Lines that say which ranks did not come."""

    watchdogs: dict[Speaker, int] = field(default_factory=dict)
    """Who gave up waiting, and on which line last."""

    first_watchdog: int = 0

    collectives: list[str] = field(default_factory=list)
    """What watchdogs say of the collectives in which ranks waited."""

    before_waiting: list[bytes] = field(default_factory=list)
    """The lines before the first of them."""

    tasks: bool = False
    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    survived: list[Failure] = field(default_factory=list)
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=RECENT))
    watched: list[Watched] = field(default_factory=list)
    trouble: int = 0
    """The line of the first failure or exit."""

    step: int | None = None
    last_step_line: int = 0
    went_on_until: int = 0
    """Up to which line, at least, steps of training followed before that, or before the end."""

    recoveries: deque[tuple[int, Speaker]] = field(default_factory=lambda: deque(maxlen=MOST))
    """Lines by which a process says that it goes on."""

    steps_since_exit: int = 0
    survived_exit: int = 0
    """The line of the last exit after which the training went on, as it does where a launcher starts its workers again."""

    ignored: int = 0
    """The last line by which Python says that it ignores an exception."""

    unsaid: int = 0
    """How many more lines belong to the message of the last failure, this one included."""

    suite: Suite = field(default_factory=Suite)
    went_on_to_exit: int = 0
    """What stands before this line was followed by steps of the training before a process ended first."""

    last_words: tuple[int, str] | None = None
    """What a logger said of an error just before a process ended first, and on which line."""

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

    def speaker(self, raw: bytes) -> Speaker:
        """Who wrote a line; writers are counted."""
        speaker = speaker_of(raw, tasks=self.tasks)
        if len(self.speakers) < MOST:
            self.speakers.setdefault(speaker)
        return speaker

    def begin_traceback(self, raw: bytes, text: str, line: int) -> None:
        """A traceback begins."""
        handled = bool(REPORTED.search(text)) or IGNORED in self._said_before(raw)[:200]
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
        if len(self.failures) >= MOST or any(other.line == failure.line for other in self.failures[-4:]):
            return
        if len(self.failures) < MOST_WATCHED:
            back = RECENT if len(self.failures) < FULLY_DATED else RECENT // 8
            before = list(islice(self._before(failure), back))
            failure = replace(failure, step=last_step(before), went_on_from=self._steps_before(before, failure))
            self._note_progress(self._before(failure), failure.since)
            self.watched.append(Watched(failure))
        self.failures.append(failure)
        self.unsaid = MESSAGE_LINES if UNSAID.search(failure.text) else 0

    def _go_on(self, batch: list[bytes]) -> None:
        """Add the next lines to a message that its first line only announces."""
        for raw in batch[: self.unsaid]:
            last = self.failures[-1] if self.failures else None
            if last and self.unsaid < MESSAGE_LINES and same_process(self.speaker(raw), last.speaker):
                self.failures[-1] = replace(last, text=f"{last.text} {last_segment(raw)[:160]}")
            self.unsaid -= 1

    def _drop(self, line: int) -> None:
        self.failures = [failure for failure in self.failures if failure.line != line]
        self.watched = [one for one in self.watched if one.failure.line != line]

    def exception(self, raw: bytes, text: str, line: int) -> None:
        """A line that is an exception, with or without a traceback above it."""
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
        if ended := exit_of(text, line, lambda: [last_segment(raw) for raw in above()]):
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
        return self.asked_for_exits >= MOST or len(self.exits) >= MOST

    def note_error_file(self, text: str) -> None:
        """The file in which the process whose end was just read left its traceback."""
        if self.exits and not self.exits[-1].error_file:
            self.exits[-1] = replace(self.exits[-1], error_file=text.partition(": ")[2][:300])

    def wait(self, text: str) -> None:
        """A line that says who did not come."""
        if len(self.waited) < MOST_WATCHED:
            self.waited.append(text[:400])

    def give_up(self, raw: bytes, line: int) -> None:
        """A watchdog gives up waiting."""
        self.watchdogs[self.speaker(raw)] = line
        self.first_watchdog = self.first_watchdog or line

    def lengthen(self, line: int, text: str) -> None:
        """A terminal had cut a failure's words: this is all of them."""
        last = self.failures[-1] if self.failures else None
        if last and last.line == line:
            self.failures[-1] = replace(last, text=text)

    def recover(self, raw: bytes, line: int) -> None:
        """A process says that it tries again, or goes on without what failed."""
        self.recoveries.append((line, self.speaker(raw)))

    def note_collective(self, text: str) -> None:
        """A line of a watchdog about a collective."""
        if not self.collectives:
            self.before_waiting = list(self.recent)
        if len(self.collectives) < MOST:
            self.collectives.append(text[:600])

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


# An event that a line shows -> the timeline of the log. Nothing is searched here.


def add_event(timeline: Timeline, event: Event, text: str, raw: bytes, line: int, above: Above) -> None:
    """Tell the timeline what a line shows. ``text``: the clean part of it that shows it; ``raw``: all of it."""
    if event in {Event.EXCEPTION, Event.USAGE}:
        timeline.exception(raw, text, line)
    elif event in {Event.SUITE_BEGAN, Event.SUITE_CAPTURED}:
        timeline.suite.note(event, line)
    elif event is Event.TRACEBACK:
        timeline.begin_traceback(raw, text, line)
    elif event is Event.ERROR_FILE:
        timeline.note_error_file(text)
    elif event is Event.CHAINED:
        timeline.chain(raw)
    elif event is Event.IGNORED:
        timeline.ignored = line
    elif event is Event.CRASHED:
        timeline.crash(raw, text, line)
    elif event is Event.EXITED:
        timeline.end(raw, text, line, lambda: list(above.lines)[-1:-8:-1])
    elif event is Event.NO_NUMBER:
        timeline.nans.note(raw, line, timeline.recent)
    elif event is Event.WATCHDOG:
        timeline.give_up(raw, line)
    elif event is Event.RECOVERED:
        timeline.recover(raw, line)
    elif event is Event.MISSING:
        timeline.wait(text)
    elif event is Event.WORK:
        timeline.note_collective(text)
    elif event is Event.WORLD and (found := WORLD.search(text)):
        timeline.world = int(found[1])
