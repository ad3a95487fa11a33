"""A communication test -> lines for a terminal: one for each phase while it runs, the verdict with its tables at the end."""

from collections.abc import Iterable, Iterator

from dsdoctor.comm.models import Claim, PhaseState
from dsdoctor.comm.results import PhaseResult, Report, Stuck
from dsdoctor.core.finding import Finding
from dsdoctor.report.comm.pairs import cells, host_of
from dsdoctor.report.comm.tables import matrix_lines, speed_lines, transport_lines
from dsdoctor.report.terminal import finding_lines
from dsdoctor.report.units import clipped, duration, ranges, table

MARKS = {PhaseState.OK: "✓", PhaseState.SLOW: "!", PhaseState.BROKEN: "✗", PhaseState.SKIPPED: "·"}
NAME, SAID = 19, 66
MOST_RANKS = 64
"""Ranks that have a line each."""
OK = "ok"


def phase_line(result: PhaseResult) -> str:
    """What one phase saw, and how long it took.

    >>> from dsdoctor.comm.models import CommPhase
    >>> phase_line(PhaseResult(phase=CommPhase.MESH, state=PhaseState.OK, seconds=0.31, said="2 of 2 directions"))
    '✓ tcp mesh             2 of 2 directions                                                     0.3 s'
    """
    line = f"{MARKS[result.state]} {result.phase.value:<{NAME}}  "
    if result.state is PhaseState.SKIPPED:
        return line + (result.said if "skipped" in result.said else f"skipped: {result.said}")
    return f"{line}{result.said:<{SAID}}  {result.seconds:>5.1f} s"


def report_lines(report: Report, *, verbose: bool) -> Iterator[str]:
    """The report at the end. When all is well: a line for each rank, the measurements, the verdict. Else the verdict, the
    findings, the ranks with problems, the measurements. ``verbose``: every rank, every size, every edge, stacks."""
    well = report.state is PhaseState.OK
    if well:
        yield from _ok_lines(report)
        yield from _after_blank(finding_lines(report.findings))
    else:
        yield from _problem_lines(report)
    if verbose or not well:
        yield from _after_blank(rank_lines(report, verbose=verbose))
    measured = (
        matrix_lines(report, verbose=verbose),
        speed_lines(report, verbose=verbose),
        transport_lines(report, verbose=verbose),
    )
    for part in measured:
        yield from _after_blank(part)
    if verbose:
        yield from _after_blank(_stack_lines(report.stuck))
    yield from _after_blank(_last_lines(report, well=well))


def _after_blank(lines: Iterable[str]) -> Iterator[str]:
    """Lines with a blank one before them, nothing where there are none."""
    for place, line in enumerate(lines):
        if not place:
            yield ""
        yield line


def _ok_lines(report: Report) -> Iterator[str]:
    """A line for each rank, in the words of DeepSpeed's guide; a line for each host where there are many."""
    if report.world <= MOST_RANKS:
        yield from (f"[{host_of(report, rank) or 'unknown host'}-{rank}] is OK" for rank in range(report.world))
        return
    ranks: dict[str, list[int]] = {}
    for rank in range(report.world):
        ranks.setdefault(host_of(report, rank) or "unknown host", []).append(rank)
    yield from (f"[{host}] ranks {ranges(those)} are OK" for host, those in ranks.items())


def _problem_lines(report: Report) -> Iterator[str]:
    """The verdict and, right below it, the evidence and the fix of its finding; then the other findings."""
    findings = report.findings
    first = findings[0] if findings and findings[0].title in report.verdict else None
    yield report.verdict + (f"  [{first.rule}]" if first else "")
    if first:
        yield from _below(first)
    yield from _after_blank(finding_lines(finding for finding in findings if finding is not first))


def _below(finding: Finding) -> Iterator[str]:
    """A finding without its title."""
    lines = finding_lines((finding,))
    next(lines)
    yield from lines


def _last_lines(report: Report, *, well: bool) -> Iterator[str]:
    if well:
        yield f"{report.verdict}  in {report.seconds:.1f} s"
    if report.out:
        yield f"  files and logs: {report.out}"


def rank_lines(report: Report, *, verbose: bool) -> Iterator[str]:
    """A table with a line for each rank: host, process, state. Of many ranks only those that are not ok.

    Nothing where no rank is known to have come: a test that did not begin has nothing to say about ranks.
    """
    if not report.ranks and not report.stuck:
        return
    states = rank_states(report)
    not_ok = [rank for rank, state in states.items() if state != OK]
    shown = not_ok if report.world > MOST_RANKS and not verbose else list(states)
    claims = {claim.rank: claim for claim in report.ranks}
    rows = [_row(report, rank, claims.get(rank), states[rank]) for rank in shown[: None if verbose else MOST_RANKS]]
    if rows:
        head = ("", "rank", "host", "pid", "interface", "GPU", "state")
        with_gpu = any(row[5] for row in rows)
        wanted = [row if with_gpu else (*row[:5], row[6]) for row in (head, *rows)]
        yield from table(wanted, "<><><<<" if with_gpu else "<><><<")
    if len(not_ok) > len(rows):
        yield f"  and {len(not_ok) - len(rows)} more that are not ok (--verbose shows all)"
    if len(states) > len(rows) and len(states) > len(not_ok):
        yield f"  {len(states) - len(not_ok)} of {len(states)} ranks are ok"


def _row(report: Report, rank: int, claim: Claim | None, state: str) -> tuple[str, ...]:
    host = clipped(host_of(report, rank) or "?")
    mark = " " if state == OK else "!" if state.startswith("slow") else "✗"
    if claim is None:
        return (mark, str(rank), host, "-", "-", "", state)
    interface = f"{claim.interface} {claim.address}".strip()
    return (mark, str(rank), host, str(claim.pid), interface, clipped(_gpu(claim), 26), state)


def _gpu(claim: Claim) -> str:
    """The GPU of a rank by its index and name, as far as they are known."""
    here = claim.local.gpus if claim.local else ()
    mine = next((gpu for gpu in here if claim.gpu and gpu.uuid == claim.gpu), None)
    return f"{mine.index} {mine.name.removeprefix('NVIDIA ')}" if mine else claim.gpu or ""


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
    return states


def _peers(peers: set[int], world: int) -> str:
    if len(peers) > 1 and len(peers) == world - 1:
        return "all others"
    return f"rank{'s' if len(peers) > 1 else ''} {clipped(ranges(peers))}"


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


def _stack_lines(stuck: Iterable[Stuck]) -> Iterator[str]:
    for stuck_rank in stuck:
        if stuck_rank.stack or stuck_rank.error:
            yield f"rank {stuck_rank.rank} in {stuck_rank.at or 'its start'}, step {stuck_rank.step}" + (
                f": {stuck_rank.error}" if stuck_rank.error else ""
            )
            yield from (f"    {line}" for line in stuck_rank.stack)
