"""What was measured between ranks -> tables for a terminal: pairs, collectives, the transports that NCCL uses."""

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from dsdoctor.comm.results import Report, Speed
from dsdoctor.core.text import and_more_lines
from dsdoctor.report.comm.pairs import Cells, PairCell, cells, host_of, named, words
from dsdoctor.ui.table import clipped, duration, gigabytes, size, table

WIDTH = 100
WIDEST_MATRIX = 16
"""Ranks whose pairs still fit a terminal."""
MOST_PAIRS = 8
MOST_SIZES = 3
LEAST_FOR_BANDWIDTH, LEAST_FOR_LIMIT = 1 << 10, 1 << 20
"""Bytes. Below, the time is latency: a bandwidth, and its share of the link, say nothing."""
FORMULA = "busbw = algbw x 2(n-1)/n for all_reduce, (n-1)/n for gathers, scatters, all_to_all, else 1"


def matrix_lines(report: Report, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """Bandwidth of every pair, rows are the sources; below, the pairs that stand out in words.

    The time of the mesh's single message is no measurement: when all is well it is shown with ``verbose`` only.
    """
    found = cells(report)
    bad = [cell for _, cell in sorted(found.items()) if cell.bad]
    if found and report.world <= WIDEST_MATRIX and (report.pairs or bad or verbose):
        lines = list(_matrix(report, found))
        across = max(map(len, lines[1:]))
        yield from lines if width is None or across <= width else [f"  the table of all pairs needs {across} columns"]
        bad = bad if width is not None and across > width else [cell for cell in bad if cell.unreached]
    yield from _bad_pairs(report, bad)


def _matrix(report: Report, found: Cells) -> Iterator[str]:
    values = [cell.bandwidth for cell in found.values() if cell.bandwidth]
    unit, factor = ("GB/s", 1e9) if values and max(values) >= 1e11 else ("MB/s", 1e6)
    marks = ["✗ not reached"] if any(cell.unreached for cell in found.values()) else []
    marks += ["! below a third of the median"] if any(cell.slow for cell in found.values()) else []
    how = "timed" if report.pairs else "one large message each"
    yield f"pairs in {unit} ({'; '.join([how, 'rows send, columns receive', *marks])})"
    ranks = range(report.world)
    rows = [[_value(found.get((row, column)), row == column, factor) for column in ranks] for row in ranks]
    width = 1 + max(len(cell) for row in rows for cell in row)
    room = max(0, WIDTH - 6 - width * report.world)
    labels = [f"{rank:>4} {clipped(host_of(report, rank), room) if room > 3 else ''}".rstrip() for rank in ranks]
    longest = max(map(len, labels))
    yield " " * longest + "".join(f"{rank:>{width - 1}} " for rank in ranks).rstrip()
    for label, row in zip(labels, rows, strict=True):
        yield f"{label:<{longest}}{''.join(f'{cell:>{width}}' for cell in row)}".rstrip()


def _value(cell: PairCell | None, own: bool, factor: float) -> str:
    """A cell of the matrix; its last place is for the mark."""
    if own or cell is None:
        return "- " if own else "  "
    if cell.unreached:
        return "✗ "
    if not cell.bandwidth:
        return "ok "
    value = cell.bandwidth / factor
    return f"{value:.0f}{'!' if cell.slow else ' '}" if value >= 9.5 else f"{value:.1f}{'!' if cell.slow else ' '}"


def _bad_pairs(report: Report, bad: list[PairCell]) -> Iterator[str]:
    """The pairs that stand out, the worst first; many of them grouped by the hosts between which they are."""
    once = [cell for cell in bad if cell.unreached or not cell.both or cell.source < cell.target]
    once.sort(key=lambda cell: (not cell.unreached, cell.bandwidth or 0.0))
    lines = [f"{_mark(cell)} {words(report, cell)}" for cell in once]
    if len(once) > MOST_PAIRS:
        lines = list(_by_hosts(report, once))
    yield from and_more_lines(lines, MOST_PAIRS, of="(--html draws them all, --json lists them)")


def _mark(cell: PairCell) -> str:
    return "✗" if cell.unreached else "!"


def _by_hosts(report: Report, bad: list[PairCell]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[PairCell]] = {}
    for cell in bad:
        how = cell.outcome.value if cell.unreached and cell.outcome else "below a third of the median"
        hosts = [host_of(report, rank) or "?" for rank in (cell.source, cell.target)]
        groups.setdefault((hosts[0], hosts[1], how), []).append(cell)
    for (source, target, how), those in groups.items():
        count = f"{len(those)} pair{'s' if len(those) > 1 else ''} of ranks"
        yield f"{_mark(those[0])} {source} {'->' if those[0].unreached else '<->'} {target}: {how} ({count})"


def speed_lines(report: Report, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """Collectives: times, bandwidths, the slowest rank, the share of what the link can do."""
    if not report.speeds:
        return
    yield f"speed ({report.backend}, n = {report.world}; GB/s = 1e9 bytes a second; algbw = size / median of the slowest rank;"
    yield f"  {FORMULA})"
    if report.limit:
        yield f"  limit {gigabytes(report.limit.bandwidth)} GB/s: {report.limit.link} ({report.limit.because})"
    shown = report.speeds if verbose else tuple(_some_sizes(report.speeds))
    head = ("", "op", "size", "p50", "p99", "algbw", "busbw", "of limit", "slowest rank")
    yield from table([head, *(_row(report, speed) for speed in shown)], "<<>>>>>><", width=width, keep=3)
    if len(shown) < len(report.speeds):
        yield f"  {len(report.speeds) - len(shown)} more sizes: --verbose"


def _some_sizes(speeds: Iterable[Speed]) -> Iterator[Speed]:
    """Of every op the smallest, one in the middle, the largest."""
    by_op: dict[str, list[Speed]] = {}
    for speed in speeds:
        by_op.setdefault(speed.op, []).append(speed)
    for those in by_op.values():
        those.sort(key=lambda speed: speed.size)
        if len(those) <= MOST_SIZES:
            yield from those
        else:
            yield from (those[0], those[len(those) // 2], those[-1])


def _row(report: Report, speed: Speed) -> tuple[str, ...]:
    share = ""
    if report.limit and report.limit.bandwidth > 0 and speed.size >= LEAST_FOR_LIMIT:
        share = f"{speed.busbw / report.limit.bandwidth:.0%}".replace("%", " %")
    usual = median(speed.medians) if speed.medians else 0.0
    behind = f", {speed.seconds / usual:.2f}x the median rank" if usual and speed.seconds > 1.05 * usual else ""
    return (
        "",
        speed.op,
        size(speed.size),
        duration(speed.p50),
        duration(speed.p99),
        gigabytes(speed.algbw) if speed.size >= LEAST_FOR_BANDWIDTH else "",
        gigabytes(speed.busbw) if speed.size >= LEAST_FOR_BANDWIDTH else "",
        share,
        named(report, speed.slowest) + behind,
    )


def transport_lines(report: Report, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """What NCCL took for its edges: how many of each; ``verbose``: every edge."""
    if not report.transports:
        return
    yield "transports that NCCL uses"
    if verbose:
        yield from table(
            [("", edge, how) for edge, how in sorted(report.transports.items())], "<<<", width=width, keep=2
        )
        return
    example = {how: edge for edge, how in reversed(report.transports.items())}
    for how, count in Counter(report.transports.values()).most_common():
        yield f"  {count:>5}  {how}, such as {example[how]}" if count > 1 else f"  {count:>5}  {how}: {example[how]}"
