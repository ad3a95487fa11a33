"""Rank 0 leads the test: runs the phases in order, and makes the Report."""

import time
from collections.abc import Callable

from dsdoctor.comm.control import exchange_phases, gather_phases, node_phases
from dsdoctor.comm.control.phases import Phase
from dsdoctor.comm.control.test_run import TestRun, time_used_up
from dsdoctor.comm.local.limit_checks import blamed, is_tiny
from dsdoctor.comm.local.link_limits import limit
from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.comm.results import Report
from dsdoctor.comm.verdict import ended, verdict
from dsdoctor.core.finding import Finding

Act = Callable[[TestRun, Phase], None]
BEGINNINGS: tuple[tuple[CommPhase, Act], ...] = (
    (CommPhase.RENDEZVOUS, gather_phases.rendezvous),
    (CommPhase.LOCAL, gather_phases.local),
)
EXCHANGES: tuple[tuple[CommPhase, Act], ...] = (
    (CommPhase.MESH, exchange_phases.mesh),
    (CommPhase.RIGHT, exchange_phases.right),
    (CommPhase.NODES, node_phases.nodes),
    (CommPhase.SPEED, exchange_phases.speed),
    (CommPhase.DEEPSPEED, exchange_phases.deepspeed),
)
"""In this order; after a broken phase the later ones are skipped."""
STATUS = {PhaseState.OK: 0, PhaseState.SKIPPED: 0, PhaseState.SLOW: 6, PhaseState.BROKEN: 1}


def lead(test_run: TestRun) -> Report:
    """Go through the phases."""
    for phase, act in BEGINNINGS:
        _write(test_run, phase, act)
    reason = None if gather_phases.all_there(test_run) else "not every rank is there once"
    if reason is None:
        _write(test_run, CommPhase.SAME, gather_phases.same)
    for phase, act in EXCHANGES:
        if phase is CommPhase.NODES and not node_phases.enough_nodes(test_run):
            continue
        if reason:
            test_run.phase_log.skip(phase, reason)
        elif _write(test_run, phase, act) is PhaseState.BROKEN:
            reason = f"broken before: {phase.value}"
            if phase is CommPhase.RIGHT and _unnamed(test_run):
                _write(test_run, CommPhase.ISOLATE, node_phases.search)
    gather_phases.count_again(test_run)
    test_run.phase_log.add_to(CommPhase.RIGHT, _untested(test_run))
    if test_run.phase_log.broken and any(
        claim.local and is_tiny(claim.local, claim.world, claim.backend) for claim in test_run.claims
    ):
        test_run.phase_log.change(CommPhase.LOCAL, blamed)
    return report(test_run)


def _untested(test_run: TestRun) -> tuple[Finding, ...]:
    """That the deadline came before the collectives could be tested: then nothing is known of them."""
    phases = test_run.phase_log.phases
    tried = any(phase.phase is CommPhase.RIGHT and phase.state is not PhaseState.SKIPPED for phase in phases)
    if tried or test_run.phase_log.broken:
        return ()
    title = f"the deadline of {test_run.settings.deadline:g} s came before the collectives were tested"
    spent = tuple(f"{phase.phase.value}: {phase.seconds:.1f} s" for phase in phases if phase.seconds > 0.5)
    return tuple(time_used_up(title, grave=True, evidence=spent))


def report(test_run: TestRun) -> Report:
    """The report of everything known so far."""
    phases, backend = tuple(test_run.phase_log.phases), test_run.member.backend
    return Report(
        world=test_run.me.world,
        backend=backend,
        launcher=test_run.me.launcher,
        mode=test_run.settings.mode,
        verdict=verdict(phases, world=test_run.me.world, hosts=test_run.hosts, backend=backend),
        state=ended(phases),
        seconds=time.monotonic() - test_run.began,
        phases=phases,
        ranks=tuple(sorted(test_run.claims, key=lambda claim: claim.rank)),
        reaches=test_run.reaches,
        exchanges=test_run.exchanges,
        speeds=test_run.speeds,
        pairs=test_run.pairs,
        paces=tuple(speeds.pace for speeds in test_run.timed if speeds.pace),
        stuck=test_run.stuck,
        wrong=test_run.wrong,
        limit=limit(test_run.claims, backend) if test_run.claims else None,
        transports=test_run.nccl.edges if test_run.nccl else {},
        hosts=test_run.hosts,
        versions=test_run.member.claim.fingerprint,
        out=test_run.settings.out or (test_run.member.briefing.folder if ended(phases) is PhaseState.BROKEN else None),
    )


def _write(test_run: TestRun, phase: CommPhase, act: Act) -> PhaseState:
    with test_run.phase_log.phase(phase) as written:
        act(test_run, written)
    return test_run.phase_log.phases[-1].state


def _unnamed(test_run: TestRun) -> bool:
    """Whether no finding names a rank and the library did begin: then only trials in smaller groups can show more."""
    if test_run.stuck and all(stuck.error and stuck.step == 0 for stuck in test_run.stuck):
        return False
    return not {"rank-died", "rank-stopped", "host-vanished", "rank-behind", "time-used-up", "supervisor-stopped"} & {
        finding.rule for finding in test_run.phase_log.phases[-1].findings
    }
