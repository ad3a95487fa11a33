"""A communication test -> lines for a terminal."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from dsdoctor.comm.models import Claim, PhaseState, named
from dsdoctor.comm.results import ConnectOutcome, PhaseResult, Reach, Report, Speed, Stuck, reason
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more_lines
from dsdoctor.ranks.nodelist import in_words, numbers_in_words
from dsdoctor.ui.screen import MAX_FINDINGS, first_step, next_line, screen_lines
from dsdoctor.ui.table import clipped, digits, duration, gigabytes, size, table
from dsdoctor.ui.terminal import VerdictLine, finding_lines

# A Report -> a cell for every pair of ranks: bandwidth, outcome, whether it stands out. Draws nothing.


MIN_SECONDS = 1e-9
"""No message takes less: what a foreign report says of a faster one is no time."""
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
    there = {
        (pair.source, pair.target): pair for pair in report.pairs if pair.size == largest and pair.seconds > MIN_SECONDS
    }
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


def rank_and_host(report: Report, rank: int) -> str:
    """A rank with its host, such as "3 (nodeb)"."""
    host = host_of(report, rank)
    return f"{rank} ({host})" if host else str(rank)


def words(report: Report, cell: PairCell) -> str:
    """A cell in words."""
    way = "<->" if cell.both and not cell.unreached else "->"
    route = f"rank {rank_and_host(report, cell.source)} {way} rank {rank_and_host(report, cell.target)}"
    if cell.unreached and cell.outcome:
        to = f" ({cell.address})" if cell.address else ""
        after = f" after {duration(cell.seconds)}" if cell.seconds else ""
        return f"{route}: {cell.outcome.value}{after}{to}"
    said = f"{digits(cell.bandwidth / 1e6)} MB/s" if cell.bandwidth else "reached"
    slow = ", less than a third of the median" if cell.slow else ""
    return f"{route}: {said}{slow}" + (", only by its other address" if cell.via_other else "")


# A Report -> the state of every rank in words, which agree with the findings. Draws nothing.


OK = "ok"
BLAMED = {
    "rank-unable": "cannot take part",
    "rank-starting": "still starting",
    "rank-raised": "raised an error",
    "rank-behind": "behind the others",
    "messages-late": "late with every message",
    "rank-straggles": "slow on its own",
    "rank-lacks-processor": "waits for a CPU",
    "cpu-quota-used-up": "throttled by its CPU quota",
    "rank-arrives-late": "joined late",
    "rank-duplicated": "claimed twice",
    "gpu-shared": "shares its GPU",
}
"""The words of a row for a rank that a finding of this rule blames."""
ONLY_SLOW = frozenset(
    BLAMED[rule]
    for rule in (
        *("messages-late", "rank-straggles", "rank-lacks-processor"),
        *("cpu-quota-used-up", "rank-arrives-late"),
    )
)
"""Of these a rank works, and is slow or late."""


def rank_states(report: Report) -> dict[int, str]:
    """Every expected rank's state in words: missing, stuck in what, wrong data, cut off, slow, or ok. The most serious counts."""
    came = {claim.rank for claim in report.ranks}
    stuck = {stuck_rank.rank: stuck_rank for stuck_rank in report.stuck}
    unreached, slow = _bad_peers(report)
    states = {}
    for rank in range(report.world):
        if rank not in came and rank not in stuck:
            states[rank] = "missing"
        elif rank in stuck:
            states[rank] = _stuck(stuck[rank])
        elif rank in report.wrong:
            states[rank] = "wrong data"
        elif rank in unreached:
            states[rank] = f"cut off from {_peers(unreached[rank], report.world)}"
        else:
            states[rank] = f"slow with {_peers(slow[rank], report.world)}" if rank in slow else OK
    for rank, words in _blamed(report):
        states[rank] = _agreeing(states.get(rank, OK), words)
    return states


def _blamed(report: Report) -> Iterator[tuple[int, str]]:
    """The ranks that findings blame, and what they say of them."""
    for finding in reversed(report.findings):
        if finding.rule in BLAMED:
            yield from ((rank, BLAMED[finding.rule]) for rank in finding.ranks if 0 <= rank < report.world)


def _agreeing(state: str, words: str) -> str:
    """A state that says what the finding says; what the rank was seen in stays beside it."""
    if state.startswith("stuck in"):
        return f"{words}; {state}"
    return words if state in {OK, "missing"} or state.startswith("slow with") else state


