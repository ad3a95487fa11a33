"""Lines of several processes, mixed -> the exceptions that end their tracebacks, each with its frames."""

import re
from dataclasses import dataclass, field, replace

from dsdoctor.diagnosis.failures import EXCEPTION_LINE, Failure, Frame
from dsdoctor.diagnosis.frames import NUMBERED, NUMBERED_AT_THE_TOP, frame_of, pointed_at, shows_numbers, without_bar
from dsdoctor.diagnosis.speakers import Speaker

LONGEST = 400
"""After how many lines without an end a traceback is given up."""

MOST_FRAMES, MOST_OPEN = 64, 16
"""How many frames are kept of a traceback, and how many open ones of each writer."""

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
    """The last line with an exception that was only reported in a warning."""

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
            self.handled_line = line
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
