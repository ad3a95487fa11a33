"""Raw lines -> what stands in them: hits, facts, marks. One pass, bounded memory, time that grows with the bytes alone.

A line is split into words in C; only a line that has a word of the catalogue is cleaned and searched.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dsdoctor.diagnosis.clean import COLOUR, segments, shorten
from dsdoctor.diagnosis.facts import CLUES, INSTALL_OPS, LISTS, Clue, Gathering
from dsdoctor.diagnosis.marks import MARKS, Event, Mark
from dsdoctor.diagnosis.nouns import Hit, Rule, Signature
from dsdoctor.diagnosis.rules import RULES
from dsdoctor.diagnosis.say import groups_of

ABOVE, CONTEXT = 40, 300
"""How many lines above a line are remembered, and how much of each."""

TRIES = 2000
"""How often the lines above are searched in vain for one signature: a hostile log shall not make that dear."""

BATCH = 32
"""How many lines are looked at together first."""

SEEN, REMEMBERED = 1000, 4000
"""How many different lines are remembered with what they did, and how long such a line may be."""

ASKED = 5000
"""How many lines are asked for one fact."""

LONGEST_TRACEBACK = 400
A_COMPILE = b"dtorch_extension_name"
"""Stands in every command that compiles for torch; such a line shows flags, never an error."""

WORD_BYTES = bytes(
    ord(chr(byte).lower()) if byte < 128 and (chr(byte).isalnum() or byte == ord("_")) else ord(" ")
    for byte in range(256)
)
SOURCE = re.compile(
    r"(?:raise|assert|return |print\(|self\.warning|warnings\.warn|logger?\.|"
    r"if |elif |except |f?[\"'].{0,4000}[\"'][)\\,]{0,3}$|# |\^)"
)
"""Lines of source code that a traceback or a compiler repeats: they hold messages that were not (yet) said."""


@dataclass(frozen=True, kw_only=True)
class Wording:
    """A signature with its rule."""

    rule: Rule
    signature: Signature


Entry = Wording | Clue | Mark


@dataclass(frozen=True)
class Index:
    """From a word to whatever looks at lines with that word."""

    entries: tuple[Entry, ...]
    words: dict[bytes, list[tuple[int, frozenset[bytes]]]]
    phrases: dict[str, list[int]]


def index() -> Index:
    """The whole catalogue by its words."""
    entries: list[Entry] = [*MARKS, INSTALL_OPS, *CLUES, *LISTS]
    entries += [Wording(rule=rule, signature=signature) for rule in RULES.values() for signature in rule.signatures]
    words: dict[bytes, list[tuple[int, frozenset[bytes]]]] = {}
    phrases: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        for word in (entry.signature.words if isinstance(entry, Wording) else entry.words).split():
            if word.isascii():
                first, *others = word.encode().split(b"+")
                words.setdefault(first, []).append((number, frozenset(others)))
            else:
                phrases.setdefault(word, []).append(number)
    return Index(tuple(entries), words, phrases)


INDEX = index()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A clean line and its number in the log."""

    number: int
    text: str