def _peers(peers: set[int], world: int) -> str:
    if len(peers) > 1 and len(peers) == world - 1:
        return "all others"
    return f"rank{'s' if len(peers) > 1 else ''} {clipped(numbers_in_words(peers))}"


def _bad_peers(report: Report) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """By rank: the ranks with which it has a direction that was not reached, and one that is slow."""
    unreached: dict[int, set[int]] = {}
    slow: dict[int, set[int]] = {}
    for cell in cells(report).values():
        if cell.bad:
            into = unreached if cell.unreached else slow
            into.setdefault(cell.source, set()).add(cell.target)
            into.setdefault(cell.target, set()).add(cell.source)
    return _only_causes(unreached, report.world), _only_causes(slow, report.world)


def _only_causes(peers: dict[int, set[int]], world: int) -> dict[int, set[int]]:
    """Without the problems that another rank causes: a rank with problems with most others is taken as the cause."""
    centres = {rank for rank, those in peers.items() if len(those) > 1 and 2 * len(those) > world - 1}
    left = {rank: those if rank in centres else those - centres for rank, those in peers.items()}
    return {rank: those for rank, those in left.items() if those}


def _stuck(stuck: Stuck) -> str:
    stopped = ", stopped" if stuck.process == "T" else ""
    if stuck.ended:
        return f"died in {stuck.at}: {stuck.ended}" if stuck.at else f"died: {stuck.ended}"
    if stuck.error:
        return f"failed in {stuck.at or 'its start'}"
    return f"stuck in {stuck.at or 'its start'} for {duration(stuck.seconds)}{stopped}"


# What was measured between ranks -> tables for a terminal: pairs, collectives, the transports that NCCL uses.


WIDTH = 100
WIDEST_MATRIX = 16
"""Ranks whose pairs still fit a terminal."""
MAX_PAIRS = 8
MAX_SIZES = 3
MIN_BYTES_FOR_BANDWIDTH, MIN_BYTES_FOR_LIMIT = 1 << 10, 1 << 20
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
    lines = [f"{_cell_mark(cell)} {words(report, cell)}" for cell in once]
    if len(once) > MAX_PAIRS:
        lines = list(_by_hosts(report, once))
    yield from and_more_lines(lines, MAX_PAIRS, of="(--html draws them all, --json lists them)")


def _cell_mark(cell: PairCell) -> str:
    return "✗" if cell.unreached else "!"


def _by_hosts(report: Report, bad: list[PairCell]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[PairCell]] = {}
    for cell in bad:
        how = cell.outcome.value if cell.unreached and cell.outcome else "below a third of the median"
        hosts = [host_of(report, rank) or "?" for rank in (cell.source, cell.target)]
        groups.setdefault((hosts[0], hosts[1], how), []).append(cell)
    for (source, target, how), those in groups.items():
        count = f"{len(those)} pair{'s' if len(those) > 1 else ''} of ranks"
        yield f"{_cell_mark(those[0])} {source} {'->' if those[0].unreached else '<->'} {target}: {how} ({count})"


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
    yield from table([head, *(_speed_row(report, speed) for speed in shown)], "<<>>>>>><", width=width, keep=3)
    if len(shown) < len(report.speeds):
        yield f"  {len(report.speeds) - len(shown)} more sizes: --verbose"


