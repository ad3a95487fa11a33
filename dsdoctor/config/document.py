"""The text of a configuration: read as DeepSpeed reads it, where each key stands, and corrected."""

import base64
import binascii
import contextlib
import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson

from dsdoctor.config.answer import Correction, KeyPath, lookup
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited

MAX_CONFIG_BYTES = 1 << 20
"""A large configuration has a hundredth of it."""
MIN_BASE64_LENGTH = 8
"""A shorter word is the name of a file that is not there."""
FROM_BASE64 = "the base64 configuration"
BARE_TEXT = re.compile(r":\s*[A-Za-z]")
TO_THE_END = "in Hjson, unquoted text extends to the end of its line, including commas and braces"
HINT = "name a ds_config.json"
BLANK = re.compile(r"(?:[\s,]|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
"""What may stand between members: comments too."""
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'\'\'.*?\'\'\'|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
KEY = re.compile(r"[^\s{}\[\],:\"'][^\s{}\[\],:]*")
BARE = re.compile(r"(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=\s*(?:[,}\]\n#]|//|/\*|$))")
MAX_DEPTH = 64


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """``name`` as it is printed. ``text``: the file's, or what the base64 says. ``plain_json``: any JSON parser reads it."""

    name: str
    config: dict[str, Any]
    text: str
    plain_json: bool = True

    def by_json(self) -> dict[str, Any]:
        """As transformers and accelerate read it: Infinity is a number for them, and text for hjson.

        >>> parse('{"steps_per_print": Infinity\\n}', "x").by_json()
        {'steps_per_print': inf}
        """
        return dict(json.loads(self.text)) if self.plain_json else self.config


class NotFollowed(Exception):
    """The text is written in a way that is not understood here."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member: its path, where its key stands in the text (``start`` to ``key_end``), and its value."""

    path: KeyPath
    start: int
    key_end: int
    value: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """The text, what of the corrections could be made, and whether all else in it is as it was: where not it was written anew,
    without comments."""

    text: str
    in_place: bool
    made: tuple[Correction, ...] = ()


def read(named: str) -> ReadConfig:
    """Read a configuration by the name of its file, or out of base64. Raises UsageError for what is none."""
    return parse(*text_of(named))


def text_of(named: str) -> tuple[str, str]:
    """The text of a file, or of base64, and how it is named. Raises UsageError for what is no text."""
    try:
        if not exists(named) and (decoded := _decoded(named)) is not None:
            return decoded, FROM_BASE64
        return read_limited(Path(named), MAX_CONFIG_BYTES).decode("utf-8"), named
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        name = named if len(named) <= 200 else f"{named[:60]}..."
        raise UsageError(f"{name} is not a DeepSpeed configuration: {why}", hint=HINT) from None


def exists(named: str) -> bool:
    """Whether a file has this name. A base64 text is longer than any name, at which pathlib raises."""
    try:
        return Path(named).exists()
    except (OSError, ValueError):
        return False


def parse(text: str, name: str) -> ReadConfig:
    """A configuration's text. Raises UsageError for what is no object, or has a key twice.

    >>> parse('{stage: 2 # comment\\n}', "x").config, parse('{"a": 1}', "x").plain_json
    ({'stage': 2}, True)
    """
    try:
        config = hjson.loads(text, object_pairs_hook=_without_repeats, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        hint = f"{HINT}; {TO_THE_END}" if any(map(_lacks_quotes, text.splitlines())) else HINT
        raise UsageError(f"{name} is not a DeepSpeed configuration: {error}", hint=hint) from None
    except Exception as error:
        # DeepSpeed reads it with the same parser, and ends in the same way
        why = f"hjson fails with {type(error).__name__}: {error}"
        raise UsageError(f"{name} is not a DeepSpeed configuration: {why[:200]}", hint=HINT) from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{name} is not a DeepSpeed configuration, which is a JSON object: {str(config)[:60]!r}", hint=HINT
        )
    return ReadConfig(name=name, config=config, text=text, plain_json=_is_json(text))


def correct(
    text: str, config: dict[str, Any], corrections: Iterable[Correction], *, plain_json: bool = False
) -> Corrected:
    """Make all corrections. ``plain_json``: what comes out must be JSON, for those who read nothing else.

    >>> fix = Correction(path=("stge",), to=("stage",))
    >>> correct('{stge: 2 # which', {}, [fix]).made, correct('{stge: 2} # which', {"stge": 2}, [fix]).text
    ((), '{stage: 2} # which')
    """
    wanted = copy.deepcopy(config)
    made = tuple([correction for correction in corrections if apply(wanted, correction)])
    # where it is written in a way that is not understood here, what it says is known all the same
    with contextlib.suppress(NotFollowed, UsageError):
        changed = text
        for correction in made:
            changed = _edited(changed, correction)
        read = parse(changed, "")
        if read.config == wanted and (read.plain_json or not plain_json):
            return Corrected(text=changed, in_place=True, made=made)
    return Corrected(text=json.dumps(wanted, indent=4, ensure_ascii=False) + "\n", in_place=False, made=made)


def apply(config: dict[str, Any], correction: Correction) -> bool:
    """Change the configuration itself; False where it cannot be done (any more)."""
    *above, name = correction.path
    holder = lookup(config, tuple(above))
    if not isinstance(holder, dict):
        return False
    if correction.value is not None and correction.to is None:
        holder[name] = json.loads(correction.value)
        return True
    if name not in holder or (correction.to is not None and lookup(config, correction.to) is not None):
        return False
    if correction.to is None:
        del holder[name]
        return True
    return _move(config, holder, name, correction.to)


def members(text: str) -> tuple[Member, ...]:
    """Every member, a section before what is in it. Raises NotFollowed.

    >>> [(member.path, '{a: {"b": 1}}'[member.value:member.end]) for member in members('{a: {"b": 1}}')]
    [(('a',), '{"b": 1}'), (('a', 'b'), '1')]
    """
    start = _skip(text, 0)
    braced = text[start : start + 1] == "{"
    found, end = _object(text, start + 1 if braced else start, (), braced=braced)
    if text[_skip(text, end) :]:
        raise NotFollowed
    return tuple(sorted(found, key=lambda member: member.start))


def member_at(text: str, path: KeyPath) -> Member | None:
    """The member at a path; None where there is none. Raises NotFollowed."""
    return next(iter(_members_at(text, path)), None)


def _decoded(word: str) -> str | None:
    """What base64 says; None for a word that is none."""
    if len(word) < MIN_BASE64_LENGTH or "." in word or "/" in word:
        return None
    try:
        text = base64.urlsafe_b64decode(word).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As DeepSpeed does: a key that stands there twice is an error."""
    if repeated := sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1):
        raise ValueError(f"{', '.join(repeated)} occurs twice, which DeepSpeed rejects")
    return dict(pairs)


def _finite(number: str) -> float:
    """A number with a fraction or an exponent. Raises ValueError for one that is too large, at which hjson fails."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is too large for a number")
    return value


