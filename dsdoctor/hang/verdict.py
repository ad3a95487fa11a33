"""An incident -> the verdict: the first cause that explains it, and all stacks. Judges, never looks."""

import re
from collections.abc import Iterator

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.hang.activity import OUTSIDE_THE_RUN, activity_in, activity_of
from dsdoctor.hang.case import Case, wakes_again_and_again
from dsdoctor.hang.checks import CHECKS
from dsdoctor.hang.models import NOT_LOOKED, PROCESSES, RECORDERS, Incident, Verdict
from dsdoctor.hang.process_checks import hang_stacks_unread
from dsdoctor.hang.stacks import grouped_stacks, main_stack, ranks_words
from dsdoctor.rules import book
from dsdoctor.ui.terminal import VerdictLine, finding_lines

TOGETHER = {"hang-rank-gone", "hang-rank-stopped", "hang-host-gone", "hang-disk-sleep", "hang-interpreter-held"}
"""Causes that do not explain each other: two processes may be stopped for two reasons."""


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


BLIND_SECONDS = 60.0
"""A watch that has not looked for so long does not look any more; before, its machine may have had no time for it."""


def is_blind(incident: Incident, verdict: Verdict) -> bool:
    """Whether all that is known is that some ranks' watches have not looked for a moment: nothing is to be told of that yet."""
    ages = [view.age for view in incident.ranks if view.unread == NOT_LOOKED]
    unread = all(finding.rule == "hang-stacks-unread" for finding in verdict.findings)
    return bool(ages) and unread and max(ages) < BLIND_SECONDS


LATE = {"hang-not-started", "hang-rank-behind", "hang-rank-outside", "hang-all-outside", "hang-at-exit"}


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
    if any(activity_of(view).kind in OUTSIDE_THE_RUN for view in late):
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
        evidence=(*_same_collective(case), *case.evidence(sorted(case.views)[:4])),
        waiting=case.waits_words(),
        count=len(case.views),
        world=case.incident.world,
    )


def _same_collective(case: Case) -> tuple[str, ...]:
    names = {case.waiting.operation_of(case.views[rank]) for rank in case.waiting_ranks}
    alike = len(names) == 1 and len(case.waiting_ranks) > 1
    return ("whether it is the same one on all of them is not known without their numbers",) if alike else ()


# A verdict on a run in which nothing moves -> lines.


MAX_SHOWN_RANKS = 8
PACKAGES = re.compile(r"^(\s*)/\S*/(?:site|dist)-packages/")


def hang_lines(incident: Incident, verdict: Verdict) -> Iterator[str]:
    """What is the matter, each cause with its evidence, then the stacks of all ranks, equal ones together."""
    yield VerdictLine(headline(incident))
    if not verdict.findings and incident.source == PROCESSES:
        yield from _what_works(incident)
    yield from finding_lines(verdict.findings)
    # of ranks that have ended there are only old ones
    if verdict.stacks and not incident.first_ended and any(map(main_stack, incident.ranks)):
        yield "the stacks, equal ones together:"
        yield from (f"    {_short(line)}" for line in verdict.stacks)


def _short(line: str) -> str:
    """A line of a stack, with a package's file as it is imported.

    >>> _short("    /opt/venv/lib/python3.11/site-packages/deepspeed/comm/comm.py:294 in reduce_scatter_fn")
    '    deepspeed/comm/comm.py:294 in reduce_scatter_fn'
    """
    return PACKAGES.sub(r"\1", line)


def _what_works(incident: Incident) -> Iterator[str]:
    """Of running processes in which nothing hangs: which of them work."""
    works = [view for view in incident.ranks if view.activity]
    yield f"✓ {ranks_words(view.rank for view in works)} {'works' if len(works) == 1 else 'work'}: nothing hangs as far as was seen"
    yield from (f"    rank {view.rank}: {view.activity}" for view in works[:MAX_SHOWN_RANKS])


def headline(incident: Incident) -> str:
    """One line: since when nothing has moved."""
    heard = len(incident.ranks)
    if incident.source == PROCESSES:
        some = f"{heard} of {incident.world} ranks" if heard < incident.world else f"{heard} rank{'s' * (heard != 1)}"
        return f"two looks at running processes, {incident.still:.0f} s apart ({some})"
    of = f"{heard} of {incident.world} ranks were heard of" if heard < incident.world else f"{incident.world} ranks"
    if incident.source == RECORDERS:
        return f"what torch's flight recorders hold ({of})"
    if incident.asked:
        return f"somebody asked where the ranks are ({of}): the last movement was {incident.still:.0f} s ago"
    if incident.first_ended:
        return f"{ranks_words(incident.first_ended)} ended before the others ({of})"
    return f"nothing has moved for {incident.still:.0f} s ({of})"