def _some_sizes(speeds: Iterable[Speed]) -> Iterator[Speed]:
    """Of every op the smallest, one in the middle, the largest."""
    by_op: dict[str, list[Speed]] = {}
    for speed in speeds:
        by_op.setdefault(speed.op, []).append(speed)
    for those in by_op.values():
        those.sort(key=lambda speed: speed.size)
        if len(those) <= MAX_SIZES:
            yield from those
        else:
            yield from (those[0], those[len(those) // 2], those[-1])


def _speed_row(report: Report, speed: Speed) -> tuple[str, ...]:
    share = ""
    if report.limit and report.limit.bandwidth > 0 and speed.size >= MIN_BYTES_FOR_LIMIT:
        share = f"{speed.busbw / report.limit.bandwidth:.0%}".replace("%", " %")
    usual = median(speed.medians) if speed.medians else 0.0
    behind = f", {speed.seconds / usual:.2f}x the median rank" if usual and speed.seconds > 1.05 * usual else ""
    return (
        "",
        speed.op,
        size(speed.size),
        duration(speed.p50),
        duration(speed.p99),
        gigabytes(speed.algbw) if speed.size >= MIN_BYTES_FOR_BANDWIDTH else "",
        gigabytes(speed.busbw) if speed.size >= MIN_BYTES_FOR_BANDWIDTH else "",
        share,
        rank_and_host(report, speed.slowest) + behind,
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


# A communication test -> lines for a terminal: one for each phase while it runs, the verdict with its tables at the end.


MARKS = {PhaseState.OK: "✓", PhaseState.SLOW: "!", PhaseState.BROKEN: "✗", PhaseState.SKIPPED: "·"}
NAME, SECONDS = 19, 7
MAX_RANKS = 64
"""Ranks that have a line each where all is well."""
MAX_HOSTS = 16
"""Hosts that have a line each where there are more ranks than that. Of more ranks than this those that are not ok are grouped."""
MAX_ROWS = 12
"""Rows for ranks that are not ok where there are many."""
MAX_LINES = 60
"""Lines of a report without --verbose; where all is well, of more than MOST_RANKS ranks."""


def phase_line(result: PhaseResult) -> str:
    """What one phase saw, and how long it took.

    >>> from dsdoctor.comm.models import CommPhase
    >>> phase_line(PhaseResult(phase=CommPhase.MESH, state=PhaseState.OK, seconds=0.31, said="2 of 2 directions"))
    '✓ tcp mesh               0.3 s  2 of 2 directions'
    """
    line = f"{MARKS[result.state]} {result.phase.value:<{NAME}}  "
    if result.state is PhaseState.SKIPPED:
        return f"{line}{'':>{SECONDS}}  {result.said if 'skipped' in result.said else f'skipped: {result.said}'}"
    return f"{line}{f'{result.seconds:.1f} s':>{SECONDS}}  {result.said}"


def report_lines(report: Report, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """The report at the end. When all is well: a line for each rank, the measurements, the verdict. Else the verdict, the
    findings, the ranks with problems, the measurements. ``verbose``: every rank, every size, every edge, stacks.
    ``width``: of the terminal, where lines are broken."""
    lines = list(_all_lines(report, verbose=verbose, width=width))
    last = list(_after_blank(_last_lines(report, well=report.state is PhaseState.OK)))
    is_whole = verbose or (report.state is PhaseState.OK and report.world <= MAX_RANKS)
    room = len(lines) if is_whole else MAX_LINES - len(last) - 1
    yield from lines[:room]
    if len(lines) > room:
        yield f"  and {len(lines) - room} more lines (--verbose shows all)"
    yield from last


def _all_lines(report: Report, *, verbose: bool, width: int | None) -> Iterator[str]:
    """All but the last lines, what matters most first."""
    well = report.state is PhaseState.OK
    if well:
        yield from _ok_lines(report)
        yield from _after_blank(screen_lines(report.findings, shows_all="" if verbose else "-v"))
    else:
        yield from _problem_lines(report, verbose=verbose)
    if verbose or not well:
        yield from _after_blank(rank_lines(report, verbose=verbose, width=width))
    measured = (
        matrix_lines(report, verbose=verbose, width=width),
        speed_lines(report, verbose=verbose, width=width),
        transport_lines(report, verbose=verbose, width=width),
    )
    for part in measured:
        yield from _after_blank(part)
    if verbose:
        yield from _after_blank(_stack_lines(report.stuck))


def _after_blank(lines: Iterable[str]) -> Iterator[str]:
    """Lines with a blank one before them, nothing where there are none."""
    for place, line in enumerate(lines):
        if not place:
            yield ""
        yield line


def _ok_lines(report: Report) -> Iterator[str]:
    """A line for each rank, in the words of DeepSpeed's guide; a line for each host where there are many. None where no rank was
    started: of such nothing is known."""
    if not report.ranks:
        return
    if report.world <= MAX_RANKS:
        yield from (f"[{host_of(report, rank) or 'unknown host'}-{rank}] is OK" for rank in range(report.world))
        return
    ranks: dict[str, list[int]] = {}
    for rank in range(report.world):
        ranks.setdefault(host_of(report, rank) or "unknown host", []).append(rank)
    if len(ranks) > MAX_HOSTS:
        yield f"[{in_words(ranks)}] ranks {numbers_in_words(range(report.world))} are OK"
        return
    yield from (f"[{host}] ranks {numbers_in_words(those)} are OK" for host, those in ranks.items())


def _problem_lines(report: Report, *, verbose: bool) -> Iterator[str]:
    """The verdict and, right below it, the evidence and the fix of its finding; then two of the others, and how many are left."""
    findings = report.findings
    named = reason(report.phases)
    first = findings[0] if named and findings[0] == named[1] else None
    yield VerdictLine(report.verdict + (f"  [{first.rule}]" if first else ""))
    if first:
        yield from _below(first)
    rest = [finding for finding in findings if finding is not first]
    most = MAX_FINDINGS - 1 if first else MAX_FINDINGS
    yield from _after_blank(screen_lines(rest, shows_all="" if verbose else "-v", most=most))


def _below(finding: Finding) -> Iterator[str]:
    """A finding without its title."""
    lines = finding_lines((finding,))
    next(lines)
    yield from lines


def _last_lines(report: Report, *, well: bool) -> Iterator[str]:
    if well:
        yield VerdictLine(f"{report.verdict} in {report.seconds:.1f} s")
    if report.out:
        yield f"  files and logs: {report.out}"
    if not well and (command := first_step(report.findings)):
        yield next_line(command)


def rank_lines(report: Report, *, verbose: bool, width: int | None = None) -> Iterator[str]:
    """A table with a line for each rank that is not ok: host, process, state. ``verbose``: for every rank.

    Nothing where no rank is known to have come: a test that did not begin has nothing to say about ranks.
    """
    if not report.ranks and not report.stuck:
        return
    states = rank_states(report)
    not_ok = [rank for rank, state in states.items() if state != OK]
    if report.world > MAX_HOSTS and len(not_ok) > MAX_ROWS and not verbose:
        yield from _grouped_lines(report, {rank: states[rank] for rank in not_ok})
        return
    shown = list(states) if verbose else not_ok
    claims = {claim.rank: claim for claim in report.ranks}
    rows = [_row(report, rank, claims.get(rank), states[rank]) for rank in shown[: None if verbose else MAX_RANKS]]
    if rows:
        head = ("", "rank", "host", "pid", "interface", "GPU", "state")
        with_gpu = any(row[5] for row in rows)
        wanted = [row if with_gpu else (*row[:5], row[6]) for row in (head, *rows)]
        yield from table(wanted, "<><><<<" if with_gpu else "<><><<", width=width, keep=2)
    if len(not_ok) > len(rows):
        yield f"  and {len(not_ok) - len(rows)} more that are not ok (--verbose shows all)"
    if len(states) > len(rows) and not_ok:
        yield f"  {len(states) - len(not_ok)} of {len(states)} ranks are ok (-v shows them)"


def _grouped_lines(report: Report, states: dict[int, str]) -> Iterator[str]:
    """Many ranks that are not ok: a line for each state, with its ranks and hosts."""
    by_state: dict[str, list[int]] = {}
    for rank, state in states.items():
        by_state.setdefault(re.sub(r" for [\d.]+ \S+", "", state), []).append(rank)
    lines = [
        f"{_mark(state)} {named(tuple(ranks), report.hosts)}: {state}"
        for state, ranks in sorted(by_state.items(), key=lambda item: -len(item[1]))
    ]
    yield from and_more_lines(lines, MAX_ROWS, of="states (--verbose shows all)")
    yield f"  {report.world - len(states):,} of {report.world:,} ranks are ok"


def _mark(state: str) -> str:
    if state == OK:
        return " "
    return "!" if state.partition(";")[0] in ONLY_SLOW or state.startswith("slow with") else "✗"


def _row(report: Report, rank: int, claim: Claim | None, state: str) -> tuple[str, ...]:
    host = clipped(host_of(report, rank) or "?")
    if claim is None:
        return (_mark(state), str(rank), host, "-", "-", "", state)
    interface = f"{claim.interface} {claim.address}".strip()
    return (_mark(state), str(rank), host, str(claim.pid), interface, clipped(_gpu(claim), 26), state)


def _gpu(claim: Claim) -> str:
    """The GPU of a rank by its index and name, as far as they are known."""
    here = claim.local.gpus if claim.local else ()
    mine = next((gpu for gpu in here if claim.gpu and gpu.uuid == claim.gpu), None)
    return f"{mine.index} {mine.name.removeprefix('NVIDIA ')}" if mine else claim.gpu or ""


def _stack_lines(stuck: Iterable[Stuck]) -> Iterator[str]:
    for stuck_rank in stuck:
        if stuck_rank.stack or stuck_rank.error:
            yield f"rank {stuck_rank.rank} in {stuck_rank.at or 'its start'}, step {stuck_rank.step}" + (
                f": {stuck_rank.error}" if stuck_rank.error else ""
            )
            yield from (f"    {line}" for line in stuck_rank.stack)
