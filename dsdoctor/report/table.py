"""Cells -> lines in columns that fit a width: what does not fit beside stands below, under the same first columns."""

import textwrap
from collections.abc import Iterator, Sequence

LEAST_WORDS = 18
"""Columns below which words in a cell are not broken where it can stand under the first columns instead."""
INDENT = 4

Rows = Sequence[Sequence[str]]


def table(rows: Rows, align: str, *, width: int | None = None, keep: int = 1) -> Iterator[str]:
    """Rows, the first of them the head, with their columns aligned and two blanks between them.

    ``align``: "<" or ">" for each column. ``width``: None where lines are not broken. ``keep``: columns that each part repeats.

    >>> print(*table([("rank", "host"), ("0", "nodea")], "><"), sep="\\n")
    rank  host
       0  nodea
    >>> print(*table([("", "one", "two"), ("a thing", "1", "2")], "<>>", width=14), sep="\\n")
             one
    a thing    1
    <BLANKLINE>
             two
    a thing    2
    >>> print(*table([("", "rank", "state"), ("!", "0", "slower than others")], "<><", width=14, keep=2), sep="\\n")
       rank  state
    !     0
        slower
        than
        others
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for place, shown in enumerate(_parts(widths, width, keep, words=align.endswith("<"))):
        yield from [""] if place else []
        last = widths[shown[-1]]
        if width is not None and _across(widths, shown) > width:
            last = width - _across(widths, shown[:-1]) - 2
        yield from _aligned(rows, shown, align, [*(widths[each] for each in shown[:-1]), last], width)


def _across(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[each] for each in shown) + 2 * (len(shown) - 1)


def _parts(widths: Sequence[int], width: int | None, keep: int, *, words: bool) -> Iterator[tuple[int, ...]]:
    """The columns of each part. ``words``: the last column may be broken."""
    first, shown = tuple(range(keep)), list(range(keep))
    for column in range(keep, len(widths)):
        last = words and column == len(widths) - 1
        needed = min(widths[column], LEAST_WORDS) if last else widths[column]
        if width is not None and len(shown) > keep and _across(widths, shown) + 2 + needed > width:
            yield tuple(shown)
            shown = [*first]
        shown.append(column)
    yield tuple(shown)


def _aligned(rows: Rows, shown: Sequence[int], align: str, widths: Sequence[int], width: int | None) -> Iterator[str]:
    for row in rows:
        before = [f"{row[each]:{align[each]}{room}}" for each, room in zip(shown[:-1], widths, strict=False)]
        longest = max(map(len, row[shown[-1]].split()), default=0)
        if longest > widths[-1] < len(row[shown[-1]]) and len(shown) > 1:
            # no room beside for its longest word
            yield "  ".join(before).rstrip()
            yield from (" " * INDENT + words for words in _broken(row[shown[-1]], (width or 0) - INDENT))
            continue
        for place, words in enumerate(_broken(row[shown[-1]], widths[-1]) or [""]):
            cells = before if not place else [" " * room for room in widths[:-1]]
            yield "  ".join([*cells, f"{words:{align[shown[-1]]}{widths[-1]}}"]).rstrip()


def _broken(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, max(width, 1), break_long_words=False, break_on_hyphens=False)
