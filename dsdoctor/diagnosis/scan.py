"""Raw lines -> the hits, facts and marks in them. One pass, bounded memory, time proportional to the bytes.

A line is split into words in C; only a line that has a word of the catalogue is cleaned and searched.
"""

import copy
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from dsdoctor.diagnosis.facts import INSTALL_OPS, Clue, FactReader, groups_of
from dsdoctor.diagnosis.health import Health
from dsdoctor.diagnosis.json_lines import JsonLines
from dsdoctor.diagnosis.lines import (
    COLOUR,
    CONTEXT,
    LONGEST,
    Above,
    Speaker,
    WrappedLine,
    is_coloured,
    segments,
    shorten,
)
from dsdoctor.diagnosis.marks import Effect, Event, Mark, Repeats
from dsdoctor.diagnosis.mentions import AGENT, PROMPT, SOURCE, Relayed, is_of_an_agent, is_quoted, only_mentions
from dsdoctor.diagnosis.models import Hit, Line, ReaderError, Signature, Tier
from dsdoctor.diagnosis.prefilter import (
    A_WARNING,
    CUT,
    INDEX,
    Index,
    Partly,
    Patterns,
    Routine,
    Wording,
    cut_matters,
    kind_of,
    part_to_search,
    words_of,
)
from dsdoctor.diagnosis.timeline import Timeline, add_event

BATCH = 32
"""How many lines are first looked at together."""

WRITERS = 1000
"""How many processes are remembered that wrote the line of a rule."""

ONCE = {Event.COMPILER_ERROR, Event.GPU_FAULT, Event.WINDOWS, Event.NO_GPU, Event.WORLD}
"""Events of which only the first one counts."""

FIRST_HAND = {Event.COMPILER_ERROR, Event.GPU_FAULT}
"""What a compiler or a GPU says itself."""

ASKED = 5000
"""How many lines are searched for one fact."""

MAX_ERRORS = 100
"""So many places that could not be read are remembered."""

BLANK = b" \t\r\n\v\f\0"
A_COMPILE = b"dtorch_extension_name"
"""A part of every command that compiles for torch; such a line shows flags, never an error."""


