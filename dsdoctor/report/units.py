"""Times, sizes and ranks as text, for the report of a communication test."""

from collections.abc import Iterable

from dsdoctor.ranks.nodelist import ranges_of

UNITS = ("B", "KiB", "MiB", "GiB")
LONGEST_CELL = 30


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


def ranges(numbers: Iterable[int]) -> str:
    """Ranks, those that follow each other joined.

    >>> ranges([5, 0, 1, 2, 7, 8])
    '0-2, 5, 7-8'
    """
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges_of(numbers))


def short_hosts(hosts: Iterable[str]) -> dict[str, str]:
    """Hosts without their domains, where that keeps them apart.

    >>> short_hosts(["a.cluster.org", "b.cluster.org", ""])
    {'a.cluster.org': 'a', 'b.cluster.org': 'b', '': '?'}
    """
    names = tuple(dict.fromkeys(hosts))
    short = [name if name.replace(".", "").isdigit() else name.split(".")[0] for name in names]
    whole = len(set(short)) < len(short)
    return {name: (name if whole else brief) or "?" for name, brief in zip(names, short, strict=True)}


def clipped(text: str, longest: int = LONGEST_CELL) -> str:
    """Text that fits a cell.

    >>> clipped("x" * 9, 5)
    'xxxx…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"
