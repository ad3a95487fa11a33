"""An incident -> the verdict: the first cause that explains it, and all stacks; and its lines for a terminal. Never looks."""

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.hang.activity import OUTSIDE_THE_RUN, activity_in, activity_of
from dsdoctor.hang.checks import CHECKS, hang_stacks_unread
from dsdoctor.hang.incident_view import IncidentView, wakes_again_and_again
from dsdoctor.hang.models import NOT_LOOKED, PROCESSES, RECORDERS, Incident, Verdict
from dsdoctor.hang.stacks import grouped_stacks, main_stack
from dsdoctor.ranks.nodelist import ranks_in_words
from dsdoctor.rules import book
from dsdoctor.ui.terminal import VerdictLine, finding_lines

TOGETHER = {"hang-rank-gone", "hang-rank-stopped", "hang-host-gone", "hang-disk-sleep", "hang-interpreter-held"}
"""Causes that do not explain each other: two processes may be stopped for two reasons."""
BLIND_SECONDS = 60.0
"""A watch that has not looked for so long does not look any more; before, its machine may have had no time for it."""
RANK_IS_LATE = {"hang-not-started", "hang-rank-behind", "hang-rank-outside", "hang-all-outside", "hang-at-exit"}
"""Causes in which a rank that others wait for is alive, and may wait itself."""
MAX_SHOWN_RANKS = 8
PACKAGES = re.compile(r"^(\s*)/\S*/(?:site|dist)-packages/")
"""Before a package's file in a line of a stack, as it is imported: "deepspeed/comm/comm.py:294 in reduce_scatter_fn"."""


def judge(incident: Incident) -> Verdict:
    """What keeps the ranks from moving. Without a cause the finding says what is known and what would decide it."""
    run = IncidentView(incident)
    found: list[Finding] = []
    stacks = tuple(grouped_stacks(incident.ranks))
    if run.moves:
        return Verdict(findings=(), stacks=stacks)
    for check in CHECKS:
        rule = check.__name__.replace("_", "-")
        if found and not (rule in TOGETHER and found[0].rule in TOGETHER):
            break
        found += check(run)
    unread = tuple(hang_stacks_unread(run))
    return Verdict(findings=(*(found or (() if unread else hang_unclear(run))), *unread), stacks=stacks)


def is_working(verdict: Verdict) -> bool:
    """Whether all that the others wait for is seen to work: slow, not hung."""
    return all(finding.severity is not Severity.ERROR for finding in verdict.findings)


def is_late(incident: Incident) -> bool:
    """Whether what keeps the ranks may still end by itself, and would be a hang had it lasted longer."""
    return is_working(judge(incident)) and not is_working(judge(replace(incident, after=0.0)))


def late_ranks(incident: Incident) -> tuple[int, ...]:
    """Those that the others wait for."""
    run = IncidentView(incident)
    waiting = {*run.waiting_ranks, *(view.rank for view in run.starting)}
    return tuple(sorted({*run.unknown, *run.views} - waiting))


def is_blind(incident: Incident, verdict: Verdict) -> bool:
    """Whether all that is known is that some ranks' watches have not looked for a moment: nothing is to be told of that yet."""
    ages = [view.age for view in incident.ranks if view.unread == NOT_LOOKED]
    unread = all(finding.rule == "hang-stacks-unread" for finding in verdict.findings)
    return bool(ages) and unread and max(ages) < BLIND_SECONDS