def _lacks_quotes(line: str) -> bool:
    """Whether a text without quotes is followed by what looks like the end of its member.

    >>> _lacks_quotes("{type: AdamW, lr: 1}"), _lacks_quotes('{type: "AdamW", lr: 1}'), _lacks_quotes("# a: b,")
    (True, False, False)
    """
    plain = re.split("[\"']", line, maxsplit=1)[0]
    found = BARE_TEXT.search(plain)
    return found is not None and "#" not in plain[: found.start()] and not {",", "}"}.isdisjoint(plain[found.end() :])


def _move(config: dict[str, Any], holder: dict[str, Any], name: str, to: KeyPath) -> bool:
    target: Any = config
    for section in to[:-1]:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            return False
    if target is holder:
        renamed = {to[-1] if key == name else key: value for key, value in holder.items()}
        holder.clear()
        holder.update(renamed)
    else:
        target[to[-1]] = holder.pop(name)
    return True


def _edited(text: str, correction: Correction) -> str:
    member = member_at(text, correction.path)
    if correction.to is None and correction.value is not None:
        if member is None:
            return _insert(text, correction.path, correction.value)
        return text[: member.value] + correction.value + text[member.end :]
    if member is None:
        raise NotFollowed
    if correction.to is None:
        return _without(text, member)
    if correction.to[:-1] == correction.path[:-1]:
        return (
            text[: member.start]
            + _like(text[member.start : member.key_end], correction.to[-1])
            + text[member.key_end :]
        )
    value = text[member.value : member.end]
    return _insert(_without(text, member), correction.to, value)


