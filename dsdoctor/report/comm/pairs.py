"""A Report -> a cell for every pair of ranks: bandwidth, outcome, whether it stands out. Draws nothing."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from dsdoctor.comm.results import ConnectOutcome, Reach, Report
from dsdoctor.ui.table import digits, duration

SLOW = 3
"""A pair that is this many times slower than the median of its kind stands out: two busy processors alone make a factor of 2.5."""


@dataclass(frozen=True, kw_only=True)
class PairCell:
    """One direction between two ranks. ``bandwidth`` in bytes a second, of a measured pair or else of the mesh's large message;
    ``outcome`` is the mesh's, None where that direction was not tried; ``both``: it was timed there and back as one."""

    source: int
    target: int
    bandwidth: float | None = None
    outcome: ConnectOutcome | None = None
    seconds: float = 0.0
    address: str = ""
    via_other: bool = False
    slow: bool = False
    both: bool = False

    @property
    def unreached(self) -> bool:
        """Whether the mesh did not get through."""
        return self.outcome not in {None, ConnectOutcome.REACHED}

    @property
    def bad(self) -> bool:
        """Whether it stands out in any way."""
        return self.unreached or self.slow


Cells = Mapping[tuple[int, int], PairCell]


def cells(report: Report) -> Cells:
    """Every direction that was tried. A pair that was timed counts for both directions; the mesh fills what was not timed."""
    found = {(reach.source, reach.target): _cell(reach) for reach in report.reaches if reach.source != reach.target}
    timed = _timed(report)
    if timed:
        found = {place: replace(cell, bandwidth=None) for place, cell in found.items()}
    for (source, target), bandwidth in timed.items():
        cell = found.get((source, target)) or PairCell(source=source, target=target)
        found[source, target] = replace(cell, bandwidth=bandwidth, both=timed[target, source] == bandwidth)
    return _marked(report, found)


def _cell(reach: Reach) -> PairCell:
    return PairCell(
        source=reach.source,
        target=reach.target,
        bandwidth=reach.bandwidth,
        outcome=reach.outcome,
        seconds=reach.seconds,
        address=reach.address,
        via_other=reach.via_other,
    )


def _timed(report: Report) -> dict[tuple[int, int], float]:
    """Bandwidths of the largest message that was timed, both ways."""
    largest = max((pair.size for pair in report.pairs), default=0)
    there = {(pair.source, pair.target): pair for pair in report.pairs if pair.size == largest and pair.seconds > 0}
    both = {(target, source): pair for (source, target), pair in there.items()} | there
    return {place: pair.size / pair.seconds for place, pair in both.items()}


def _marked(report: Report, found: Cells) -> Cells:
    """Cells with those marked that are far slower than their kind: pairs within a host, or between hosts. What was not timed is a
    single message of the mesh, which load alone makes five times slower: of that none is marked."""
    if not report.pairs:
        return found
    kinds: dict[bool, list[float]] = defaultdict(list)
    for cell in found.values():
        if cell.bandwidth is not None and not cell.unreached:
            kinds[_inside(report, cell)].append(cell.bandwidth)
    least = {kind: median(values) / SLOW for kind, values in kinds.items()}
    return {
        place: replace(cell, slow=cell.bandwidth is not None and cell.bandwidth < least.get(_inside(report, cell), 0.0))
        for place, cell in found.items()
    }


def _inside(report: Report, cell: PairCell) -> bool:
    return host_of(report, cell.source) == host_of(report, cell.target)


def host_of(report: Report, rank: int) -> str:
    """The host of a rank, "" where it is not known."""
    told = report.hosts[rank] if rank < len(report.hosts) else ""
    return told or next((claim.host for claim in report.ranks if claim.rank == rank), "")


def named(report: Report, rank: int) -> str:
    """A rank with its host, such as "3 (nodeb)"."""
    host = host_of(report, rank)
    return f"{rank} ({host})" if host else str(rank)


def words(report: Report, cell: PairCell) -> str:
    """A cell in words."""
    way = "<->" if cell.both and not cell.unreached else "->"
    route = f"rank {named(report, cell.source)} {way} rank {named(report, cell.target)}"
    if cell.unreached and cell.outcome:
        to = f" ({cell.address})" if cell.address else ""
        after = f" after {duration(cell.seconds)}" if cell.seconds else ""
        return f"{route}: {cell.outcome.value}{after}{to}"
    said = f"{digits(cell.bandwidth / 1e6)} MB/s" if cell.bandwidth else "reached"
    slow = ", less than a third of the median" if cell.slow else ""
    return f"{route}: {said}{slow}" + (", only by its other address" if cell.via_other else "")
