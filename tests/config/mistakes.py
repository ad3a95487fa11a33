"""Mistakes made mechanically: every key that DeepSpeed reads, misspelt, in the wrong place, with the wrong kind of value."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.config.answer import Asked, Key, KeyPath, Section
from dsdoctor.config.keys import CHOSEN_BY_NAME, COMMON_NAMES

BASE = {"train_batch_size": 8}
OTHER_LETTER = "x"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A configuration with one mistake: the key as it stands there, as it should be, and the rule that names it."""

    kind: str
    config: dict[str, Any]
    wrong: KeyPath
    right: KeyPath
    rule: str


def left_out(name: str) -> str:
    middle = len(name) // 2
    return name[:middle] + name[middle + 1 :]


def doubled(name: str) -> str:
    return name[:1] + name


def swapped(name: str) -> str:
    at = next(
        (n for n in range(len(name) // 2, len(name) - 1) if name[n] != name[n + 1] and "_" not in name[n : n + 2]), 0
    )
    return name[:at] + name[at + 1] + name[at] + name[at + 2 :]


def replaced(name: str) -> str:
    at = len(name) // 3
    return name[:at] + OTHER_LETTER + name[at + 1 :]


def plural(name: str) -> str:
    return name.removesuffix("s") if name.endswith("s") else f"{name}s"


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def hyphens(name: str) -> str:
    return name.replace("_", "-")


TYPOS: tuple[Callable[[str], str], ...] = (left_out, doubled, swapped, replaced, plural, camel, hyphens, str.upper)


def nested(path: KeyPath, value: Any) -> dict[str, Any]:
    """A configuration with one value at a path, and what it takes to train at all."""
    for name in reversed(path):
        value = {name: value}
    return {**BASE, **value}


def some_value(asked: Asked, path: KeyPath, key: Key) -> Any:
    """A value that stands well there: a section for a section, else something of the default's kind."""
    if asked.section(path):
        return {}
    return {"int": 3, "float": 0.5, "bool": True, "str": "x", "list": []}.get(key.kind, 1)


def closed(asked: Asked) -> Iterator[tuple[Section, Key]]:
    """Each key of each section whose keys can be told."""
    for section in asked.sections:
        if section.open or section.path in CHOSEN_BY_NAME:
            continue
        for key in section.keys:
            if section.path or key.name not in asked.removed:
                yield section, key


def typing_mistakes(asked: Asked) -> Iterator[Mistake]:
    """Every key in every kind of misspelling that is not another key, nor as near to one."""
    for section, key in closed(asked):
        for typo in TYPOS:
            wrong = typo(key.name)
            if wrong in section.names or len(wrong) < 2:
                continue
            path = (*section.path, wrong)
            value = some_value(asked, (*section.path, key.name), key)
            config = nested(path, value)
            yield Mistake(
                kind=typo.__name__,
                config=config,
                wrong=path,
                right=(*section.path, key.name),
                rule="config-key-misspelt",
            )


def mistakes_of_kind(asked: Asked) -> Iterator[Mistake]:
    """Every key whose default tells what it is to be, with text that is none of it."""
    for section, key in closed(asked):
        path = (*section.path, key.name)
        numbers = key.kind in {"int", "float", "bool"}
        if numbers and not key.deprecated:
            yield Mistake(kind="text", config=nested(path, "many"), wrong=path, right=path, rule="config-value-type")


def keys_moved_out(asked: Asked) -> Iterator[Mistake]:
    """Every key of a section that stands on the top level instead, where one section only has a key of that name."""
    every = [key.name for section in asked.sections for key in section.keys]
    for section, key in closed(asked):
        if len(section.path) == 1 and every.count(key.name) == 1 and key.name not in {name for name, _ in TOO_COMMON}:
            path = (*section.path, key.name)
            config = nested((key.name,), some_value(asked, path, key))
            yield Mistake(kind="moved out", config=config, wrong=(key.name,), right=path, rule="config-key-misplaced")


def keys_moved_in(asked: Asked) -> Iterator[Mistake]:
    """Every key of the top level that stands in zero_optimization instead, which refuses it."""
    top = asked.section(())
    every = [key.name for section in asked.sections for key in section.keys]
    for key in top.keys if top else ():
        if key.name not in asked.removed and every.count(key.name) == 1:
            path = ("zero_optimization", key.name)
            value = some_value(asked, (key.name,), key)
            yield Mistake(
                kind="moved in", config=nested(path, value), wrong=path, right=(key.name,), rule="config-key-misplaced"
            )


TOO_COMMON: tuple[tuple[str, str], ...] = tuple((name, "") for name in sorted(COMMON_NAMES))
