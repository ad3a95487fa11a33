"""Lines made to be slow: every quantifier of a pattern is reached, pumped to the length of a line, and then fails."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    import re._constants as kind
    import re._parser as parser
else:
    import sre_constants as kind
    import sre_parse as parser

LENGTH = 3900
"""A little less than the longest line that is read whole."""

LEAST = 8
"""A quantifier that repeats less than this is not pumped."""

LETTERS = "a1A/._- :'\"@=,<E(\\["
"""What pumped parts are made of, as far as a set allows."""

UNITS = ("a/", "a.", "a ", "1.", "a:", "a'")
Node = tuple[Any, Any]
ONE = {kind.IN, kind.ANY, kind.NOT_LITERAL, kind.LITERAL}


@dataclass(frozen=True)
class Pump:
    """A quantifier: what leads to it, what it repeats, and what would have to follow."""

    before: str
    units: tuple[str, ...]
    after: str
    free: bool
    """It can begin at every place of a line: nothing has to stand before it, no anchor, and no letter but its own."""

    endless: bool


def pumps(pattern: str) -> list[Pump]:
    """All quantifiers of a pattern that can repeat often."""
    return list(_pumps(list(parser.parse(pattern)), "", "", free=True))


def example_of(pattern: str) -> str:
    """A text that a pattern matches."""
    return example(list(parser.parse(pattern)))


def lines(pump: Pump, words: str) -> Iterator[str]:
    """Lines that are near misses of a pattern, with the words that make it be searched."""
    room = LENGTH - len(words) - 10
    near = pump.after[:-1] + "~"
    for unit in pump.units:
        yield _filled(pump.before, unit, room) + f" {words}"
        yield _filled("", unit, room) + f" {words}"
        yield f"{words} " + _filled(pump.before, unit, room - len(near)) + near
        yield _filled("", pump.before + unit * 30, room) + f" {words}"
        yield _filled("", pump.before + unit, room) + f" {words}"
        yield _filled("", unit * 30 + near, room) + f" {words}"


def _filled(before: str, unit: str, room: int) -> str:
    return (before + unit * (room // max(1, len(unit)) + 1))[:room]


def _pumps(nodes: Sequence[Node], before: str, after: str, *, free: bool) -> Iterator[Pump]:
    for place, (name, value) in enumerate(nodes):
        rest = example(nodes[place + 1 :]) + after
        if name in {kind.MAX_REPEAT, kind.MIN_REPEAT}:
            _, most, body = value
            if most >= LEAST:
                own = free and all(_can_hold(list(body), letter) for letter in before)
                yield Pump(before, _units(list(body)), rest, own, most is kind.MAXREPEAT)
        for inner in _inside(name, value):
            yield from _pumps(inner, before, rest, free=free)
        before += example([(name, value)])
        free = free and not _holds_back(name, value)


def _inside(name: Any, value: Any) -> Iterator[list[Node]]:
    if name in {kind.MAX_REPEAT, kind.MIN_REPEAT, kind.SUBPATTERN}:
        yield list(value[-1])
    elif name in {kind.ASSERT, kind.ASSERT_NOT}:
        yield list(value[1])
    elif name is kind.BRANCH:
        yield from (list(branch) for branch in value[1])


def _holds_back(name: Any, value: Any) -> bool:
    """Whether it is, or has, an anchor or a look behind."""
    looks_behind = name in {kind.ASSERT, kind.ASSERT_NOT} and value[0] < 0
    return name is kind.AT or looks_behind or any(_holds_back(*node) for part in _inside(name, value) for node in part)


def _can_hold(body: list[Node], letter: str) -> bool:
    return len(body) == 1 and body[0][0] in ONE and _allows(body[0], letter)


def _units(body: list[Node]) -> tuple[str, ...]:
    if len(body) != 1 or body[0][0] not in ONE:
        return (example(body),)
    allowed = [letter for letter in LETTERS if _allows(body[0], letter)]
    pairs = [unit for unit in UNITS if all(_allows(body[0], letter) for letter in unit)]
    return (*allowed[:3], *pairs[:3]) or (example(body),)


def example(nodes: Sequence[Node]) -> str:
    """A text that the nodes match, as short as they allow."""
    return "".join(_example(name, value) for name, value in nodes)


def _example(name: Any, value: Any) -> str:
    if name is kind.LITERAL:
        return chr(value)
    if name in {kind.IN, kind.ANY, kind.NOT_LITERAL}:
        return next((letter for letter in LETTERS if _allows((name, value), letter)), None) or _first(value)
    if name in {kind.MAX_REPEAT, kind.MIN_REPEAT}:
        return example(list(value[2])) * value[0]
    if name is kind.SUBPATTERN:
        return example(list(value[-1]))
    if name is kind.BRANCH:
        return example(list(value[1][0]))
    return ""


def _first(value: Any) -> str:
    name, inner = value[0]
    return chr(inner) if name is kind.LITERAL else chr(inner[0]) if name is kind.RANGE else "?"


def _allows(node: Node, letter: str) -> bool:
    name, value = node
    if name is kind.ANY:
        return letter != "\n"
    if name is kind.LITERAL:
        return letter == chr(value)
    if name is kind.NOT_LITERAL:
        return letter != chr(value)
    inside = [part for part in value if part[0] is not kind.NEGATE]
    return any(_part_allows(part, letter) for part in inside) is (len(inside) == len(value))


def _part_allows(part: Node, letter: str) -> bool:
    name, value = part
    if name is kind.RANGE:
        return value[0] <= ord(letter) <= value[1]
    if name is kind.LITERAL:
        return letter == chr(value)
    is_word, is_digit, is_space = letter.isalnum() or letter == "_", letter.isdigit(), letter.isspace()
    return {
        kind.CATEGORY_WORD: is_word,
        kind.CATEGORY_NOT_WORD: not is_word,
        kind.CATEGORY_DIGIT: is_digit,
        kind.CATEGORY_NOT_DIGIT: not is_digit,
        kind.CATEGORY_SPACE: is_space,
        kind.CATEGORY_NOT_SPACE: not is_space,
    }[value]
