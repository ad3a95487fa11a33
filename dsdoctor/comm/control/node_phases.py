"""The phases that try smaller groups of ranks: how fast nodes are together, and where exchanges break."""

import time

from dsdoctor.comm.collectives import isolate
from dsdoctor.comm.control.orders import Gathered
from dsdoctor.comm.control.phases import Phase
from dsdoctor.comm.control.test_run import LEAST, TestRun, results
from dsdoctor.comm.local.link_limits import limit
from dsdoctor.comm.models import CommPhase, Mode
from dsdoctor.comm.nodes import node_speed
from dsdoctor.comm.nodes.plan import Groups, Part, Trial, play
from dsdoctor.comm.speed.latency_checks import round_trips

TRIAL_SECONDS = 6.0
ROUND_SECONDS, ROUND_CALLS, PART_OF_TIME = 15.0, 60, 0.35
"""Seconds of a round of nodes, or so many exchanges as those before; and the part of the time left that all rounds may take."""
FEWEST_NODES = 3
"""Of two, neither can be told from the other."""


def enough_nodes(test_run: TestRun) -> bool:
    """Whether there are nodes to be compared, and it is not the quick test."""
    return test_run.settings.mode is not Mode.QUICK and len(set(test_run.hosts)) >= FEWEST_NODES


def nodes(test_run: TestRun, phase: Phase) -> None:
    """Each node alone, in pairs at the same time, in growing groups; the world is the next phase."""
    until, backend = time.monotonic() + test_run.left * PART_OF_TIME, test_run.member.backend
    link, longest = limit(test_run.claims, backend), max(ROUND_SECONDS, ROUND_CALLS * test_run.call)

    def run(what: str, groups: Groups) -> Trial | None:
        left = until - time.monotonic()
        if left < LEAST or phase.findings:
            return None
        gathered = _in_groups(test_run, groups, CommPhase.NODES, min(longest, left))
        phase.findings = test_run.trouble(gathered, "the test of nodes")
        if phase.findings:
            return None
        return Trial(what=what, groups=groups, failed=(), figures=_figures(groups, gathered))

    def judge(trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
        return node_speed.judged(trials, backend, link.bandwidth if link else None)

    outcome = play(isolate.parts_of(test_run.claims, 1), run, judge)
    seen = node_speed.NodeSpeeds(outcome=outcome, hosts=test_run.hosts, trips=round_trips(test_run.reaches))
    phase.findings += tuple(finding for check in node_speed.CHECKS for finding in check(seen))
    test_run.slow = tuple(rank for part in outcome.bad for rank in part)
    phase.said = f"{len(set(test_run.hosts))} nodes in {len(outcome.trials)} rounds; pairs do {seen.usual}"
    if not outcome.trials and not phase.findings:
        phase.skipped = "no time is left for it"


def _in_groups(test_run: TestRun, groups: Groups, phase: CommPhase, seconds: float) -> Gathered:
    flat = tuple(tuple(sorted(rank for part in group for rank in part)) for group in groups)
    return test_run.ask(phase, groups=flat, seconds=seconds)


def _figures(groups: Groups, gathered: Gathered) -> dict[tuple[Part, ...], float]:
    """busbw of each group, by its slowest rank's best call."""
    timings = {rank: result.speeds.timings for rank, result in results(gathered).items() if result.speeds}
    found = {}
    for group in groups:
        mine = [timings[rank] for part in group for rank in part if rank in timings]
        if mine:
            small, large = max(mine, key=lambda pair: pair[1].least)
            found[group] = node_speed.bandwidth(group, large.size, large.least, small.least)
    return found


def search(test_run: TestRun, phase: Phase) -> None:
    """Exchange again in smaller groups, until a single rank, host or transport is left."""
    if test_run.left < 2 * LEAST:
        phase.skipped = "no time is left for it"
        return

    def in_groups(what: str, groups: Groups) -> Trial | None:
        if test_run.left < LEAST:
            return None
        bad = _bad(_in_groups(test_run, groups, CommPhase.RIGHT, min(TRIAL_SECONDS, test_run.left - 1)))
        failed = tuple(group for group in groups if any(rank in bad for part in group for rank in part))
        return Trial(what=what, groups=groups, failed=failed)

    def with_switch(switch: isolate.Switch) -> bool | None:
        if test_run.left < LEAST:
            return None
        everyone = (tuple(range(test_run.me.world)),)
        seconds, variables = min(TRIAL_SECONDS, test_run.left - 1), {switch.variable: switch.value}
        return not _bad(test_run.ask(CommPhase.RIGHT, groups=everyone, variables=variables, seconds=seconds))

    found = isolate.isolate(test_run.claims, test_run.member.backend, with_switch, in_groups)
    phase.findings = tuple(finding for check in isolate.CHECKS for finding in check(found))
    phase.said = found.said
    if not found.switches and not found.outcome.trials:
        phase.skipped = f"{test_run.me.world} ranks cannot be distinguished in smaller groups"


def _bad(gathered: Gathered) -> set[int]:
    """The ranks that did not come to the end, or got something wrong."""
    wrong = {rank for rank, result in results(gathered).items() if any(one.wrong for one in result.exchanges)}
    return wrong | set(gathered.silent) | {answer.rank for answer in gathered.answers if answer.stuck}
