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
