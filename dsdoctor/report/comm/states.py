"""A Report -> the state of every rank in words, which agree with the findings. Draws nothing."""

import re
from collections.abc import Iterator

from dsdoctor.comm.results import Report, Stuck
from dsdoctor.report.comm.pairs import cells
from dsdoctor.ui.table import clipped, duration, ranges

OK = "ok"
PART = r"\d+(?:-\d+)?(?: \([^()]*\))?"
NAMED = re.compile(rf"ranks? ({PART}(?:, {PART})*)")
"""How a title begins that is about ranks."""
BLAMED = {
    "rank-unable": "cannot take part",
    "rank-raised": "raised an error",
    "rank-behind": "behind the others",
    "messages-late": "late with every message",
    "rank-straggles": "slow by itself",
    "rank-lacks-processor": "waits for a processor",
    "cpu-quota-used-up": "held back by its CPU quota",
    "rank-arrives-late": "came late",
    "rank-duplicated": "claimed twice",
    "gpu-shared": "shares its GPU",
}
"""The words of a row for a rank that a finding of this rule names first."""


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
    """The ranks that findings name first, and what they say of them."""
    for finding in reversed(report.findings):
        match = NAMED.match(finding.title) if finding.rule in BLAMED else None
        for part in re.findall(r"(?:^|, )(\d+)(?:-(\d+))?", match[1]) if match else ():
            first, last = int(part[0]), int(part[1] or part[0])
            for rank in range(first, min(last, report.world - 1) + 1):
                yield rank, BLAMED[finding.rule]


def _agreeing(state: str, words: str) -> str:
    """A state that says what the finding says; what the rank was seen in stays beside it."""
    if state.startswith("stuck in"):
        return f"{words}; {state}"
    return words if state in {OK, "missing"} or state.startswith("slow with") else state


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
