"""Where in the text of a configuration (JSON or Hjson) each key and value stands. Reads nothing out of it: hjson does that."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.config.answer import Path

BLANK = re.compile(r"(?:[\s,]|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
"""What may stand between members: comments too."""
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'\'\'.*?\'\'\'|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
KEY = re.compile(r"[^\s{}\[\],:\"'][^\s{}\[\],:]*")
BARE = re.compile(r"(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=\s*(?:[,}\]\n#]|//|/\*|$))")
DEEPEST = 64


class NotFollowed(Exception):
    """The text is written in a way that is not understood here."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A member: its path, where its key stands in the text (``start`` to ``key_end``), and its value."""

    path: Path
    start: int
    key_end: int
    value: int
    end: int


def places(text: str) -> tuple[Place, ...]:
    """Every member, a section before what is in it. Raises NotFollowed.

    >>> [(place.path, '{a: {"b": 1}}'[place.value:place.end]) for place in places('{a: {"b": 1}}')]
    [(('a',), '{"b": 1}'), (('a', 'b'), '1')]
    """
    start = _skip(text, 0)
    braced = text[start : start + 1] == "{"
    found, end = _object(text, start + 1 if braced else start, (), braced=braced)
    if text[_skip(text, end) :]:
        raise NotFollowed
    return tuple(sorted(found, key=lambda place: place.start))


def _skip(text: str, at: int) -> int:
    found = BLANK.match(text, at)
    return found.end() if found else at


def _object(text: str, at: int, path: Path, *, braced: bool) -> tuple[list[Place], int]:
    """Its members, and where it ends."""
    found: list[Place] = []
    if len(path) > DEEPEST:
        raise NotFollowed
    while True:
        at = _skip(text, at)
        if at >= len(text) and not braced:
            return found, at
        if text[at : at + 1] == "}" and braced:
            return found, at + 1
        inner, at = _member(text, at, path)
        found += inner


def _member(text: str, at: int, path: Path) -> tuple[list[Place], int]:
    key = QUOTED.match(text, at) or KEY.match(text, at)
    colon = re.compile(r"\s*:").match(text, key.end()) if key else None
    if key is None or colon is None:
        raise NotFollowed
    name = key[0][1:-1] if key[0][0] in "\"'" else key[0]
    value = _only_blanks(text, colon.end())
    inner, end = _value(text, value, (*path, name))
    return [Place(path=(*path, name), start=at, key_end=key.end(), value=value, end=end), *inner], end


def _only_blanks(text: str, at: int) -> int:
    found = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL).match(text, at)
    return found.end() if found else at


def _value(text: str, at: int, path: Path) -> tuple[list[Place], int]:
    first = text[at : at + 1]
    if first == "{":
        return _object(text, at + 1, path, braced=True)
    if first == "[":
        return [], _list(text, at + 1)
    found = QUOTED.match(text, at) or BARE.match(text, at)
    if found is None:
        # without quotes a string goes to the end of its line
        found = re.compile(r"[^\n]+").match(text, at)
        if found is None or first in ",}]":
            raise NotFollowed
        return [], at + len(found[0].rstrip())
    return [], found.end()


def _list(text: str, at: int) -> int:
    while True:
        at = _skip(text, at)
        if at >= len(text):
            raise NotFollowed
        if text[at] == "]":
            return at + 1
        _, at = _value(text, at, ())


def named(text: str, path: Path) -> Place | None:
    """The member at a path; None where there is none. Raises NotFollowed."""
    return next(iter(_all_named(text, path)), None)


def _all_named(text: str, path: Path) -> Iterator[Place]:
    return (place for place in places(text) if place.path == path)
