"""A file, or base64 as --deepspeed_config takes it -> the configuration, and its text. Reads as DeepSpeed does, with hjson."""

import base64
import binascii
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited

LARGEST = 1 << 20
"""Bytes. A large configuration has a hundredth of it."""
SHORTEST = 8
"""Characters of base64: a shorter word is the name of a file that is not there."""
WITHOUT_QUOTES = re.compile(r"""^[^"'#\n]*:\s*[A-Za-z][^"'\n]*[,}]""", re.MULTILINE)
TO_THE_END = "in Hjson a text without quotes reaches to the end of its line, commas and braces with it"
HINT = "name a ds_config.json"


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


def read(named: str) -> ReadConfig:
    """Read a configuration by the name of its file, or out of base64. Raises UsageError for what is none."""
    path = Path(named)
    try:
        if not path.exists() and (decoded := _decoded(named)) is not None:
            return parse(decoded, "the base64 configuration")
        text = read_limited(path, LARGEST).decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        name = named if len(named) <= 200 else f"{named[:60]}..."
        raise UsageError(f"{name} is no DeepSpeed configuration: {why}", hint=HINT) from None
    return parse(text, named)


def parse(text: str, name: str) -> ReadConfig:
    """A configuration's text. Raises UsageError for what is no object, or has a key twice.

    >>> parse('{stage: 2 # comment\\n}', "x").config, parse('{"a": 1}', "x").plain_json
    ({'stage': 2}, True)
    """
    try:
        config = hjson.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        hint = f"{HINT}; {TO_THE_END}" if WITHOUT_QUOTES.search(text) else HINT
        raise UsageError(f"{name} is no DeepSpeed configuration: {error}", hint=hint) from None
    if not isinstance(config, dict):
        raise UsageError(f"{name} holds no object, a DeepSpeed configuration is one: {str(config)[:60]!r}", hint=HINT)
    return ReadConfig(name=name, config=config, text=text, plain_json=_is_json(text))


def _decoded(word: str) -> str | None:
    """What base64 says; None for a word that is none."""
    if len(word) < SHORTEST or "." in word or "/" in word:
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
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(repeated)} stands there twice, and DeepSpeed refuses that")
    return dict(pairs)