def _insert(text: str, path: KeyPath, value: str) -> str:
    """The text with a member more, at the beginning of its section, which is made where it is not there."""
    *above, name = path
    if above and member_at(text, tuple(above)) is None:
        return _insert(text, tuple(above), f'{{"{name}": {value}}}')
    member = member_at(text, tuple(above)) if above else None
    at = member.value if member else len(text) - len(text.lstrip())
    if text[at : at + 1] != "{":
        raise NotFollowed
    body = text[at + 1 :]
    empty = body.lstrip().startswith("}")
    gap = body[: len(body) - len(body.lstrip())]
    between = gap if "\n" in gap and not empty else ""
    comma = "" if empty else "," if between else ", "
    return f'{text[: at + 1]}{between}"{name}": {value}{comma}{body}'


def _without(text: str, member: Member) -> str:
    """The text without a member, its line, and the comma that stood with it."""
    start, end = member.start, member.end
    after = len(text[end:]) - len(text[end:].lstrip(" \t"))
    if text[end + after : end + after + 1] == ",":
        end += after + 1
    else:
        # the last one: the comma before it would be one too many
        before = text[:start].rstrip()
        if before.endswith(","):
            gap = len(text[:start]) - len(before) if "\n" not in text[len(before) : start] else 0
            text = before[:-1] + text[len(before) + gap :]
            start, end = start - 1 - gap, end - 1 - gap
    line = text.rfind("\n", 0, start) + 1
    rest = text[end:].split("\n", 1)[0]
    if not text[line:start].strip() and not rest.strip() and "\n" in text[end:]:
        return text[:line] + text[end + len(rest) + 1 :]
    return text[:start] + text[end:].lstrip(" ")


def _like(key: str, name: str) -> str:
    """A new name, quoted as the old one is."""
    return f"{key[0]}{name}{key[-1]}" if key[0] in "\"'" else name


def _object(text: str, at: int, path: KeyPath, *, braced: bool) -> tuple[list[Member], int]:
    """Its members, and where it ends."""
    found: list[Member] = []
    if len(path) > MAX_DEPTH:
        raise NotFollowed
    while True:
        at = _skip(text, at)
        if at >= len(text) and not braced:
            return found, at
        if text[at : at + 1] == "}" and braced:
            return found, at + 1
        inner, at = _member(text, at, path)
        found += inner


def _member(text: str, at: int, path: KeyPath) -> tuple[list[Member], int]:
    key = QUOTED.match(text, at) or KEY.match(text, at)
    colon = re.compile(r"\s*:").match(text, key.end()) if key else None
    if key is None or colon is None:
        raise NotFollowed
    name = key[0][1:-1] if key[0][0] in "\"'" else key[0]
    value = _only_blanks(text, colon.end())
    inner, end = _value(text, value, (*path, name))
    return [Member(path=(*path, name), start=at, key_end=key.end(), value=value, end=end), *inner], end


def _value(text: str, at: int, path: KeyPath) -> tuple[list[Member], int]:
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


def _only_blanks(text: str, at: int) -> int:
    found = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL).match(text, at)
    return found.end() if found else at


def _skip(text: str, at: int) -> int:
    found = BLANK.match(text, at)
    return found.end() if found else at


def _members_at(text: str, path: KeyPath) -> Iterator[Member]:
    return (member for member in members(text) if member.path == path)
