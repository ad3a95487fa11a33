"""Texts: lists in sentences, JSON that may be anybody's, the manual page of a rule.

JSON goes in and out where text and names may be anybody's: what is malformed is one kind of error, and any name can be written.
msgspec is imported with the first document: a check has asked its questions by then.
"""

import operator
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

MAX_NAMES = 5
T = TypeVar("T")
STEERING = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8b-\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf")
"""UTF-8 of what moves a terminal's cursor or its text and is not escaped in JSON: it stands in strings only."""
NAMES = frozenset({"torch", "nvcc", "pip", "gloo", "dsdoctor", "gds", "setuptools", "libaio", "pdsh", "deepspeed"})
"""Words that stay small at the beginning of a sentence; so does whatever has a digit, a dot or an underscore in it."""


def nearest(word: str, words: Iterable[str], *, min_likeness: float = 0.6) -> str | None:
    """The word that a misspelt one may be meant for; None where none is like it.

    >>> nearest("fused_adm", ("fused_lamb", "fused_adam")), nearest("x", ("fused_adam",))
    ('fused_adam', None)
    """
    # a name is seldom wrong
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=min_likeness)), None)


def and_more(names: Sequence[str], most: int = MAX_NAMES, *, of: str = "") -> str:
    """The first names, and how many more there are. ``of``: what they are, said behind "more".

    >>> and_more(["a", "b", "c"], 2), and_more(["a", "b"], 2), and_more("abcd", 1, of="files")
    ('a, b and 1 more', 'a, b', 'a and 3 more files')
    """
    left = len(names) - most
    more = f" and {left:,} more{f' {of}' if of else ''}" if left > 0 else ""
    return ", ".join(names[:most]) + more


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "file"), counted(2000, "frozen parameter")
    ('1 file', '2,000 frozen parameters')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def and_more_lines(lines: Sequence[str], most: int, *, of: str = "") -> tuple[str, ...]:
    """The first lines, and one that says how many more there are.

    >>> and_more_lines(["a", "b", "c"], 1, of="lines")
    ('a', 'and 2 more lines')
    """
    left = len(lines) - most
    return (*lines[:most], *((f"and {left:,} more{f' {of}' if of else ''}",) if left > 0 else ()))


def decode(text: bytes | str, kind: type[T]) -> T:
    """Read JSON into checked data. Raises msgspec.DecodeError for what is malformed, no UTF-8, or nested too deeply.

    >>> decode(b"[" * 200_000, object)
    Traceback (most recent call last):
    msgspec.DecodeError: it is nested too deeply
    """
    import msgspec

    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except UnicodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason if hasattr(error, 'reason') else error}") from None


def encode(value: Any, *, order: Literal["sorted"] | None = None) -> bytes:
    r"""Write data as JSON: sets sorted, so that the same data gives the same bytes, and all else in its own order.

    Bytes of a file's name that are no UTF-8 are written as the terminal shows them. Characters that steer a terminal, or turn its
    text around, are written by their numbers: whoever reads the document gets the same.

    >>> encode("\x9b31m\u202e")
    b'"\\u009b31m\\u202e"'
    >>> encode({"file": "wei\udcdf", "all": frozenset({"c", "a", "b"})})
    b'{"file":"wei\\\\udcdf","all":["a","b","c"]}'
    """
    import msgspec

    value = with_sorted_sets(value)
    try:
        text = msgspec.json.encode(value, order=order)
    except UnicodeEncodeError:
        text = msgspec.json.encode(_writable(msgspec.to_builtins(value)), order=order)
    return STEERING.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), text)


def with_sorted_sets(value: Any) -> Any:
    """Data in which every set is a sorted list, at any depth; what holds no set is returned as it is."""
    if isinstance(value, set | frozenset):
        members = list(map(with_sorted_sets, value))
        try:
            return sorted(members)
        except TypeError:
            return sorted(members, key=repr)
    if isinstance(value, dict):
        inner = {name: with_sorted_sets(each) for name, each in value.items()}
        return value if all(inner[name] is value[name] for name in value) else inner
    if isinstance(value, list | tuple):
        each_inner = [with_sorted_sets(each) for each in value]
        return value if all(map(operator.is_, each_inner, value)) else each_inner
    if is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
        inner = {name: with_sorted_sets(each) for name, each in before.items()}
        return value if all(inner[name] is before[name] for name in inner) else inner
    return value


def _writable(value: Any) -> Any:
    """Plain data with every string and key in a form that UTF-8 has."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(name): _writable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value


@dataclass(frozen=True, kw_only=True)
class ManualPage:
    """What a rule means, why that matters, how to fix it, and the first version of dsdoctor that has the rule."""

    means: str
    why: str
    fix: str
    since: str


def page_lines(page: ManualPage) -> Iterator[str]:
    """A page as it is printed: each part below its heading."""
    parts = {"What it means": page.means, "Why it matters": page.why, "How to fix it": page.fix}
    for heading, text in parts.items():
        if text:
            yield from (heading, *textwrap.indent(_sentence(text), "    ").splitlines(), "")
    yield f"Since dsdoctor {page.since}"


def _sentence(text: str) -> str:
    """A text that begins with a capital letter, unless its first word is a name.

    >>> _sentence("the rank died."), _sentence("torch is old."), _sentence("fp16 is narrow.")
    ('The rank died.', 'torch is old.', 'fp16 is narrow.')
    """
    first = text.split(maxsplit=1)[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() and first not in NAMES else text