@dataclass
class Scan:
    """One log while it is read. ``partly``: which lines were not searched whole."""

    index: Index = INDEX
    fact_reader: FactReader = field(default_factory=FactReader)
    hits: dict[int, Hit] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    routine: Routine = field(default_factory=Routine)
    first: dict[Event, Line] = field(default_factory=dict)
    last: dict[Event, Line] = field(default_factory=dict)
    exception: Line | None = None
    last_exception: int = 0
    last_line: int = 0
    ops_line: int = 0
    last_output: int = 0
    broken_off: bool = False
    lines: int = 0
    above: Above = field(default_factory=Above)
    traceback_since: int = 0
    wrapped: WrappedLine = field(default_factory=WrappedLine)
    repeats: Repeats = field(default_factory=Repeats)
    effect: Effect = field(default_factory=Effect)
    patterns: Patterns = field(default_factory=lambda: Patterns(INDEX))
    known: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)
    partly: Partly = field(default_factory=Partly)
    timeline: Timeline = field(default_factory=Timeline)
    speakers: dict[int, set[Speaker]] = field(default_factory=dict)
    writers: dict[int, Speaker] = field(default_factory=dict)
    """Who wrote the first lines of a GPU and of a compiler."""

    raw: bytes = b""
    begins_with_json: bool = False
    relayed: Relayed = field(default_factory=Relayed)
    records: JsonLines = field(default_factory=JsonLines)
    health: Health = field(default_factory=Health)
    errors: list[ReaderError] = field(default_factory=list)
    """What of the log could not be read."""

    def note_error(self, error: Exception, line: int = 0) -> None:
        """Something of the log could not be read; the first of these are told."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(ReaderError.of(error, line))

    def read(self, raw: bytes) -> None:
        """Take the next line."""
        self.lines += 1
        if len(raw) > LONGEST and cut_matters(raw, self.index):
            self.partly.note(self.lines)
        if len(raw) > CONTEXT:
            raw = shorten(raw)
        if is_coloured(raw):
            raw = COLOUR.sub(b"", raw)
        if self._is_routine(raw):
            self._remember(raw)
            return
        tokens = words_of(raw)
        if not tokens and not raw.strip(BLANK):
            self.timeline.recent.append(raw)
            return
        words = self.index.words
        if self.traceback_since or self.wrapped.text or not words.keys().isdisjoint(tokens) or not raw.isascii():
            self._look(raw, tokens)
        self._remember(raw)

    def _remember(self, raw: bytes) -> None:
        """Remember that this line was not blank, and its text."""
        self.last_line = self.lines
        self.above.remember([raw])
        self.timeline.pass_lines([raw])
        if not self.broken_off:
            self.last_output = self.lines

    def _is_routine(self, raw: bytes) -> bool:
        """One more compile command of an extension, or one more warning of a compiler, after very many of them."""
        kind = kind_of(raw)
        if kind and kind != A_WARNING:
            self.last[Event.COMPILING] = Line(number=self.lines, text="")
        return bool(kind) and self.routine.is_known(kind) and not self.traceback_since and not self.wrapped.text

    def read_batch(self, batch: list[bytes]) -> None:
        """Take the next lines."""
        if not self.lines and batch:
            self.begins_with_json = batch[0].strip() == b"{" and b'"' in b"".join(batch[1:3])
        # why together: most batches of a long log have no word of the catalogue at all
        whole = b" ".join(batch)
        tokens = words_of(whole)
        cut = len(whole) >= CUT and any(len(raw) == CUT for raw in batch)
        whole_words = whole.isascii() and not is_coloured(whole)
        plain = tokens and whole_words and not cut and not self.traceback_since and not self.wrapped.text
        if not plain or not self.index.words.keys().isdisjoint(tokens):
            for raw in batch:
                try:
                    self.read(raw)
                except Exception as error:  # the last resort: the other lines are read all the same
                    self.last_line = self.lines
                    self.note_error(error, self.lines)
            return
        last_spoken = max(number for number, raw in enumerate(batch, self.lines + 1) if raw.strip(BLANK))
        self.lines += len(batch)
        self.last_line = last_spoken
        self.above.remember(batch)
        self.timeline.pass_lines(batch)
        self.last_output = self.last_output if self.broken_off else last_spoken

    def _look(self, raw: bytes, tokens: list[bytes]) -> None:
        self.raw = raw
        if not self.traceback_since and not self.wrapped.text and (effect := self.repeats.recall(raw)):
            self._repeat(effect)
            return
        self.effect = Effect()
        self._examine(raw, tokens)
        self.repeats.keep(raw, self.effect)

    def _repeat(self, effect: Effect) -> None:
        """Do again what the same line did before."""
        if effect.partly:
            self.partly.note(self.lines)
        for event, text in effect.marks:
            self._mark(event, text)
        for number in effect.hits:
            self.counts[number] += 1
            self.latest[number] = self.lines
        if effect.hits:
            self.wrapped.text = ""

    def _examine(self, raw: bytes, tokens: list[bytes]) -> None:
        words = set(tokens)
        numbers = self.index.numbers(words) - self.known
        if not numbers and not self.traceback_since and not self.wrapped.text and raw.isascii():
            return
        if A_COMPILE in words and b"killed" not in words:
            numbers = {number for number in numbers if not isinstance(self.index.entries[number], Wording)}
        if self.traceback_since and self.relayed.learn(raw):
            self.timeline.tracebacks.stand()
        texts = [self.relayed.strip(text) for text in segments(raw)]
        if not raw.isascii():
            whole = " ".join(texts).lower()
            numbers |= {number for phrase, found in self.index.phrases.items() if phrase in whole for number in found}
        for text in texts:
            if self.wrapped.text:
                self._join(text)
            if self.traceback_since:
                self._follow_traceback(text)
            if numbers and not SOURCE.match(text):
                text = self._searched(text, len(numbers))
                typed = bool(PROMPT.match(text))
                for number in sorted(numbers):
                    if not typed or isinstance(self.index.entries[number], Clue):
                        self._try(number, text)
        if self.wrapped.since == self.lines and self._is_known():
            self.wrapped.text = ""

    def _is_known(self) -> bool:
        """Whether this line is named, and if it may be half of one, so precisely that nothing below can add to it."""
        found = [self.hits[number] for number in self.effect.hits if number in self.hits]
        return any(hit.precise or not self.wrapped.cut for hit in found)

    def _searched(self, text: str, entries: int) -> str:
        """What of a text is searched for so many entries."""
        part = part_to_search(text, entries)
        if part is not text:
            self.effect.partly = True
            self.partly.note(self.lines)
        return part

    def _join(self, text: str) -> None:
        """Read the line of an exception together with the next one: a box or a terminal may have wrapped it."""
        self.effect.repeats = False
        if self.relayed.is_warning(self.raw):
            self.wrapped.text = ""
            return
        for whole in self.wrapped.joined(text, self.raw, self.lines, self.timeline.speaker(self.raw)):
            self._match_joined(whole)
        if self.wrapped.uncut:
            self.timeline.lengthen(self.wrapped.since, self.wrapped.uncut)
        if self._is_known() and not self.wrapped.goes_on:
            self.wrapped.text = ""

    def _match_joined(self, whole: str) -> None:
        """Search a line that was put together."""
        words = set(words_of(whole.encode("utf-8", "replace")))
        numbers = self.index.numbers(words) - self.known
        whole = self._searched(whole, len(numbers))
        for number in sorted(numbers):
            entry = self.index.entries[number]
            if isinstance(entry, Wording) and number not in self.hits:
                self._match(number, entry, whole, since=self.wrapped.since if self.wrapped.cut else 0)

    def _follow_traceback(self, text: str) -> None:
        """The line that ends a traceback names the exception."""
        failure = self.timeline.follow(self.raw, text, self.lines)
        if not self.timeline.tracebacks.open:
            self.traceback_since = 0
        if failure and not failure.text.startswith("KeyboardInterrupt"):
            self.exception = self.exception or Line(number=self.lines, text=text)
            self.last_exception = self.lines

    def _try(self, number: int, text: str) -> None:
        entry = self.index.entries[number]
        if isinstance(entry, Clue):
            self.asked[number] = self.asked.get(number, 0) + 1
            if self.fact_reader.read(entry, text) or self.asked[number] > ASKED:
                self.known.add(number)
            if entry is INSTALL_OPS and "Install Ops=" in text:
                self.ops_line = self.lines
        elif isinstance(entry, Mark):
            marked = self.last.get(entry.event)
            if not (marked and marked.number == self.lines) and self._stands_there(number, entry, text):
                self._mark(entry.event, text)
                if entry.event in ONCE or (entry.event is Event.EXITED and self.timeline.has_exits_enough):
                    self.known.add(number)
                if (entry.event, text) not in self.effect.marks:
                    self.effect.marks.append((entry.event, text))
        else:
            self._match(number, entry, text)

    def _mark(self, event: Event, text: str) -> None:
        if event is Event.EXCEPTION and self.timeline.is_reported(self.raw, self.lines):
            return
        line = Line(number=self.lines, text=text)
        if event is Event.SUITE_PASSED:
            hits = [hit.line for hit in self.hits.values() if hit.tier is not Tier.PROBE]
            if self.timeline.suite.answers(self.first, self.last, hits, self.timeline.exits):
                self.last[Event.ENDED_WELL] = line
        if event in FIRST_HAND and event not in self.first:
            self.writers[self.lines] = self.timeline.speaker(self.raw)
        self.first.setdefault(event, line)
        self.last[event] = line
        if event in {Event.TRACEBACK, Event.CANCELLED}:
            self.broken_off = True
        if event is Event.EXCEPTION:
            self.exception = self.exception or line
            self.last_exception = self.lines
            self.wrapped.begin(text, self.raw, self.lines, self.timeline.speaker(self.raw))
        elif event in {Event.WATCHDOG, Event.CRASHED}:
            self.wrapped.begin(text, self.raw, self.lines, self.timeline.speaker(self.raw))
            self.wrapped.text = self.wrapped.text if self.wrapped.cut else ""
        elif event is Event.TRACEBACK:
            self.traceback_since = self.lines
        elif event is Event.WAITING:
            self.broken_off = False
        add_event(self.timeline, event, text, self.raw, self.lines, self.above)

    def _match(self, number: int, wording: Wording, text: str, since: int = 0) -> None:
        signature = wording.signature
        found = self.patterns.search(number, signature.pattern, text)
        if not found or (signature.unless and re.search(signature.unless, text)):
            return
        first = self.hits.get(number)
        weak = first is None or first.said or first.quoted
        said = weak and (self._is_said() or self._is_of_an_agent(text, signature))
        quoted = weak and is_quoted(text, found.start(), signature.sample.rpartition("\n")[2], signature.pattern)
        if first and (said or quoted or not weak):
            self.counts[number] += 1
            self.latest[number] = self.lines
            self.effect.hits.append(number)
            self._said_by(number)
        elif self._fits_above(signature):
            groups = groups_of(found)
            op = groups.get("op") or signature.op or self.fact_reader.values.get("op")
            self.hits[number] = Hit(
                rule=wording.rule,
                signature=signature,
                line=since or self.lines,
                text=text,
                groups=groups,
                op=op,
                speaker=self.timeline.speaker(self.raw),
                said=said,
                quoted=quoted,
                project=self.fact_reader.values.get("project"),
            )
            self.counts[number] = self.counts.get(number, 0) + 1
            self.effect.hits.append(number)
            self._said_by(number)
        else:
            self.effect.repeats = False

    def _is_said(self) -> bool:
        """Whether this line is a warning or a notice, or ends a traceback that was only reported."""
        return self.timeline.is_reported(self.raw, self.lines) or self.relayed.is_warning(self.raw)

    def _is_of_an_agent(self, text: str, signature: Signature) -> bool:
        """Whether this line is one of a daemon among those of the run, which are not all written so."""
        if not is_of_an_agent(text, signature.sample.rpartition("\n")[2]):
            return False
        self.effect.repeats = False
        return not self.above.has(AGENT)

    def _stands_there(self, number: int, mark: Mark, text: str) -> bool:
        """Whether a mark is in a line, and not only spoken of."""
        found = self.patterns.search(number, mark.pattern, text)
        if not found or (mark.first_hand and (only_mentions(text[: found.start()][-300:]) or self._is_said())):
            return False
        fits = not mark.after or self.above.has(mark.after)
        self.effect.repeats = self.effect.repeats and fits
        return fits

    def _said_by(self, number: int) -> None:
        writers = self.speakers.setdefault(number, set())
        if len(writers) < WRITERS:
            writers.add(self.timeline.speaker(self.raw))

    def counted(self, number: int, hit: Hit) -> Hit:
        """A hit with how often it was found, and who said it."""
        latest = self.latest.get(number, hit.line)
        return replace(hit, count=self.counts[number], latest=latest, speakers=frozenset(self.speakers[number]))

    def _fits_above(self, signature: Signature) -> bool:
        if signature.not_after and self.above.has(signature.not_after):
            return False
        return not signature.after or self.above.has(signature.after)


def scan(lines: Iterable[bytes | str], patterns: Patterns | None = None) -> Scan:
    """Read all lines once. ``patterns``: those that other logs have compiled before."""
    whole = begin(patterns)
    read_into(whole, lines)
    return finish(whole)


def begin(patterns: Patterns | None = None) -> Scan:
    """A log of which nothing has been read yet."""
    patterns = patterns or Patterns(INDEX)
    return Scan(index=patterns.index, patterns=patterns)


def read_into(whole: Scan, lines: Iterable[bytes | str], at_hand: Callable[[], bool] | None = None) -> None:
    """Read lines until there are no more. ``at_hand``: whether another one can be had without waiting; none is held back then."""
    for batch in _batches(lines, whole, at_hand):
        first, last = whole.lines + 1, whole.lines + len(batch)
        try:
            whole.read_batch(batch)
            whole.health.pass_lines(batch, first)
        except Exception as error:  # the last resort: as for one line
            whole.lines = whole.last_line = last
            whole.note_error(error, first)


def finish(whole: Scan) -> Scan:
    """The log has ended, or what was read of it so far is judged."""
    try:
        whole.timeline.finish(whole.lines + 1)
    except Exception as error:
        whole.note_error(error)
    whole.hits = {number: whole.counted(number, hit) for number, hit in whole.hits.items()}
    return whole


def so_far(whole: Scan) -> Scan:
    """A copy of what was read, finished as if the log ended here; reading goes on with the original."""
    shared = {id(one): one for one in (whole.index, whole.patterns)}
    return finish(copy.deepcopy(whole, shared))


def _batches(lines: Iterable[bytes | str], whole: Scan, at_hand: Callable[[], bool] | None) -> Iterator[list[bytes]]:
    """All lines in order, some at a time. Where records cannot be told from lines, those from there on are taken as lines."""
    source = iter(lines)
    raws = whole.records.unfold(source)
    while True:
        batch: list[bytes] = []
        try:
            if at_hand is None:
                batch.extend(islice(raws, BATCH))
            else:
                for raw in raws:
                    batch.append(raw)
                    if len(batch) == BATCH or not at_hand():
                        break
        except (OSError, EOFError, zlib.error):
            raise  # what the file itself cannot give
        except Exception as error:
            whole.note_error(error, whole.lines + len(batch) + 1)
            raws = (line if isinstance(line, bytes) else str(line).encode("utf-8", "replace") for line in source)
        else:
            if not batch:
                return
        yield batch
