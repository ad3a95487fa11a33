"""Rank 0's control process: phase after phase, each with its time and verdict, to one Report."""

import time
from collections.abc import Callable

from dsdoctor.comm.control import exchange_phases, gather_phases
from dsdoctor.comm.control.phases import Page
from dsdoctor.comm.control.test_run import Course
from dsdoctor.comm.local.link_limits import limit
from dsdoctor.comm.models import Phase, State
from dsdoctor.comm.results import Report
from dsdoctor.comm.verdict import ended, verdict

Act = Callable[[Course, Page], None]
BEGINNINGS: tuple[tuple[Phase, Act], ...] = (
    (Phase.RENDEZVOUS, gather_phases.rendezvous),
    (Phase.LOCAL, gather_phases.local),
)
EXCHANGES: tuple[tuple[Phase, Act], ...] = (
    (Phase.MESH, exchange_phases.mesh),
    (Phase.RIGHT, exchange_phases.right),
    (Phase.SPEED, exchange_phases.speed),
    (Phase.DEEPSPEED, exchange_phases.deepspeed),
)
"""In this order; one that breaks makes the later ones pointless."""
STATUS = {State.OK: 0, State.SKIPPED: 0, State.SLOW: 6, State.BROKEN: 1}


def lead(course: Course) -> Report:
    """Go through the phases."""
    for phase, act in BEGINNINGS:
        _write(course, phase, act)
    reason = None if gather_phases.all_there(course) else "not every rank is there once"
    if reason is None:
        _write(course, Phase.SAME, gather_phases.same)
    for phase, act in EXCHANGES:
        if reason:
            course.book.skip(phase, reason)
        elif _write(course, phase, act) is State.BROKEN:
            reason = f"broken before: {phase.value}"
            if phase is Phase.RIGHT and _unnamed(course):
                _write(course, Phase.ISOLATE, exchange_phases.search)
    course.book.add_to(Phase.RIGHT, tuple(exchange_phases.deadline_too_short(course)))
    return report(course)


def report(course: Course) -> Report:
    """What is known so far, in one."""
    phases, backend = tuple(course.book.phases), course.member.backend
    return Report(
        world=course.me.world,
        backend=backend,
        launcher=course.me.launcher,
        mode=course.settings.mode,
        verdict=verdict(phases, world=course.me.world, hosts=course.hosts, backend=backend),
        state=ended(phases),
        seconds=time.monotonic() - course.began,
        phases=phases,
        ranks=tuple(sorted(course.claims, key=lambda claim: claim.rank)),
        reaches=course.reaches,
        exchanges=course.exchanges,
        speeds=course.speeds,
        pairs=course.pairs,
        paces=tuple(one.pace for one in course.timed if one.pace),
        stuck=course.stuck,
        wrong=course.wrong,
        limit=limit(course.claims, backend) if course.claims else None,
        transports=course.nccl.edges if course.nccl else {},
        hosts=course.hosts,
        versions=course.member.claim.fingerprint,
        out=course.settings.out or (course.member.briefing.folder if ended(phases) is State.BROKEN else None),
    )


def _write(course: Course, phase: Phase, act: Act) -> State:
    with course.book.phase(phase) as page:
        act(course, page)
    return course.book.phases[-1].state


def _unnamed(course: Course) -> bool:
    """Whether no rank died, stopped or vanished, and the library did begin: then only trials by parts can tell more."""
    if course.stuck and all(one.error and one.step == 0 for one in course.stuck):
        return False
    return not {"rank-died", "rank-stopped", "host-vanished", "rank-behind", "time-used-up", "supervisor-stopped"} & {
        finding.rule for finding in course.book.phases[-1].findings
    }
