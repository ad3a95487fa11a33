"""Raw lines -> the hits, facts and marks in them. One pass, bounded memory, time proportional to the bytes.

A line is split into words in C; only a line that has a word of the catalogue is cleaned and searched.
"""

import copy
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from dsdoctor.diagnosis.catalogue import CLUES, MARKS, RULES, Clue, Event, Mark, Rule, Signature, Tier
from dsdoctor.diagnosis.facts import INSTALL_OPS, FactReader
from dsdoctor.diagnosis.health import Health
from dsdoctor.diagnosis.lines import (
    AGENT,
    COLOUR,
    LONGEST,
    PROMPT,
    SOURCE,
    JsonLines,
    Line,
    is_coloured,
    is_of_an_agent,
    is_quoted,
    is_said,
    only_mentions,
    segments,
    shorten,
)
from dsdoctor.diagnosis.models import Hit, ReaderError
from dsdoctor.diagnosis.timeline import MAX_RECENT, NOBODY, Speaker, Timeline

WORD_BYTES = bytes(
    ord(chr(byte).lower()) if byte < 128 and (chr(byte).isalnum() or byte == ord("_")) else ord(" ")
    for byte in range(256)
)


@dataclass(frozen=True, kw_only=True)
class Wording:
    """A signature with its rule."""

    rule: Rule
    signature: Signature


Entry = Wording | Clue | Mark


@dataclass(frozen=True)
class Index:
    """From a word to the entries that need it, with the other words that they need."""

    entries: tuple[Entry, ...]
    words: dict[bytes, list[tuple[int, frozenset[bytes]]]]
    phrases: dict[str, list[int]]
    parts: tuple[tuple[bytes, ...], ...]

    def numbers(self, words: set[bytes]) -> set[int]:
        """The numbers of the entries that can match a line with these words."""
        known = self.words
        return {
            number for word in words & known.keys() for number, others in known[word] if not others or others <= words
        }

    def those_in(self, text: bytes, numbers: set[int]) -> set[int]:
        """Those of the entries of which a text has a part, or that have none to look for."""
        return {one for one in numbers if not self.parts[one] or any(part in text for part in self.parts[one])}


def index(rules: Iterable[Rule] = tuple(RULES.values())) -> Index:
    """Marks, clues and rules by their words."""
    entries: list[Entry] = [*MARKS, *CLUES]
    of_lines = (rule for rule in rules if not rule.general)
    entries += [Wording(rule=rule, signature=signature) for rule in of_lines for signature in rule.signatures]
    words: dict[bytes, list[tuple[int, frozenset[bytes]]]] = {}
    phrases: dict[str, list[int]] = {}
    wanted = [(number, word) for number, entry in enumerate(entries) for word in searched_by(entry).words.split()]
    uses = Counter(part for _, word in wanted for part in word.encode().split(b"+"))
    for number, word in wanted:
        if word.isascii():
            parts = word.encode().split(b"+")
            # why: the rarer word leads to fewer entries whose other words are then looked for
            rarest = min(parts, key=lambda part: (uses[part], -len(part)))
            words.setdefault(rarest, []).append((number, frozenset(parts) - {rarest}))
        else:
            phrases.setdefault(word, []).append(number)
    needed = tuple(tuple(part.encode() for part in searched_by(entry).parts.split("\n") if part) for entry in entries)
    return Index(tuple(entries), words, phrases, needed)


def searched_by(entry: Entry) -> Signature | Clue | Mark:
    """What has the words, the parts and the pattern of an entry."""
    return entry.signature if isinstance(entry, Wording) else entry


INDEX = index()


def words_of(raw: bytes) -> list[bytes]:
    """The words of a line in small letters, in C; NULs between letters (16-bit text) are dropped.

    >>> words_of(b"fatal error: Cusparse_v2.h")
    [b'fatal', b'error', b'cusparse_v2', b'h']
    """
    return raw.translate(WORD_BYTES, b"\0").split()


@dataclass
class Patterns:
    """The compiled patterns of an index, each compiled when it is first searched. Several logs may share them."""

    index: Index
    compiled: dict[int, re.Pattern[str]] = field(default_factory=dict)

    def search(self, number: int, pattern: str, text: str) -> re.Match[str] | None:
        """Like re.search, without its look into the cache at every call."""
        if (compiled := self.compiled.get(number)) is None:
            compiled = self.compiled[number] = re.compile(pattern)
        return compiled.search(text)


A_COMMAND = b"-DTORCH_EXTENSION_NAME="  # a part of torch's compile commands

