"""Lists in sentences, the same everywhere. Pure text."""

from collections.abc import Sequence

MOST_NAMES = 5


def and_more(names: Sequence[str], most: int = MOST_NAMES, *, of: str = "") -> str:
    """The first names, and how many more there are. ``of``: what they are, said behind "more".

    >>> and_more(["a", "b", "c"], 2), and_more(["a", "b"], 2), and_more("abcd", 1, of="files")
    ('a, b and 1 more', 'a, b', 'a and 3 more files')
    """
    left = len(names) - most
    more = f" and {left:,} more{f' {of}' if of else ''}" if left > 0 else ""
    return ", ".join(names[:most]) + more


def and_more_lines(lines: Sequence[str], most: int, *, of: str = "") -> tuple[str, ...]:
    """The first lines, and one that says how many more there are.

    >>> and_more_lines(["a", "b", "c"], 1, of="lines")
    ('a', 'and 2 more lines')
    """
    left = len(lines) - most
    return (*lines[:most], *((f"and {left:,} more{f' {of}' if of else ''}",) if left > 0 else ()))
