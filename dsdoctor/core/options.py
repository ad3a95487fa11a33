"""How an option is declared: what cyclopts is told of it, how its value is read, and the groups that help shows. Data only."""

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter, Token

HAS_METAVAR = "metavar" in inspect.signature(Parameter).parameters
HAS_COMPLETER = "completer" in inspect.signature(Parameter).parameters
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")


def _value(kind: Any, tokens: Sequence[Token]) -> Any:
    """The value of an option of one value, as it is written: "none" is a name like any other, and 2.7 is no whole number.

    Raises ValueError for what is not of that kind.
    """
    text = tokens[-1].value
    kinds = [each for each in (get_args(kind) if isinstance(kind, UnionType) else (kind,)) if each is not NoneType]
    if get_origin(kinds[0]) is Literal and text not in get_args(kinds[0]):
        raise ValueError(f"it takes {' or '.join(get_args(kinds[0]))}")
    if int in kinds and not WHOLE_NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number")
    return kinds[0](text) if kinds[0] in {int, float, Path} else text


def _parameter(*, metavar: str = "", offers: Callable[[], Sequence[str]] | None = None, **more: Any) -> Parameter:
    """``offers`` gives the words that a shell completes; others may be typed."""
    # cyclopts 4, the newest for Python 3.10, shows the type instead
    if metavar and HAS_METAVAR:
        more["metavar"] = metavar
    if offers is not None and HAS_COMPLETER:
        more["completer"] = lambda _context: list(offers())
    return Parameter(**more)


def option(**more: Any) -> Parameter:
    """An option with a value: ``name``, ``help``, ``group``, ``metavar`` (what stands for the value in help) and so on.

    Given twice, the last one counts. Its value may begin with a hyphen.
    """
    return _parameter(
        **{"converter": _value, "n_tokens": 1, "accepts_keys": False, "allow_leading_hyphen": True, **more}
    )


def options(**more: Any) -> Parameter:
    """An option that may be given again, each time with a value: its field is a tuple."""
    return _parameter(**{"allow_leading_hyphen": True, **more})


def flag(**more: Any) -> Parameter:
    """An option without a value."""
    return _parameter(**more)


def argument(**more: Any) -> Parameter:
    """What stands without a name: one word."""
    return _parameter(**{"converter": _value, "n_tokens": 1, "accepts_keys": False, **more})


WHAT = Group("What", sort_key=1)
TARGET = Group("Machine and environment", sort_key=2)
HOW = Group("How", sort_key=3)
WHERE = Group("Where it goes", sort_key=4)
OUTPUT = Group("Output", sort_key=9)
