"""A communication test -> lines for a terminal: one for each phase while it runs, the verdict with its tables at the end."""

import re
from collections.abc import Iterable, Iterator

from dsdoctor.comm.models import Claim, PhaseState
from dsdoctor.comm.rank_names import named
from dsdoctor.comm.results import PhaseResult, Report, Stuck
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more_lines
from dsdoctor.ranks.nodelist import in_words
from dsdoctor.report.comm.pairs import host_of
from dsdoctor.report.comm.states import OK, rank_states
from dsdoctor.report.comm.tables import matrix_lines, speed_lines, transport_lines
from dsdoctor.ui.screen import MOST, first_step, next_line, screen_lines
from dsdoctor.ui.table import clipped, ranges, table
from dsdoctor.ui.terminal import VerdictLine, finding_lines

MARKS = {PhaseState.OK: "✓", PhaseState.SLOW: "!", PhaseState.BROKEN: "✗", PhaseState.SKIPPED: "·"}
NAME, SECONDS = 19, 7
MOST_RANKS = 64
"""Ranks that have a line each where all is well."""
MOST_HOSTS = 16
"""Hosts that have a line each where there are more ranks than that. Of more ranks than this those that are not ok are grouped."""
MOST_ROWS = 12
"""Rows for ranks that are not ok where there are many."""
MOST_LINES = 60
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
    is_whole = verbose or (report.state is PhaseState.OK and report.world <= MOST_RANKS)
    room = len(lines) if is_whole else MOST_LINES - len(last) - 1
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
    """A line for each rank, in the words of DeepSpeed's guide; a line for each host where there are many."""
    if report.world <= MOST_RANKS:
        yield from (f"[{host_of(report, rank) or 'unknown host'}-{rank}] is OK" for rank in range(report.world))
        return
    ranks: dict[str, list[int]] = {}
    for rank in range(report.world):
        ranks.setdefault(host_of(report, rank) or "unknown host", []).append(rank)
    if len(ranks) > MOST_HOSTS:
        yield f"[{in_words(ranks)}] ranks {ranges(range(report.world))} are OK"
        return
    yield from (f"[{host}] ranks {ranges(those)} are OK" for host, those in ranks.items())


def _problem_lines(report: Report, *, verbose: bool) -> Iterator[str]:
    """The verdict and, right below it, the evidence and the fix of its finding; then two of the others, and how many are left."""
    findings = report.findings
    first = findings[0] if findings and findings[0].title in report.verdict else None
    yield VerdictLine(report.verdict + (f"  [{first.rule}]" if first else ""))
    if first:
        yield from _below(first)
    rest = [finding for finding in findings if finding is not first]
    most = MOST - 1 if first else MOST
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
    if report.world > MOST_HOSTS and len(not_ok) > MOST_ROWS and not verbose:
        yield from _grouped_lines(report, {rank: states[rank] for rank in not_ok})
        return
    shown = list(states) if verbose else not_ok
    claims = {claim.rank: claim for claim in report.ranks}
    rows = [_row(report, rank, claims.get(rank), states[rank]) for rank in shown[: None if verbose else MOST_RANKS]]
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
    yield from and_more_lines(lines, MOST_ROWS, of="states (--verbose shows all)")
    yield f"  {report.world - len(states):,} of {report.world:,} ranks are ok"


def _mark(state: str) -> str:
    return (
        " "
        if state == OK
        else "!"
        if state.startswith(("slow", "late", "came late", "waits for", "held back"))
        else "✗"
    )


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
