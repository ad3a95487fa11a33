"""A Report -> the ranks that are themselves the cause of what is broken, and why. Of ranks that only waited it names none."""

from collections.abc import Iterator

from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.results import Report
from dsdoctor.core.finding import Severity


def bad_ranks(report: Report) -> dict[int, str]:
    """Those without which the others could go on; empty where the findings do not decide it."""
    if report.state is not PhaseState.BROKEN:
        return {}
    rules = {finding.rule for finding in report.findings if finding.severity is Severity.ERROR}
    return {rank: why for needed, rank, why in _candidates(report) if needed & rules}


def _candidates(report: Report) -> Iterator[tuple[set[str], int, str]]:
    """The rules of which one must have been found, a rank, and what is the matter with it."""
    came = {claim.rank for claim in report.ranks}
    for rank in range(report.world) if came else ():
        if rank not in came:
            yield {"rank-missing", "rank-unable", "master-unreachable"}, rank, "it did not come to the rendezvous"
    for rank in report.wrong:
        yield {"data-is-wrong"}, rank, "what it sends is wrong"
    for stuck in report.stuck:
        if stuck.process == "T":
            yield {"rank-stopped"}, stuck.rank, f"it was stopped by a signal, in {stuck.at}"
        elif stuck.ended:
            yield {"rank-died", "host-vanished", "rank-stopped"}, stuck.rank, f"lost in {stuck.at}: {stuck.ended}"
