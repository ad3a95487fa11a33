"""What is looked for before a pattern is searched leaves no line out that the pattern matches."""

import re

import pytest

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.lines import segments
from dsdoctor.diagnosis.prefilter import INDEX, Entry, Wording, needles, words_of
from tests.diagnosis.pumped import example_of
from tests.diagnosis.test_wordings import CASES
from tests.each import each

LINES = {line for _, log in CASES for line in log} | {
    line for rule in RULES.values() for one in rule.signatures for line in one.sample.splitlines()
}


def pattern_of(entry: Entry) -> str:
    return entry.signature.pattern if isinstance(entry, Wording) else entry.pattern


NEEDLES = [needles(pattern_of(entry)) for entry in INDEX.entries]


def lost(text: str, numbers: set[int]) -> list[str]:
    """The patterns that match a text in which none of their needles is."""
    left_out = [number for number in numbers if NEEDLES[number] and not any(one in text for one in NEEDLES[number])]
    return [
        pattern for pattern in (pattern_of(INDEX.entries[number]) for number in left_out) if re.search(pattern, text)
    ]


@pytest.mark.slow
def test_no_line_of_the_field_is_lost() -> None:
    texts = [(text, line) for line in LINES for text in segments(line.encode())]

    assert [text for text, line in texts if lost(text, INDEX.numbers(set(words_of(line.encode()))))] == []


def test_no_line_that_is_made_of_a_pattern_is_lost() -> None:
    assert [example for example in made() if lost(*example)] == []


def made() -> list[tuple[str, set[int]]]:
    return [(example_of(pattern_of(entry)), {number}) for number, entry in enumerate(INDEX.entries)]


def test_nearly_every_pattern_has_needles() -> None:
    assert sum(1 for found in NEEDLES if not found) < len(NEEDLES) / 50


@each("pattern", [r"a*b?", r"(?:abcd)?", r"[abc]{4}", r"(?=abcd)", r"(?P<a>\w)(?P=a)", r"x{0,3}abc|", r"(?i)abcdef"])
def test_nothing_is_said_of_a_pattern_of_which_nothing_is_sure(pattern: str) -> None:
    assert needles(pattern) == ()


@each(
    ("pattern", "found"),
    [
        (r"abc+d", ("abc",)),
        (r"abcd?e", ("abc",)),
        (r"(?:abcd){2}(?:ef)*", ("abcd",)),
        (r"a\.b\(c[)\]x]defg", ("a.b(c",)),
        (r"(?<!xyzw)(?:one|two(?:three)?) four", (" four",)),
        (r"^(?P<name>abcd|(?:efgh|ijkl))$", ("abcd", "efgh", "ijkl")),
    ],
)
def test_the_longest_text_that_every_match_has_is_found(pattern: str, found: tuple[str, ...]) -> None:
    assert needles(pattern) == found
