"""Which entries of the catalogue can match a line, found without searching it."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.facts import CLUES, INSTALL_OPS, LISTS, Clue
from dsdoctor.diagnosis.lines import LONGEST
from dsdoctor.diagnosis.marks import MARKS, Mark
from dsdoctor.diagnosis.models import Rule, Signature

# A pattern -> texts of which every match holds one. To look for them costs a tenth of what a search that fails costs.


SHORTEST = 3
"""A shorter text is in too many lines to be worth looking for."""

NO_LETTERS = frozenset("dDwWsSbBAZ0123456789xuUNnrtfva")
"""What after a backslash is a kind of character, or a place, and no character itself."""


@dataclass
class Reader:
    """A pattern that is read from left to right."""

    pattern: str
    place: int = 0

    def peek(self) -> str:
        """The next character, or nothing at the end."""
        return self.pattern[self.place : self.place + 1]

    def take(self, length: int = 1) -> str:
        """The next characters, which are then read."""
        taken = self.pattern[self.place : self.place + length]
        self.place += length
        return taken

    def skip_class(self) -> None:
        """Read on behind a set in square brackets, whose first one was read."""
        if self.peek() == "^":
            self.place += 1
        first = self.place
        while self.peek() and (self.peek() != "]" or self.place == first):
            self.place += 2 if self.peek() == "\\" else 1
        self.place += 1

    def quantifier(self) -> tuple[bool, bool]:
        """Whether what was read may be left out, and whether it may come more than once."""
        rest = self.pattern[self.place :]
        if rest[:1] in {"?", "*", "+"}:
            self.place += 1
            found = (rest[0] != "+", rest[0] != "?")
        elif rest[:1] == "{" and rest[1:2].isdigit() and "}" in rest:
            inside = rest[1 : rest.index("}")]
            self.place += len(inside) + 2
            found = (inside.split(",")[0] == "0", True)
        else:
            return False, False
        if self.peek() == "?":
            self.place += 1
        return found


@dataclass
class Branch:
    """One alternative while it is read: the plain text that is read, and the best needles so far."""

    run: str = ""
    best: tuple[str, ...] = ()
    found: list[tuple[str, ...]] = field(default_factory=list)

    def end_run(self) -> None:
        """The plain text ends here."""
        self.offer((self.run,))
        self.run = ""

    def offer(self, needles: tuple[str, ...]) -> None:
        """Take needles if they are longer than those known."""
        if needles and min(map(len, needles)) > min(map(len, self.best), default=SHORTEST - 1):
            self.best = needles


def needles(pattern: str) -> tuple[str, ...]:
    r"""Texts of which every match of a pattern holds one; none where nothing is sure.

    >>> needles(r"^OSError: \[Errno 30\] Read-only file system(?:: '(?P<path>[^']{1,200})')?")
    ('OSError: [Errno 30] Read-only file system',)
    >>> needles(r"(?:CUDA|HIP) error: (?:no kernel|an ill)"), needles(r"(?:Key|Value)s"), needles(r"a|b"), needles(r"(?i)nan of it")
    ((' error: ',), ('Key', 'Value'), (), ())
    >>> needles(r"\bRetry(?:ing)? x{2,3}: (?!total)(?P<n>total=[1-9]\d)"), needles(r"'[^']+' missing|absent\.+")
    (('total=',), ("' missing", 'absent.'))
    """
    if "(?i" in pattern:
        return ()
    return _alternatives(Reader(pattern))


def _alternatives(reader: Reader) -> tuple[str, ...]:
    """The needles of what stands up to the end, or to the bracket that closes a group."""
    branches = [Branch()]
    while (char := reader.take()) and char != ")":
        branch = branches[-1]
        if char == "|":
            branch.end_run()
            branches.append(Branch())
        else:
            _read(char, reader, branch)
    branches[-1].end_run()
    every = [branch.best for branch in branches]
    return tuple(text for best in every for text in best) if all(every) else ()


def _read(char: str, reader: Reader, branch: Branch) -> None:
    """Read one part of an alternative."""
    if char == "(":
        branch.end_run()
        looks = reader.peek() == "?" and reader.pattern[reader.place + 1 : reader.place + 3].strip("<")[:1] in {
            "!",
            "=",
        }
        if reader.peek() == "?":
            _skip_kind(reader)
        inside = _alternatives(reader)
        optional, _ = reader.quantifier()
        if not optional and not looks:
            branch.offer(inside)
        return
    letter = char
    if char == "[":
        reader.skip_class()
        letter = ""
    elif char == "\\":
        letter = reader.take()
        letter = "" if letter in NO_LETTERS else letter
    elif char in ".^$":
        letter = ""
    optional, several = reader.quantifier()
    if not letter or optional:
        branch.end_run()
        return
    branch.run += letter
    if several:
        branch.end_run()


def _skip_kind(reader: Reader) -> None:
    """Read what says which kind of group it is: ``?:``, ``?P<name>``, ``?!``, ``?<=`` and the like."""
    kind = reader.take(2)
    if kind == "?P":
        # why: (?P=name) repeats what another group found, which nobody knows
        reader.place = reader.pattern.index(">" if reader.peek() == "<" else ")", reader.place)
        reader.place += reader.peek() == ">"
    elif kind == "?<":
        reader.take()


# The catalogue by its words: which entries can match a line, found without searching the line.


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

    def numbers(self, words: set[bytes]) -> set[int]:
        """The numbers of the entries that can match a line with these words."""
        known = self.words
        return {
            number for word in words & known.keys() for number, others in known[word] if not others or others <= words
        }


def index(rules: Iterable[Rule] = tuple(RULES.values())) -> Index:
    """Marks, clues and rules by their words."""
    entries: list[Entry] = [*MARKS, INSTALL_OPS, *CLUES, *LISTS]
    of_lines = (rule for rule in rules if not rule.general)
    entries += [Wording(rule=rule, signature=signature) for rule in of_lines for signature in rule.signatures]
    words: dict[bytes, list[tuple[int, frozenset[bytes]]]] = {}
    phrases: dict[str, list[int]] = {}
    wanted = [(number, word) for number, entry in enumerate(entries) for word in _words_wanted(entry).split()]
    uses = Counter(part for _, word in wanted for part in word.encode().split(b"+"))
    for number, word in wanted:
        if word.isascii():
            parts = word.encode().split(b"+")
            # why: the rarer word leads to fewer entries whose other words are then looked for
            rarest = min(parts, key=lambda part: (uses[part], -len(part)))
            words.setdefault(rarest, []).append((number, frozenset(parts) - {rarest}))
        else:
            phrases.setdefault(word, []).append(number)
    return Index(tuple(entries), words, phrases)


def _words_wanted(entry: Entry) -> str:
    return entry.signature.words if isinstance(entry, Wording) else entry.words


INDEX = index()


def words_of(raw: bytes) -> list[bytes]:
    """The words of a line in small letters, in C; NULs between letters (16-bit text) are dropped.

    >>> words_of(b"fatal error: Cusparse_v2.h")
    [b'fatal', b'error', b'cusparse_v2', b'h']
    """
    return raw.translate(WORD_BYTES, b"\0").split()


# Entries whose words a line has, and a text -> those whose pattern can match it; patterns are compiled when first asked for.


MOST = 1000
"""For how many different sets of entries it is remembered what to look for."""


@dataclass
class Possible:
    """What is looked for, by the set of entries that a line's words ask for. Several logs may share it."""

    index: Index
    known: dict[int, tuple[str, ...]] = field(default_factory=dict)
    plans: dict[frozenset[int], list[tuple[int, tuple[str, ...]]]] = field(default_factory=dict)
    patterns: dict[int, re.Pattern[str]] = field(default_factory=dict)

    def search(self, number: int, pattern: str, text: str) -> re.Match[str] | None:
        """Like re.search, without its look into the cache at every call."""
        if (compiled := self.patterns.get(number)) is None:
            compiled = self.patterns[number] = re.compile(pattern)
        return compiled.search(text)

    def among(self, numbers: set[int], text: str) -> list[int]:
        """The entries that can match a text: it has something that each match of the pattern has."""
        asked = frozenset(numbers)
        if (plan := self.plans.get(asked)) is None:
            if len(self.plans) >= MOST:
                self.plans.clear()
            plan = self.plans[asked] = [(number, self._needles(number)) for number in sorted(numbers)]
        possible = []
        for number, texts in plan:  # why loops: a generator for each of them costs as much as the search
            for one in texts:
                if one in text:
                    possible.append(number)
                    break
        return possible

    def _needles(self, number: int) -> tuple[str, ...]:
        """Texts of which each match of an entry has one; the empty one, which all texts have, where none is known."""
        if (found := self.known.get(number)) is None:
            entry = self.index.entries[number]
            pattern = entry.signature.pattern if isinstance(entry, Wording) else entry.pattern
            found = self.known[number] = needles(pattern) or ("",)
        return found


