"""An incident -> the verdict: the first cause that explains it, and all stacks. Judges, never looks."""

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.hang.activity import OUTSIDE_THE_RUN, activity_in, activity_of
from dsdoctor.hang.case import Case, wakes_again_and_again
from dsdoctor.hang.checks import CHECKS
from dsdoctor.hang.models import NOT_LOOKED, PROCESSES, Incident, Verdict
from dsdoctor.hang.process_checks import hang_stacks_unread
from dsdoctor.hang.stacks import grouped_stacks, ranks_words
from dsdoctor.rules import book

TOGETHER = {"hang-rank-gone", "hang-rank-stopped", "hang-host-gone", "hang-disk-sleep", "hang-interpreter-held"}
"""Causes that do not explain each other: two processes may be stopped for two reasons."""
BLIND_SECONDS = 60.0
"""A watch that has not looked for so long does not look any more; before, its machine may have had no time for it."""
LATE = {"hang-not-started", "hang-rank-behind", "hang-rank-outside", "hang-all-outside", "hang-at-exit"}


def judge(incident: Incident) -> Verdict:
    """What keeps the ranks from moving. Without a cause the finding says what is known and what would decide it."""
    case = Case(incident)
    found: list[Finding] = []
    stacks = tuple(grouped_stacks(incident.ranks))
    if case.moves:
        return Verdict(findings=(), stacks=stacks)
    for check in CHECKS:
        rule = check.__name__.replace("_", "-")
        if found and not (rule in TOGETHER and found[0].rule in TOGETHER):
            break
        found += check(case)
    unread = tuple(hang_stacks_unread(case))
    return Verdict(findings=(*(found or (() if unread else hang_unclear(case))), *unread), stacks=stacks)


def is_working(verdict: Verdict) -> bool:
    """Whether all that the others wait for is seen to work: slow, not hung."""
    return all(finding.severity is not Severity.ERROR for finding in verdict.findings)


def is_blind(incident: Incident, verdict: Verdict) -> bool:
    """Whether all that is known is that some ranks' watches have not looked for a moment: nothing is to be told of that yet."""
    ages = [view.age for view in incident.ranks if view.unread == NOT_LOOKED]
    unread = all(finding.rule == "hang-stacks-unread" for finding in verdict.findings)
    return bool(ages) and unread and max(ages) < BLIND_SECONDS


def may_wait_outside(incident: Incident, verdict: Verdict) -> bool:
    """Whether a rank that others wait for waits itself for something that is not seen from here, and may well work: a server
    that answers slowly, a node that is still being started."""
    case = Case(incident)
    if verdict.findings[0].rule not in LATE:
        return False
    if case.starting and case.unknown:
        return True
    late = [
        view for view in incident.ranks if view.rank not in case.faulty_ranks and view.rank not in case.waiting_ranks
    ]
    # a dataset that reads within the rank and waits for a dead peer waits for ever; what its clients give up on ends by itself
    if any(seen.kind in OUTSIDE_THE_RUN and not seen.in_loader for seen in map(activity_of, late)):
        return True
    # a loop around a process that works where it is not seen: on a GPU, on another host
    if any(wakes_again_and_again(view) and view.children for view in late):
        return True
    # what a script leaves behind may be an upload
    threads = [thread for view in case.past_the_end if view.sample for thread in view.sample.threads if not thread.main]
    return any(activity_in(thread.frames).kind in OUTSIDE_THE_RUN for thread in threads)


def hang_unclear(case: Case) -> tuple[Finding, ...]:
    """Nothing moves, and what was seen of the ranks does not say why."""
    over = case.dead and not case.waiting_ranks
    if case.incident.source == PROCESSES:
        return (_unclear_from_outside(case),)
    if not case.joined or over or (case.is_long_step and not case.faulty_ranks):
        return ()
    finding = book.finding(
        "hang-unclear",
        Severity.WARNING,
        evidence=(*case.incident.nccl, *case.evidence(case.views)),
        seconds=f"{case.incident.still:.0f}",
        count=len(case.views),
        world=case.incident.world,
    )
    return (finding,)


def _unclear_from_outside(case: Case) -> Finding:
    """Of running processes that wait alike, or were not all named."""
    return book.finding(
        "hang-unclear",
        Severity.WARNING,
        case="processes" if case.is_whole else "some-processes",
        evidence=(*_same_collective(case), *_unread_lines(case), *case.evidence(sorted(case.views)[:4])),
        waiting=case.waits_words(),
        count=len(case.views),
        world=case.incident.world,
    )


def _unread_lines(case: Case) -> tuple[str, ...]:
    ranks = ranks_words(view.rank for view in case.undecided)
    told = (
        f"source lines of {ranks} unread: they may wait for an earlier collective; run this as their user to read them"
    )
    return (told,) if case.undecided else ()


def _same_collective(case: Case) -> tuple[str, ...]:
    names = {case.waiting.operation_of(case.views[rank]) for rank in case.waiting_ranks}
    alike = len(names) == 1 and len(case.waiting_ranks) > 1
    return ("without sequence numbers it is unknown whether it is the same call on all ranks",) if alike else ()
