"""Short lists of hosts, as Slurm and Open MPI write them -> the names of all hosts, and back; hosts and ranks in words.

Text in, tuples out.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dsdoctor.core.errors import UsageError

MAX_HOSTS = 1 << 17
"""More than any machine has: a longer list is a mistake, and expanding it would fill the memory."""

PIECES = re.compile(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*")
RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
LAST_NUMBER = re.compile(r"([0-9.]*\.|[^.]*?)([0-9]{1,18})([^0-9.]*(?:\..*)?)", re.DOTALL)
"""A name around the last number of its first label, or of an address; what stands behind the first dot is the domain."""
GROUP = re.compile(r"([^\[\],]*)\[([0-9]+):([0-9,-]+)\](.*)")


def expand(nodelist: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list, in its order. Raises UsageError for one that is malformed.

    >>> expand("n[1-3,07],gpu[01-02]-x,login")
    ('n1', 'n2', 'n3', 'n07', 'gpu01-x', 'gpu02-x', 'login')
    >>> expand("r[1-2]n[0-1]")
    ('r1n0', 'r1n1', 'r2n0', 'r2n1')
    """
    hosts = tuple(itertools.islice((host for piece in _pieces(nodelist) for host in _hosts(piece)), MAX_HOSTS + 1))
    if len(hosts) > MAX_HOSTS:
        raise _malformed(nodelist, f"more than {MAX_HOSTS} hosts")
    return hosts


def fold(hosts: Iterable[str]) -> str:
    """Names in short, as Slurm writes them; those that differ in one number share a bracket. ``expand`` gives them back.

    >>> fold(["gpu0100", "gpu0007", "gpu0101", "login", "n9.a", "n10.a", "n11.a", "10.0.0.1", "10.0.0.2"])
    'gpu[0007,0100-0101],login,n[9-11].a,10.0.0.[1-2]'
    >>> fold(["node", "node1", "node2"])
    'node,node[1-2]'
    """
    groups: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for host in dict.fromkeys(hosts):
        match = LAST_NUMBER.fullmatch(host)
        groups[(match[1], match[3]) if match else (host, None)].append(match[2] if match else "")
    return ",".join(
        name for (before, after), numbers in groups.items() for name in _short(before, numbers, after or "")
    )


def in_words(hosts: Iterable[str], longest: int = 80) -> str:
    """Hosts for a sentence: in short, and cut where even that is long.

    >>> in_words(["n1", "n2"]), in_words((f"n{2 * number}" for number in range(1000)), 12)
    ('n[1-2]', 'n[0,2,4,6,8... (1,000 hosts)')
    """
    names = tuple(hosts)
    text = fold(names)
    return text if len(text) <= longest else f"{text[: text.rfind(',', 0, longest)]}... ({len(names):,} hosts)"


def _short(before: str, numbers: Sequence[str], after: str) -> Iterator[str]:
    """The names of a group in one part, or in one for each width to which numbers are filled up with zeros."""
    filled = {len(number) for number in numbers if number.startswith("0") and len(number) > 1}
    by_width: dict[int, list[str]] = defaultdict(list)
    for number in numbers:
        by_width[len(number) if len(number) in filled else 0].append(number)
    for width, those in sorted(by_width.items()):
        if len(those) == 1:
            yield before + those[0] + after
            continue
        spans = ranges_of(map(int, those))
        parts = (f"{a:0{width}d}" + (f"-{b:0{width}d}" if b > a else "") for a, b in spans)
        yield f"{before}[{','.join(parts)}]{after}"