# Lines too long, or with words of too many rules, to be searched whole: what of them is searched, and how many there were.
CROWD, SHORT = 40, 300
"""How many entries a line may ask for: of a longer line with the words of more, less is searched, so that it costs no more.

Of real lines none asks for more than 25.
"""

CUT_LENGTH = 2 * LONGEST + 1  # the length of a line whose middle ``raw_lines`` has thrown away already


@dataclass
class TruncatedLines:
    """The lines that were not searched whole: how many, the first and the last."""

    lines: int = 0
    first: int = 0
    last: int = 0

    def note(self, line: int) -> None:
        """This line is one of them."""
        if self.last != line:
            self.lines += 1
            self.first, self.last = self.first or line, line


def cut_matters(raw: bytes, index: Index) -> bool:
    """Whether what is cut out of a line may hold a word of the catalogue.

    Of a command that compiles it is flags, of a progress bar it is states that are past.
    """
    if A_COMMAND in raw or b"\r" in raw.rstrip():
        return False
    middle = words_of(raw[LONGEST * 3 // 4 - 1 : -LONGEST // 4])
    return len(raw) == CUT_LENGTH or not index.words.keys().isdisjoint(middle)


def truncated_for_search(text: str, entries: int) -> str:
    """What of a text is searched for so many entries: head and tail of a long one with words of very many."""
    room = max(SHORT, len(text) * CROWD // max(1, entries))
    if entries <= CROWD or len(text) <= room:
        return text
    return f"{text[: room * 3 // 4]} {text[-room // 4 :]}"


# Lines that come again and again -> what they led to the first time, so that they are not searched anew.
MAX_SEEN, MAX_REMEMBERED_BYTES = 1000, 4000
"""How many different lines are remembered with their effect, and how long such a line may be."""

SAME_EFFECT_TIMES = 3000
"""After so many lines of one form with the same effect, each further one is taken to have it too."""

LONG_NUMBER = re.compile(rb"\d{3,}")
"""What may differ between lines of one form. Shorter numbers tell ranks, signals and errors apart."""


@dataclass
class Effect:
    """What a line led to. ``repeats``: the same line leads to the same again, wherever it is; ``partly``: not all of it was
    searched."""

    marks: list[tuple[Event, str]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    repeats: bool = True
    partly: bool = False

    def is_like(self, other: "Effect") -> bool:
        """Whether another line led to the same."""
        events = [event for event, _ in self.marks]
        return (self.hits, self.partly, events) == (other.hits, other.partly, [event for event, _ in other.marks])


@dataclass
class Form:
    """Lines that differ in long numbers only: what the last of them led to, and how many in a row led to it."""

    effect: Effect
    times: int = 1


@dataclass
class Repeats:
    """What is remembered of the lines of a log."""

    lines: dict[bytes, Effect] = field(default_factory=dict)
    forms: dict[bytes, Form] = field(default_factory=dict)
    settled: bool = False  # whether one form has come so often that it is worth looking for

    def recall(self, raw: bytes) -> Effect | None:
        """What this line, or very many lines of its form, led to."""
        if (effect := self.lines.get(raw)) or not self.settled:
            return effect
        form = self.forms.get(LONG_NUMBER.sub(b"0", raw))
        return form.effect if form and form.times >= SAME_EFFECT_TIMES else None

    def keep(self, raw: bytes, effect: Effect) -> None:
        """Remember what a line led to."""
        if len(raw) > MAX_REMEMBERED_BYTES or not effect.repeats:
            return
        if len(self.lines) >= MAX_SEEN:
            self.lines.clear()
        self.lines[raw] = effect
        name = LONG_NUMBER.sub(b"0", raw)
        form = self.forms.get(name)
        if form and form.effect.is_like(effect):
            form.times += 1
            self.settled = self.settled or form.times >= SAME_EFFECT_TIMES
            return
        if len(self.forms) >= MAX_SEEN:
            self.forms = {known: form for known, form in self.forms.items() if form.times >= SAME_EFFECT_TIMES}
        if len(self.forms) < MAX_SEEN:
            self.forms[name] = Form(effect)


# The line of an exception that a terminal or a box wrapped over several lines -> that line as it was.
MAX_JOINED, MAX_JOINED_CUT, MAX_BETWEEN = 3, 8, 40
"""Over how many more lines it may go: wrapped between words, and cut where the lines were full; how many may stand between."""

MAX_WHOLE, MAX_PART = 1000, 400  # how long such an exception may be, and each of its lines
ANOTHER_PROGRAM = re.compile(
    r"(?:slurmstepd|slurmd|srun|sbatch|salloc|scancel|mpirun|mpiexec|mpiexec\.hydra|prterun|prted|orterun|orted|kubelet|kernel)"
    r"(?:\[\d{1,9}\])?: |\*\*\* SIG[A-Z]{3,6} received "
)
"""How lines of launchers and schedulers begin: they end what a rank said before."""

WIDTHS = frozenset({72, 80, 100, 120, 132, 160, 200})
"""What terminals and pages cut lines at, in the middle of words."""


class WrappedLine:
    """The line of an exception with those after it, joined; ``text`` is "" where nothing more can belong to it, and
    ``since`` the number of its first line.

    ``cut``: one of its lines is as long as a terminal is wide, so what is known of it may be of its half. ``uncut``: all that was
    put together where lines were full.
    """

    def __init__(self) -> None:
        self.text = self.uncut = self._spaced = ""
        self._raw, self._head, self.since, self._joined = b"", 0, 0, 0
        self._speaker = NOBODY
        self.cut = False

    def begin(self, text: str, raw: bytes, line: int, speaker: Speaker = NOBODY) -> None:
        """An exception's line. ``raw`` is it with what stands before the clean text: a label, a clock."""
        self.text = self._spaced = text if len(text) <= MAX_WHOLE else ""
        self._raw = raw.rstrip(b"\r\n")
        self._head = max(0, self._raw.find(text[:20].encode("utf-8", "replace")))
        self._speaker, self.since, self._joined, self.uncut = speaker, line, 0, ""
        self.cut = self._is_full(self._raw)

    def joined(self, text: str, raw: bytes, line: int, speaker: Speaker = NOBODY) -> tuple[str, ...]:
        """The line together with the next one, in the two ways that it may go on where the line before was full; nothing
        where that one is too long to be a part of it, or of another process."""
        if speaker.number is not None and speaker.number != self._speaker.number:
            self.text = "" if line - self.since > MAX_BETWEEN else self.text
            return ()
        if ANOTHER_PROGRAM.match(text):
            self.text = ""
            return ()
        raw = raw.rstrip(b"\r\n")
        cut = self._cuts_words(raw)
        self.cut = self.cut or self._is_full(raw)
        whole, spaced = f"{self.text}{'' if cut else ' '}{text}", f"{self._spaced} {text}"
        self.uncut = whole if cut and (self.uncut or not self._joined) else ""
        self._joined += 1
        ended = (
            self._joined >= (MAX_JOINED_CUT if self.cut else MAX_JOINED)
            or len(text) > MAX_PART
            or len(whole) > MAX_WHOLE
        )
        self.text, self._spaced, self._raw = "" if ended else whole, spaced, raw
        return () if len(text) > MAX_PART else tuple(dict.fromkeys((whole, spaced)))

    @property
    def goes_on(self) -> bool:
        """Whether the last line of it was full, so that its end is still to come."""
        return self._is_full(self._raw)

    def _is_full(self, raw: bytes) -> bool:
        """Whether a line is as long as a terminal is wide, with its label or before the label was put in front."""
        return len(raw) in WIDTHS or len(raw) - self._head in WIDTHS

    def _cuts_words(self, raw: bytes) -> bool:
        """Whether the line before was cut where it was full, and not between words."""
        body = raw[self._head :] if raw[: self._head].endswith(self._raw[: self._head][-2:]) else raw
        return self._is_full(self._raw) and not self._raw.endswith(b" ") and not body.startswith(b" ")


# The lines just above a line, and whether a pattern is in them. No line is searched twice for one pattern.
ABOVE, CONTEXT = 40, 300  # how many lines above a line are remembered, and how much of each


@dataclass
class RecentLines:
    """The last lines of a log that are not blank."""

    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=ABOVE))
    count: int = 0
    searched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each pattern: up to which line it was searched, and the last line that has it; counted from 1."""

    def remember(self, raws: Iterable[bytes]) -> None:
        """Take the next lines."""
        for raw in raws:
            self.lines.append(raw[:CONTEXT])
            self.count += 1

    def has(self, pattern: str) -> bool:
        """Whether one of the lines has the pattern.

        >>> above = RecentLines()
        >>> above.remember([b'File "setup.py"', b"  import torch"])
        >>> above.has(r"setup\\.py"), above.has("metadata")
        (True, False)
        """
        until, last = self.searched.get(pattern, (0, 0))
        new = islice(reversed(self.lines), min(self.count - until, len(self.lines)))
        found = (self.count - age for age, raw in enumerate(new) if re.search(pattern, raw.decode("utf-8", "replace")))
        last = next(found, last)
        self.searched[pattern] = self.count, last
        return last > self.count - ABOVE and last > 0


# A log whose every line a logger passed on with a level in front, as schedulers of tasks do: what it passes on is no warning.
LEVEL = r"^.{0,80}?\b(?:INFO|WARNING|WARN|DEBUG|ERROR)"


RELAYED_FRAME = re.compile(
    LEVEL + r"(?P<between>[^\w\"]{1,6}(?:[\w.-]{1,40}[\]:|-]{1,2} ?)?) {2}File \"[^\"]{1,300}\", line \d{1,7}, in "
)


@dataclass
class Relayed:
    """What stands in front of all lines, once a frame of a traceback was seen behind it."""

    head: re.Pattern[str] | None = None

    def learn(self, raw: bytes) -> bool:
        """Whether this line is the first one to show it.

        >>> relayed = Relayed()
        >>> relayed.learn(b'[2026-11-22, 10:00:07 UTC] {run.py:93} INFO -   File "/w/a.py", line 7, in main')
        True
        >>> relayed.strip("{run.py:93} INFO - KeyError: 'labels'"), relayed.strip("KeyError: 'labels'")
        ("KeyError: 'labels'", "KeyError: 'labels'")
        """
        if self.head is not None or b'File "' not in raw:
            return False
        if found := RELAYED_FRAME.match(raw.decode("utf-8", "replace").strip("\r\n")):
            self.head = re.compile(LEVEL + re.escape(found["between"]))
        return found is not None

    def strip(self, text: str) -> str:
        """A text without it."""
        return self.head.sub("", text, count=1).lstrip() if self.head else text

    def is_warning(self, raw: bytes) -> bool:
        """Whether a line is a warning or a notice of the program itself."""
        return self.head is None and is_said(raw)


BATCH_LINES = 32  # how many lines are first looked at together
MAX_WRITERS = 1000  # how many processes are remembered that wrote the line of a rule


def _is_of_commands(entry: Wording | Mark | Clue) -> bool:
    """Whether a command that was typed at a prompt is asked for it: nothing else in a command has happened."""
    return isinstance(entry, Clue) or (isinstance(entry, Mark) and entry.event is Event.ASKED_FOR_STATUS)


ONCE = {Event.COMPILER_ERROR, Event.GPU_FAULT, Event.WINDOWS, Event.NO_GPU, Event.WORLD}
"""Events of which only the first one counts."""

FIRST_HAND = {Event.COMPILER_ERROR, Event.GPU_FAULT}  # what a compiler or a GPU says itself
MAX_ASKED = 5000  # how many lines are searched for one fact
MAX_ERRORS = 100  # so many places that could not be read are remembered
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
    first: dict[Event, Line] = field(default_factory=dict)
    last: dict[Event, Line] = field(default_factory=dict)
    exception: Line | None = None
    last_exception: int = 0
    last_line: int = 0
    ops_line: int = 0
    last_output: int = 0
    broken_off: bool = False
    has_exits_enough: bool = False
    lines: int = 0
    above: RecentLines = field(default_factory=RecentLines)
    traceback_since: int = 0
    wrapped: WrappedLine = field(default_factory=WrappedLine)
    repeats: Repeats = field(default_factory=Repeats)
    effect: Effect = field(default_factory=Effect)
    patterns: Patterns = field(default_factory=lambda: Patterns(INDEX))
    known: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)
    partly: TruncatedLines = field(default_factory=TruncatedLines)
    timeline: Timeline = field(default_factory=Timeline)
    speakers: dict[int, set[Speaker]] = field(default_factory=dict)
    writers: dict[int, Speaker] = field(default_factory=dict)
    """Who wrote the first lines of a GPU and of a compiler."""

    raw: bytes = b""
    begins_with_json: bool = False
    relayed: Relayed = field(default_factory=Relayed)
    records: JsonLines = field(default_factory=JsonLines)
    health: Health = field(default_factory=Health)
    errors: list[ReaderError] = field(default_factory=list)  # what of the log could not be read

    def note_error(self, error: Exception, line: int = 0) -> None:
        """Something of the log could not be read; the first of these are told."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(ReaderError.of(error, line))

    def read(self, raw: bytes, parts: tuple[bytes, ...] = ()) -> None:
        """Take the next line. ``parts``: without any of them it says nothing unless it belongs to a line above."""
        self.lines += 1
        if parts and not self.traceback_since and not self.wrapped.text and not any(part in raw for part in parts):
            if raw.strip(BLANK):
                self._remember(raw)
            else:
                self.timeline.recent.append(raw)
            return
        if len(raw) > LONGEST and cut_matters(raw, self.index):
            self.partly.note(self.lines)
        if len(raw) > CONTEXT:
            raw = shorten(raw)
        if is_coloured(raw):
            raw = COLOUR.sub(b"", raw)
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

    def read_batch(self, batch: list[bytes]) -> set[bytes]:
        """Take the next lines; all words that they have."""
        if not self.lines and batch:
            self.begins_with_json = batch[0].strip() == b"{" and b'"' in b"".join(batch[1:3])
        if self.lines < MAX_RECENT:
            self.timeline.head += [raw[:MAX_REMEMBERED_BYTES] for raw in batch]
        # why together: most batches of a long log have no word of the catalogue at all
        whole = b" ".join(batch)
        tokens = set(words_of(whole))
        cut = len(whole) >= CUT_LENGTH and any(len(raw) == CUT_LENGTH for raw in batch)
        whole_words = whole.isascii() and not is_coloured(whole)
        plain = tokens and whole_words and not cut and not self.traceback_since and not self.wrapped.text
        asked = self.index.numbers(tokens) - self.known if plain else set()
        asked = self.index.those_in(whole.replace(b"\0", b""), asked)
        if not plain or asked:
            parts = self._parts_of(asked) if plain and b"\0" not in whole else ()
            for raw in batch:
                try:
                    self.read(raw, parts)
                except Exception as error:  # the last resort: the other lines are read all the same
                    self.last_line = self.lines
                    self.note_error(error, self.lines)
            return tokens
        last_spoken = max(number for number, raw in enumerate(batch, self.lines + 1) if raw.strip(BLANK))
        self.lines += len(batch)
        self.last_line = last_spoken
        self.above.remember(batch)
        self.timeline.pass_lines(batch)
        self.last_output = self.last_output if self.broken_off else last_spoken
        return tokens

    def _parts_of(self, asked: set[int]) -> tuple[bytes, ...]:
        """The parts of which each line has one that these entries may match; nothing where such a line may be without any."""
        parts = [self.index.parts[number] for number in asked]
        return tuple({part for some in parts for part in some}) if all(parts) else ()

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
        if raw.isascii() and b"\0" not in raw and b"\x1b" not in raw:  # a part is searched as it stands
            numbers = self.index.those_in(raw, numbers)
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
                    if not typed or _is_of_commands(self.index.entries[number]):
                        self._try(number, text)
        if self.wrapped.since == self.lines and self._is_known():
            self.wrapped.text = ""

    def _is_known(self) -> bool:
        """Whether this line is named, and if it may be half of one, so precisely that nothing below can add to it."""
        found = [self.hits[number] for number in self.effect.hits if number in self.hits]
        return any(hit.precise or not self.wrapped.cut for hit in found)

    def _searched(self, text: str, entries: int) -> str:
        """What of a text is searched for so many entries."""
        part = truncated_for_search(text, entries)
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
            if self.fact_reader.read(entry, text) or self.asked[number] > MAX_ASKED:
                self.known.add(number)
            if entry.name == INSTALL_OPS and "Install Ops=" in text:
                self.ops_line = self.lines
        elif isinstance(entry, Mark):
            marked = self.last.get(entry.event)
            if not (marked and marked.number == self.lines) and self._stands_there(number, entry, text):
                self._mark(entry.event, text)
                if entry.event in ONCE or (entry.event is Event.EXITED and self.has_exits_enough):
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
        enough = self.timeline.take(event, text, self.raw, self.lines, self.above.lines)
        self.has_exits_enough = self.has_exits_enough or enough

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
        if len(writers) < MAX_WRITERS:
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
            whole.health.pass_lines(batch, first, whole.read_batch(batch))
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
                batch.extend(islice(raws, BATCH_LINES))
            else:
                for raw in raws:
                    batch.append(raw)
                    if len(batch) == BATCH_LINES or not at_hand():
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


def groups_of(found: re.Match[str]) -> dict[str, str]:
    """The named groups that matched; ``name2`` is another wording's ``name``.

    >>> groups_of(re.search("(?P<op>x)|(?P<op2>y)", "y"))
    {'op': 'y'}
    """
    return {name.rstrip("23456"): value for name, value in found.groupdict().items() if value}