@dataclass
class Effect:
    """What a line did. ``repeats``: it does the same again wherever it stands."""

    marks: list[tuple[Event, str]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    repeats: bool = True


@dataclass
class Scan:
    """One log while it is read."""

    index: Index = INDEX
    gathering: Gathering = field(default_factory=Gathering)
    hits: dict[int, Hit] = field(default_factory=dict)
    first: dict[Event, Line] = field(default_factory=dict)
    last: dict[Event, Line] = field(default_factory=dict)
    exception: Line | None = None
    last_exception: int = 0
    last_line: int = 0
    ops_line: int = 0
    spoken: int = 0
    broken_off: bool = False
    lines: int = 0
    tries: dict[int, int] = field(default_factory=dict)
    above: deque[bytes] = field(default_factory=lambda: deque(maxlen=ABOVE))
    traceback_since: int = 0
    seen: dict[bytes, Effect] = field(default_factory=dict)
    effect: Effect = field(default_factory=Effect)
    patterns: dict[int, re.Pattern[str]] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)

    def read(self, raw: bytes) -> None:
        """Take the next line."""
        self.lines += 1
        if len(raw) > CONTEXT:
            raw = shorten(raw)
        if _coloured(raw):
            raw = COLOUR.sub(b"", raw)
        tokens = raw.translate(WORD_BYTES, b"\0").split()
        if not tokens and not raw.strip():
            return
        self.last_line = self.lines
        words = self.index.words
        if self.traceback_since or not words.keys().isdisjoint(tokens) or not raw.isascii():
            self._look(raw, tokens)
        self.above.append(raw[:CONTEXT])
        if not self.broken_off:
            self.spoken = self.lines

    def read_batch(self, batch: list[bytes]) -> None:
        """Take the next lines: most batches of a long log hold no word of the catalogue at all."""
        whole = b" ".join(batch)
        tokens = whole.translate(WORD_BYTES, b"\0").split()
        plain = tokens and whole.isascii() and not _coloured(whole) and not self.traceback_since
        if not plain or not self.index.words.keys().isdisjoint(tokens):
            for raw in batch:
                self.read(raw)
            return
        spoken = max(number for number, raw in enumerate(batch, self.lines + 1) if raw.strip())
        self.lines += len(batch)
        self.last_line = spoken
        self.above.extend(raw[:CONTEXT] for raw in batch[-ABOVE:])
        self.spoken = self.spoken if self.broken_off else spoken

    def _look(self, raw: bytes, tokens: list[bytes]) -> None:
        if not self.traceback_since and (effect := self.seen.get(raw)):
            self._repeat(effect)
            return
        self.effect = Effect()
        self._examine(raw, tokens)
        if len(raw) <= REMEMBERED and self.effect.repeats:
            if len(self.seen) >= SEEN:
                self.seen.clear()
            self.seen[raw] = self.effect

    def _repeat(self, effect: Effect) -> None:
        """The same line again does the same again."""
        for event, text in effect.marks:
            self._mark(event, text)
        for number in effect.hits:
            self.hits[number] = replace(self.hits[number], count=self.hits[number].count + 1)

    def _examine(self, raw: bytes, tokens: list[bytes]) -> None:
        words, known = set(tokens), self.index.words
        numbers = {
            number for word in words & known.keys() for number, others in known[word] if not others or others <= words
        }
        numbers -= self.known
        if not numbers and not self.traceback_since and raw.isascii():
            return
        if A_COMPILE in words:
            numbers = {number for number in numbers if not isinstance(self.index.entries[number], Wording)}
        texts = segments(raw)
        if not raw.isascii():
            whole = " ".join(texts).lower()
            numbers |= {number for phrase, found in self.index.phrases.items() if phrase in whole for number in found}
        for text in texts:
            if self.traceback_since:
                self._follow_traceback(text)
            if numbers and not SOURCE.match(text):
                for number in sorted(numbers):
                    self._try(number, text)

    def _follow_traceback(self, text: str) -> None:
        """The line that ends a traceback names the exception."""
        if self.lines - self.traceback_since > LONGEST_TRACEBACK:
            self.traceback_since = 0
        elif re.match(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Warning)?(?:: |$)", text):
            self.traceback_since = 0
            if not text.startswith("KeyboardInterrupt"):
                self.exception = self.exception or Line(number=self.lines, text=text)
                self.last_exception = self.lines

    def _try(self, number: int, text: str) -> None:
        entry = self.index.entries[number]
        if isinstance(entry, Clue):
            self.asked[number] = self.asked.get(number, 0) + 1
            if self.gathering.read(entry, text) or self.asked[number] > ASKED:
                self.known.add(number)
            self.ops_line = self.lines if entry is INSTALL_OPS else self.ops_line
        elif isinstance(entry, Mark):
            if self._search(number, entry.pattern, text):
                self._mark(entry.event, text)
                self.effect.marks.append((entry.event, text))
        else:
            self._match(number, entry, text)

    def _search(self, number: int, pattern: str, text: str) -> re.Match[str] | None:
        """Like re.search, which looks into its cache at every call."""
        if (compiled := self.patterns.get(number)) is None:
            compiled = self.patterns[number] = re.compile(pattern)
        return compiled.search(text)

    def _mark(self, event: Event, text: str) -> None:
        line = Line(number=self.lines, text=text)
        self.first.setdefault(event, line)
        self.last[event] = line
        if event in {Event.TRACEBACK, Event.CANCELLED}:
            self.broken_off = True
        if event is Event.EXCEPTION:
            self.exception = self.exception or line
            self.last_exception = self.lines
        elif event is Event.TRACEBACK:
            self.traceback_since = self.lines
        elif event is Event.WAITING:
            self.broken_off = False

    def _match(self, number: int, wording: Wording, text: str) -> None:
        signature = wording.signature
        found = self._search(number, signature.pattern, text)
        if not found or (signature.unless and re.search(signature.unless, text)):
            return
        if known := self.hits.get(number):
            self.hits[number] = replace(known, count=known.count + 1)
            self.effect.hits.append(number)
        elif self._fits_above(number, signature):
            groups = groups_of(found)
            op = groups.get("op") or signature.op or self.gathering.values.get("op")
            self.hits[number] = Hit(
                rule=wording.rule, signature=signature, line=self.lines, text=text, groups=groups, op=op
            )
            self.effect.hits.append(number)
        else:
            self.effect.repeats = False

    def _fits_above(self, number: int, signature: Signature) -> bool:
        if not signature.after and not signature.not_after:
            return True
        self.tries[number] = self.tries.get(number, 0) + 1
        if self.tries[number] > TRIES:
            return False
        above = b"\n".join(self.above).decode("utf-8", "replace")
        if signature.not_after and re.search(signature.not_after, above):
            return False
        return not signature.after or re.search(signature.after, above) is not None


def _coloured(raw: bytes) -> bool:
    """Whether colours may stand in it, which grow together with the words."""
    return b"\x1b" in raw or b"[0m" in raw


def scan(lines: Iterable[bytes | str]) -> Scan:
    """Read all lines once."""
    whole, batch = Scan(), []
    for line in lines:
        batch.append(line if isinstance(line, bytes) else line.encode("utf-8", "replace"))
        if len(batch) == BATCH:
            whole.read_batch(batch)
            batch = []
    whole.read_batch(batch)
    return whole
