"""A table for a terminal: cells -> lines in columns that fit a width. Times, sizes and ranks as the texts of cells.

What does not fit beside stands below, under the same first columns.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

MIN_WORDS_WIDTH = 18
"""Columns below which words in a cell are not broken where it can stand under the first columns instead."""
INDENT = 4
UNITS = ("B", "KiB", "MiB", "GiB")
MAX_CELL_WIDTH = 30

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


def duration(seconds: float) -> str:
    """A time with the unit that suits it, three digits.

    >>> duration(2.13e-5), duration(0.00134), duration(0.4), duration(12.34), duration(754)
    ('21.3 µs', '1.34 ms', '400 ms', '12.3 s', '754 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def digits(value: float) -> str:
    """Three digits, never an exponent.

    >>> digits(1234.5), digits(12.345), digits(1.2345), digits(0.0123), digits(0)
    ('1234', '12.3', '1.23', '0.012', '0')
    """
    places = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{places}f}"


def size(count: int) -> str:
    """Bytes in the unit that suits them.

    >>> size(8), size(4 << 20), size((1 << 20) + 4)
    ('8 B', '4 MiB', '1 MiB')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + f" {UNITS[unit]}"


def gigabytes(bandwidth: float) -> str:
    """Bytes a second in GB/s, 1e9 bytes a second.

    >>> gigabytes(3.13e9), gigabytes(1e7)
    ('3.13', '0.010')
    """
    return digits(bandwidth / 1e9)


def short_hosts(hosts: Iterable[str]) -> dict[str, str]:
    """Hosts without their domains, where that keeps them apart.

    >>> short_hosts(["a.cluster.org", "b.cluster.org", ""])
    {'a.cluster.org': 'a', 'b.cluster.org': 'b', '': '?'}
    """
    names = tuple(dict.fromkeys(hosts))
    short = [name if name.replace(".", "").isdigit() else name.split(".")[0] for name in names]
    whole = len(set(short)) < len(short)
    return {name: (name if whole else brief) or "?" for name, brief in zip(names, short, strict=True)}


def clipped(text: str, longest: int = MAX_CELL_WIDTH) -> str:
    """Text that fits a cell.

    >>> clipped("x" * 9, 5)
    'xxxx…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _across(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[each] for each in shown) + 2 * (len(shown) - 1)


def _parts(widths: Sequence[int], width: int | None, keep: int, *, words: bool) -> Iterator[tuple[int, ...]]:
    """The columns of each part. ``words``: the last column may be broken."""
    first, shown = tuple(range(keep)), list(range(keep))
    for column in range(keep, len(widths)):
        last = words and column == len(widths) - 1
        needed = min(widths[column], MIN_WORDS_WIDTH) if last else widths[column]
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