def ranges_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The first and the last of numbers that follow each other.

    >>> ranges_of([3, 1, 2, 7])
    ((1, 3), (7, 7))
    """
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return tuple(runs)


def spans_of(numbers: Iterable[int]) -> tuple[str, ...]:
    """Numbers, those that follow each other joined.

    >>> spans_of([5, 0, 1, 2])
    ('0-2', '5')
    """
    return tuple(f"{first}-{last}" if last > first else str(first) for first, last in ranges_of(numbers))


def numbers_in_words(numbers: Iterable[int]) -> str:
    """Numbers for a sentence.

    >>> numbers_in_words([5, 0, 1, 2, 7, 8])
    '0-2, 5, 7-8'
    """
    return ", ".join(spans_of(numbers))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    >>> ranks_in_words([3]), ranks_in_words([0, 2, 3, 4])
    ('rank 3', 'ranks 0, 2-4')
    """
    found = set(ranks)
    return f"{'rank' if len(found) == 1 else 'ranks'} {numbers_in_words(found)}"


def tasks_per_node(text: str) -> tuple[int, ...]:
    """The tasks of each node, as in SLURM_STEP_TASKS_PER_NODE. Raises UsageError for a malformed text.

    >>> tasks_per_node("2(x3),1")
    (2, 2, 2, 1)
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = COUNT.fullmatch(piece)
        if match is None or int(match[2] or 1) > MAX_HOSTS:
            raise _malformed(text, f"{piece!r} is not a number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def hosts_of_ranks(nodelist: str, tasks: str) -> tuple[str, ...]:
    """The host of every rank where they fill one node after the other; () where the two texts do not fit each other.

    >>> hosts_of_ranks("n[1-2]", "2,1")
    ('n1', 'n1', 'n2')
    """
    hosts, counts = expand(nodelist), tasks_per_node(tasks)
    if len(hosts) != len(counts) or sum(counts) > MAX_HOSTS:
        return ()
    return tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def open_mpi_nodes(regex: str) -> tuple[str, ...]:
    """The hosts of Open MPI 4's ``orte_node_regex``, the one that runs mpirun first; () where it cannot be read.

    >>> open_mpi_nodes("vm,gpu[2:1-3],login,gpu[1:7]-x@0(6)")
    ('vm', 'gpu01', 'gpu02', 'gpu03', 'login', 'gpu7-x')
    """
    try:
        return tuple(host for piece in _pieces(regex.partition("@")[0]) for host in _group(piece))
    except UsageError:
        return ()


def _pieces(text: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    at = 0
    while at <= len(text):
        match = PIECES.match(text, at)
        assert match is not None
        if not match[0] or text[match.end() : match.end() + 1] not in ("", ","):
            raise _malformed(text, "an empty part, or a bracket without its pair")
        yield match[0]
        at = match.end() + 1


def _hosts(piece: str) -> Iterator[str]:
    """The hosts of one part, brackets expanded from left to right."""
    before, bracket, rest = piece.partition("[")
    if not bracket:
        yield before
        return
    inside, _, after = rest.partition("]")
    tails = tuple(itertools.islice(_hosts(after), MAX_HOSTS))
    for number in _numbers(inside.split(","), 0):
        for tail in tails:
            yield before + number + tail


def _group(piece: str) -> Iterator[str]:
    """The hosts of one part of Open MPI's list: "gpu[2:1-3]" are gpu01 to gpu03, two digits wide."""
    match = GROUP.fullmatch(piece)
    if match is None:
        yield piece
        return
    for number in itertools.islice(_numbers(match[3].split(","), int(match[2][:2])), MAX_HOSTS):
        yield match[1] + number + match[4]


def _numbers(ranges: Sequence[str], width: int) -> Iterator[str]:
    """The numbers of "1-3" and "07", as wide as the first of each or ``width``."""
    for part in ranges:
        match = RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _malformed(part, "not a range of numbers")
        wide = width or len(match[1])
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{wide}d}"


def _malformed(text: str, why: str) -> UsageError:
    shown = text if len(text) < 80 else text[:77] + "..."
    return UsageError(
        f"the node list {shown!r} cannot be read: {why}",
        hint="set MASTER_ADDR to the host of rank 0, or correct the list",
    )