def may_wait_outside(incident: Incident, verdict: Verdict) -> bool:
    """Whether a rank that others wait for waits itself for something that is not seen from here, and may well work: a server
    that answers slowly, a node that is still being started."""
    run = IncidentView(incident)
    if verdict.findings[0].rule not in RANK_IS_LATE:
        return False
    if run.starting and run.unknown:
        return True
    late = [view for view in incident.ranks if view.rank not in run.faulty_ranks and view.rank not in run.waiting_ranks]
    # a dataset that reads within the rank and waits for a dead peer waits for ever; what its clients give up on ends by itself
    if any(seen.kind in OUTSIDE_THE_RUN and not seen.in_loader for seen in map(activity_of, late)):
        return True
    # a loop around a process that works where it is not seen: on a GPU, on another host
    if any(wakes_again_and_again(view) and view.children for view in late):
        return True
    # what a script leaves behind may be an upload
    threads = [thread for view in run.past_the_end if view.sample for thread in view.sample.threads if not thread.main]
    return any(activity_in(thread.frames).kind in OUTSIDE_THE_RUN for thread in threads)


def hang_unclear(run: IncidentView) -> tuple[Finding, ...]:
    """Nothing moves, and what was seen of the ranks does not say why."""
    if run.incident.source == PROCESSES:
        return (_unclear_from_outside(run),)
    over = run.dead and not run.waiting_ranks
    if not run.joined or over or (run.is_long_step and not run.faulty_ranks):
        return ()
    return (
        book.finding(
            "hang-unclear",
            Severity.WARNING,
            evidence=(*run.incident.nccl, *run.evidence(run.views)),
            seconds=f"{run.incident.still:.0f}",
            count=len(run.views),
            world=run.incident.world,
        ),
    )


def _unclear_from_outside(run: IncidentView) -> Finding:
    """Of running processes that wait alike, or were not all named."""
    names = {run.waiting.operation_of(run.views[rank]) for rank in run.waiting_ranks}
    evidence = []
    if len(names) == 1 and len(run.waiting_ranks) > 1:
        evidence.append("without sequence numbers it is unknown whether it is the same call on all ranks")
    if run.undecided:
        ranks = ranks_in_words(view.rank for view in run.undecided)
        evidence.append(
            f"source lines of {ranks} unread: they may wait for an earlier collective; run this as their user to read them"
        )
    return book.finding(
        "hang-unclear",
        Severity.WARNING,
        case="processes" if run.is_whole else "some-processes",
        evidence=(*evidence, *run.evidence(sorted(run.views)[:4])),
        waiting=run.waits_words(),
        count=len(run.views),
        world=run.incident.world,
    )


def hang_lines(incident: Incident, verdict: Verdict) -> Iterator[str]:
    """What is the matter, each cause with its evidence, then the stacks of all ranks, equal ones together."""
    yield VerdictLine(headline(incident))
    if not verdict.findings and incident.source == PROCESSES:
        works = [view for view in incident.ranks if view.activity]
        verb = "is" if len(works) == 1 else "are"
        yield f"✓ {ranks_in_words(view.rank for view in works)} {verb} working; no hang detected"
        yield from (f"    rank {view.rank}: {view.activity}" for view in works[:MAX_SHOWN_RANKS])
    yield from finding_lines(verdict.findings)
    # of ranks that have ended there are only old ones
    if verdict.stacks and not incident.first_ended and any(map(main_stack, incident.ranks)):
        yield "stacks, grouped:"
        yield from ("    " + PACKAGES.sub(r"\1", line) for line in verdict.stacks)


def headline(incident: Incident) -> str:
    """One line: since when nothing has moved."""
    heard = len(incident.ranks)
    if incident.source == PROCESSES:
        some = f"{heard} of {incident.world} ranks" if heard < incident.world else f"{heard} rank{'s' * (heard != 1)}"
        return f"running processes, sampled twice {incident.still:.0f} s apart ({some})"
    of = f"{heard} of {incident.world} ranks reported" if heard < incident.world else f"{incident.world} ranks"
    if incident.source == RECORDERS:
        return f"from torch's flight recorders ({of})"
    if incident.asked:
        return f"report on request ({of}): last progress {incident.still:.0f} s ago"
    if incident.first_ended:
        return f"{ranks_in_words(incident.first_ended)} exited before the others ({of})"
    return f"no progress for {incident.still:.0f} s ({of})"
