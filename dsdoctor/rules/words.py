"""A pattern -> the words, and the parts of text, that every line has which it matches: by them a log's lines are sorted out first.

A word is made of letters, digits and ``_``, in small letters, as ``diagnosis/scan.py`` splits a line. Only the table of rules
is made with this (``table.py``), when the package is built.
"""

import itertools
import re
import sys
from collections.abc import Iterable
from typing import Any

if sys.version_info >= (3, 11):
    import re._constants as c
    import re._parser as parser
else:
    import sre_constants as c
    import sre_parse as parser

ANYTHING, EDGE, GAP = "\0", "\1", " "
"""What a skeleton has beside letters: any text, also one that lengthens a word; the edge of a word; what no word has."""
MAX_SKELETONS = 96
MAX_LETTERS_OF_A_SET = 4
MIN_PART_LENGTH, MAX_PARTS = 4, 40
"""How long a part must be to sort lines out, and how many alternatives are worth looking for."""
WHOLE_WORD = re.compile(r"(?<=[^\0a-z0-9_])[a-z0-9_]{2,}(?=[^\0a-z0-9_])")
EDGES = {c.AT_BEGINNING, c.AT_BOUNDARY, c.AT_END, c.AT_END_STRING, c.AT_BEGINNING_STRING}


def derived_words(pattern: str) -> str:
    r"""The words in the form of a wording's ``words``: alternatives apart by blanks, the words of one joined by ``+``.

    "" where a line without any particular word may match.

    >>> derived_words(r"^RuntimeError: 'weight' must be (?:2|3)-D (?P<what>\w+)")
    'be+must+runtimeerror+weight'
    >>> derived_words(r"no (?:working )?compiler (?:was )?found"), derived_words(r"\w+ing? of|x{2,}")
    ('compiler', '')
    """
    found = {frozenset(WHOLE_WORD.findall(skeleton)) for skeleton in skeletons(pattern)}
    if not all(found):
        return ""
    needed = [words for words in found if not any(other < words for other in found)]
    return " ".join(sorted("+".join(sorted(words)) for words in needed))


def skeletons(pattern: str) -> list[str]:
    """What a match looks like, in small letters, for each of its alternatives."""
    items: Any = parser.parse(pattern)
    return [f"{ANYTHING}{text}{ANYTHING}" for text in _sequence(items)]


def _sequence(items: Iterable[Any]) -> list[str]:
    found = [""]
    for op, given in items:
        parts = _item(op, given)
        if len(found) * len(parts) > MAX_SKELETONS:
            parts = [ANYTHING]
        found = [before + part for before, part in itertools.product(found, parts)]
    return found


def _item(op: Any, given: Any) -> list[str]:
    if op is c.LITERAL:
        return [_letter(given)]
    if op is c.AT:
        return [EDGE] if given in EDGES else [""]
    if op is c.IN:
        return _set(given)
    if op is c.BRANCH:
        return list(dict.fromkeys(text for branch in given[1] for text in _sequence(branch)))
    if op is c.SUBPATTERN:
        return _sequence(given[3])
    if op in (c.MAX_REPEAT, c.MIN_REPEAT):
        return _repeat(*given)
    return [""] if op in (c.ASSERT, c.ASSERT_NOT) else [ANYTHING]


def _repeat(least: int, most: int, body: Iterable[Any]) -> list[str]:
    once = _sequence(body)
    if (least, most) == (0, 1):
        return list(dict.fromkeys(["", *once]))
    if set(once) == {GAP}:
        return [GAP] if least else [ANYTHING]
    if least == 0:
        return [ANYTHING]
    return once if (least, most) == (1, 1) else [f"{text}{ANYTHING}" for text in once]


def _letter(code: int) -> str:
    char = chr(code)
    return char.lower() if char.isascii() and (char.isalnum() or char == "_") else GAP


def _set(given: Iterable[Any]) -> list[str]:
    letters: set[str] = set()
    for op, what in given:
        if op is c.LITERAL:
            letters.add(_letter(what))
        elif op is c.CATEGORY and what in (c.CATEGORY_SPACE, c.CATEGORY_NOT_WORD):
            letters.add(GAP)
        else:
            return [ANYTHING]
    return sorted(letters) if len(letters) <= MAX_LETTERS_OF_A_SET else [ANYTHING]


def derived_parts(pattern: str) -> tuple[str, ...]:
    r"""Texts of which every match has one at least, as they stand, so that lines are sorted out by them before a pattern is tried.

    None where a match may be without any, or where they would be short or many.

    >>> derived_parts(r"^(?:Retrying|[Ww]ill retry)|gave up \(\d\)"), derived_parts(r"(?i)will retry|\d{3}: no")
    (('Retrying', 'ill retry', 'gave up ('), ())
    """
    items: Any = parser.parse(pattern)
    if items.state.flags & re.IGNORECASE:
        return ()
    return tuple(dict.fromkeys(_parts(items)))


def _parts(items: Iterable[Any]) -> tuple[str, ...]:
    """The best choice for a sequence: a run of letters in it, or what each alternative at one of its places has."""
    choices: list[tuple[str, ...]] = []
    run = ""
    for op, given in items:
        if op is c.LITERAL:
            run += chr(given)
            continue
        if op is c.SUBPATTERN and not given[1] and all(one is c.LITERAL for one, _ in given[3]):
            run += "".join(chr(code) for _, code in given[3])
            continue
        if op in (c.AT, c.ASSERT, c.ASSERT_NOT):
            continue
        choices.append((run,))
        run = ""
        if op is c.SUBPATTERN and not given[1] & re.IGNORECASE:
            choices.append(_parts(given[3]))
        elif op is c.BRANCH:
            branches = [_parts(branch) for branch in given[1]]
            choices.append(tuple(part for parts in branches for part in parts) if all(branches) else ())
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT) and given[0]:
            choices.append(_parts(given[2]))
    choices.append((run,))
    good = [one for one in choices if one and len(one) <= MAX_PARTS and min(map(len, one)) >= MIN_PART_LENGTH]
    return max(good, key=lambda one: (len(one) == 1, min(map(len, one)), -len(one)), default=())