# Lines of a build of which very many are alike: how often each kind came, so that the others need not be searched.


ROUTINE, KINDS = 200, 1000
"""How many compile commands of one extension, and how many warnings, are read before the others are skipped; of how many kinds."""

A_COMMAND, A_WARNING = b"-DTORCH_EXTENSION_NAME=", b": warning: "
"""Parts of torch's compile commands, and of the warnings of gcc and clang; errors name the file, then ``error:``."""


def kind_of(raw: bytes) -> bytes:
    """The extension that a command compiles, or ``: warning: ``; nothing where a line is neither, or says more.

    >>> kind_of(b"c++ -DTORCH_EXTENSION_NAME=cpu_adam -O3 -c a.cpp"), kind_of(b"x.h:1:1: warning: unused"), kind_of(b"step 7")
    (b'cpu_adam', b': warning: ', b'')
    """
    if A_COMMAND in raw and b"illed" not in raw:  # a shell says "Killed" in the line of the command
        return raw.partition(A_COMMAND)[2][:40].split(b" ")[0] or A_COMMAND
    return A_WARNING if A_WARNING in raw and b"rror:" not in raw else b""


@dataclass
class Routine:
    """How often lines of each kind came."""

    times: dict[bytes, int] = field(default_factory=dict)

    def is_known(self, kind: bytes) -> bool:
        """Count one more line of a kind; whether very many came before it."""
        before = self.times.get(kind, 0)
        if len(self.times) < KINDS or before:
            self.times[kind] = before + 1
        return before >= ROUTINE


# Lines too long, or with words of too many rules, to be searched whole: what of them is searched, and how many there were.


CROWD, SHORT = 40, 300
"""How many entries a line may ask for: of a longer line with the words of more, less is searched, so that it costs no more.

Of real lines none asks for more than 25.
"""

CUT = 2 * LONGEST + 1
"""The length of a line whose middle ``raw_lines`` has thrown away already."""


@dataclass
class Partly:
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
    return len(raw) == CUT or not index.words.keys().isdisjoint(middle)


def part_to_search(text: str, entries: int) -> str:
    """What of a text is searched for so many entries: head and tail of a long one with words of very many."""
    room = max(SHORT, len(text) * CROWD // max(1, entries))
    if entries <= CROWD or len(text) <= room:
        return text
    return f"{text[: room * 3 // 4]} {text[-room // 4 :]}"
