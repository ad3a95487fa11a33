"""Corrections -> a corrected text of the same configuration, with as little changed as possible, comments kept."""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsdoctor.config.answer import Path, lookup
from dsdoctor.config.hjson_places import NotFollowed, Place, named
from dsdoctor.config.question import Correction
from dsdoctor.config.read import parse
from dsdoctor.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """The text, what of the corrections could be made, and whether all else in it is as it was: where not it was written anew,
    without comments."""

    text: str
    in_place: bool
    made: tuple[Correction, ...] = ()


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
    try:
        changed = text
        for correction in made:
            changed = _edited(changed, correction)
        read = parse(changed, "")
        if read.config == wanted and (read.plain_json or not plain_json):
            return Corrected(text=changed, in_place=True, made=made)
    except (NotFollowed, UsageError):
        # it is written in a way that is not understood here: what it says is known all the same
        pass
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


def _move(config: dict[str, Any], holder: dict[str, Any], name: str, to: Path) -> bool:
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
    place = named(text, correction.path)
    if correction.to is None and correction.value is not None:
        if place is None:
            return _insert(text, correction.path, correction.value)
        return text[: place.value] + correction.value + text[place.end :]
    if place is None:
        raise NotFollowed
    if correction.to is None:
        return _without(text, place)
    if correction.to[:-1] == correction.path[:-1]:
        return text[: place.start] + _like(text[place.start : place.key_end], correction.to[-1]) + text[place.key_end :]
    value = text[place.value : place.end]
    return _insert(_without(text, place), correction.to, value)


def _like(key: str, name: str) -> str:
    """A new name, quoted as the old one is."""
    return f"{key[0]}{name}{key[-1]}" if key[0] in "\"'" else name


def _without(text: str, place: Place) -> str:
    """The text without a member, its line, and the comma that stood with it."""
    start, end = place.start, place.end
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


def _insert(text: str, path: Path, value: str) -> str:
    """The text with a member more, at the beginning of its section, which is made where it is not there."""
    *above, name = path
    if above and named(text, tuple(above)) is None:
        return _insert(text, tuple(above), f'{{"{name}": {value}}}')
    place = named(text, tuple(above)) if above else None
    at = place.value if place else len(text) - len(text.lstrip())
    if text[at : at + 1] != "{":
        raise NotFollowed
    body = text[at + 1 :]
    empty = body.lstrip().startswith("}")
    gap = body[: len(body) - len(body.lstrip())]
    between = gap if "\n" in gap and not empty else ""
    comma = "" if empty else "," if between else ", "
    return f'{text[: at + 1]}{between}"{name}": {value}{comma}{body}'
