"""The catalogue by its words: which entries can match a line, found without searching the line."""

from collections import Counter
from dataclasses import dataclass

from dsdoctor.diagnosis.catalogue.rules import RULES
from dsdoctor.diagnosis.facts import CLUES, INSTALL_OPS, LISTS, Clue
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


def index() -> Index:
    """The whole catalogue by its words."""
    entries: list[Entry] = [*MARKS, INSTALL_OPS, *CLUES, *LISTS]
    entries += [Wording(rule=rule, signature=signature) for rule in RULES.values() for signature in rule.signatures]
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
