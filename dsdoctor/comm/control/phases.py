"""The phases of a test, as rank 0 goes through them: who came, their hosts, the mesh, the collectives, their speed."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsdoctor.comm.collectives import checks as collective_checks
from dsdoctor.comm.collectives import nccl
from dsdoctor.comm.collectives.checks import supervisor_stopped
from dsdoctor.comm.collectives.nccl import parse_nccl_log
from dsdoctor.comm.control.member import GATHERED, why_unable
from dsdoctor.comm.control.messages import Phase, RankAnswer, Update
from dsdoctor.comm.control.test_state import MIN_PHASE_SECONDS, Responses, TestRun, results
from dsdoctor.comm.groups import CHECKS as NODE_CHECKS
from dsdoctor.comm.groups import (
    ISOLATE_CHECKS,
    Groups,
    NodeSpeeds,
    Part,
    Switch,
    Trial,
    bandwidth,
    isolate,
    judged,
    parts_of,
    play,
)
from dsdoctor.comm.local import facts, fingerprint
from dsdoctor.comm.local.checks import examine_all
from dsdoctor.comm.local.interfaces import limit
from dsdoctor.comm.mesh import checks as mesh_checks
from dsdoctor.comm.mesh.matrix import ConnectionMatrix, shared_addresses
from dsdoctor.comm.mesh.mesh import peers
from dsdoctor.comm.models import MAX_RANKS, Claim, CommPhase, Mode, PhaseState, named
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import Arrivals, Importing, addresses_of, rank_starting
from dsdoctor.comm.rendezvous.notices import UNNAMED, Notice
from dsdoctor.comm.rendezvous.store import Log
from dsdoctor.comm.results import ConnectOutcome, PhaseResult, Reach
from dsdoctor.comm.speed import checks as speed_checks
from dsdoctor.comm.speed.checks import round_trips
from dsdoctor.comm.speed.speed import merge
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.rules import book

# The phases in which rank 0 collects and compares: which ranks come, their hosts, whether all are the same.


ARRIVAL, MAX_ARRIVAL_SECONDS = 0.6, 90.0
"""The part of the deadline in which ranks must come, and the most seconds for that."""
COUNTING = 6.0
"""Seconds for another reading of the counters."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at what ranks that cannot come have said."""
DUPLICATES = 0.3
"""Seconds to wait for a second claim of a rank that came already."""
NOT_READY = frozenset(
    {"rank-unable", "rank-starting", "store-slow", "torch-unusable", "nccl-unavailable", "control-lost"}
)
TAIL = 2.5
"""Seconds that are kept of the wait for the import of torch, for the answers of those that are still in it."""
SHOWN_VERSIONS = ("torch", "cuda", "nccl", "deepspeed", "python")


def rendezvous(test_run: TestRun, phase: Phase) -> None:
    """Wait for the claims of all ranks. The phase counts from the start of this rank."""
    phase.began = test_run.began
    log, world = test_run.member.board.log("claims"), test_run.me.world
    until = min(test_run.end, test_run.began + min(test_run.settings.deadline * ARRIVAL, MAX_ARRIVAL_SECONDS))
    while not _all_accounted(test_run) and time.monotonic() < until:
        log.wait(LOOK_SECONDS)
        test_run.notices.look()
        if new := _seen(log):
            test_run.claims += tuple(new)
            test_run.member.say(Update(at=_said(test_run.claims, world, test_run.me.hosts)))
    time.sleep(DUPLICATES)
    test_run.claims += tuple(_seen(log))
    _close(test_run, log)
    arrivals = Arrivals(
        me=test_run.me,
        claims=test_run.claims,
        waited=time.monotonic() - test_run.began,
        notices=test_run.notices.heard,
        perhaps=test_run.notices.perhaps,
        resolved=() if all_there(test_run) else addresses_of(test_run.me.master),
    )
    phase.findings = tuple(finding for check in rendezvous_checks.CHECKS for finding in check(arrivals))
    times = [claim.seen for claim in test_run.claims]
    phase.said = f"{_said(test_run.claims, world, test_run.me.hosts)}, {max(times) - min(times):.1f} s apart"


def _all_accounted(test_run: TestRun) -> bool:
    """Whether there is nothing more to wait for: each rank came or said why it cannot, or a claim contradicts another."""
    claims, world = test_run.claims, test_run.me.world
    ranks = {claim.rank for claim in claims}
    contradict = len(ranks) < len(claims) or any(claim.world != world for claim in claims)
    return contradict or len(ranks | test_run.notices.heard.keys()) >= world


def _close(test_run: TestRun, log: Log) -> None:
    """Make known who is there: where each rank listens, and that a process that comes from now on is none of them."""
    board = test_run.member.board
    for claim in reversed(test_run.claims):
        board.put(f"at/{claim.rank}", replace(claim, local=None, fingerprint={}))
    board.put(GATHERED, log.read)


def local(test_run: TestRun, phase: Phase) -> None:
    """Judge what every rank reported about its host."""
    phase.findings = examine_all(test_run.claims)
    interfaces = list(dict.fromkeys(claim.interface for claim in test_run.claims))
    phase.said = f"{test_run.member.backend} over {', '.join(interfaces[:4])}"


def same(test_run: TestRun, phase: Phase) -> None:
    """Compare what should be the same on all ranks, that of torch as soon as all have imported it. Where no exchange will follow,
    the import is not waited for."""
    if not any(one.phase is CommPhase.MESH and one.state is PhaseState.BROKEN for one in test_run.phase_log.phases):
        _know_torch(test_run)
    phase.findings = fingerprint.examine(test_run.claims)
    mine = next(claim.fingerprint for claim in test_run.claims if claim.rank == 0)
    phase.said = ", ".join(f"{name} {mine[name]}" for name in SHOWN_VERSIONS if name in mine)


def _know_torch(test_run: TestRun) -> None:
    """Wait until all ranks have imported torch. One that cannot, or has not, is told as one that did not come whole."""
    gathered = test_run.ask(CommPhase.SAME, seconds=max(test_run.left - TAIL, test_run.left / 2))
    answers = {answer.rank: answer for answer in gathered.answers}
    before = {claim.rank: claim for claim in test_run.claims}
    test_run.claims = tuple(_with_torch(claim, answers.get(claim.rank)) for claim in test_run.claims)
    zero = answers[0].torch if 0 in answers else None
    test_run.member.backend = zero.backend or test_run.member.backend if zero else test_run.member.backend
    own = [why_unable(zero, test_run.member.briefing)] if zero and zero.unable else []
    notices = {
        rank: Notice(run=test_run.me.run, rank=rank, host=before[rank].host, why=answer.torch.unable)
        for rank, answer in answers.items()
        if rank and answer.torch and answer.torch.unable
    }
    importing = [
        Importing(claim=before[rank], doing=answer.doing, seconds=answer.seconds)
        for rank, answer in sorted(answers.items())
        if not answer.torch
    ]
    there = tuple(claim for claim in test_run.claims if claim.rank not in notices)
    arrivals = Arrivals(me=test_run.me, claims=there, waited=0.0, notices=notices)
    late = () if importing or notices or own else tuple(rendezvous_checks.rank_arrives_late(arrivals))
    found = (*own, *rendezvous_checks.rank_unable(arrivals), *rank_starting(importing, test_run.me), *late)
    silent = test_run.trouble(gathered, "the import of torch") if gathered.silent else ()
    test_run.phase_log.add_to(CommPhase.RENDEZVOUS, (*found, *silent))


def not_all_ready(test_run: TestRun) -> str | None:
    """Why no exchange can begin: a rank has no torch, or is still importing it. None where all have it."""
    rules = {finding.rule for phase in test_run.phase_log.phases for finding in phase.findings}
    return None if not rules & NOT_READY and not test_run.mute else "not every rank has imported torch"


def _with_torch(claim: Claim, answer: RankAnswer | None) -> Claim:
    """The claim of a rank that has imported torch: what it has and when it came by it."""
    if answer is None or answer.torch is None or answer.torch.unable:
        return claim
    facts, gpus = answer.torch, claim.local.gpus if claim.local else ()
    return replace(
        claim,
        fingerprint={**claim.fingerprint, **facts.versions},
        backend=facts.backend,
        gpu=claim.gpu if facts.backend == "nccl" and gpus else None,
        seen=max(claim.seen, claim.seen + facts.seconds - (claim.arrived - claim.started)),
        arrived=claim.started + facts.seconds,
        delayed=facts.delayed,
    )


def count_again(test_run: TestRun) -> None:
    """Read every host's error counters once more, and put what rose into the phases that it concerns."""
    if test_run.orders == 0 or test_run.mute or test_run.left < MIN_PHASE_SECONDS:
        return
    gathered = test_run.ask(CommPhase.LOCAL, seconds=COUNTING)
    before = {claim.rank: claim.local.counters for claim in test_run.claims if claim.local and claim.local_rank == 0}
    after = {answer.rank: answer.counters for answer in gathered.answers if answer.counters}
    rose = facts.rose(before, after, test_run.hosts)
    test_run.phase_log.add_to(CommPhase.LOCAL, tuple(facts.gpu_errors_rose(rose)))
    test_run.phase_log.add_to(CommPhase.MESH, tuple(facts.link_errors_rose(rose)))
    found = {finding.rule for phase in test_run.phase_log.phases for finding in phase.findings}
    if not found & {"mesh-lossy", "mesh-mtu-hole"}:
        test_run.phase_log.add_to(CommPhase.MESH, tuple(facts.tcp_resends(rose)))


def claimed_later(test_run: TestRun) -> tuple[Finding, ...]:
    """The processes that said, after the ranks had met, that they are one of them. Where a launcher gave the job its name they are
    of this job."""
    board, known = test_run.member.board, {(claim.rank, claim.host, claim.pid) for claim in test_run.claims}
    log = board.log("claims")
    if test_run.me.run == UNNAMED or not all_there(test_run) or log.count() <= board.get(GATHERED, int):
        return ()
    later = tuple(claim for claim in _seen(log) if (claim.rank, claim.host, claim.pid) not in known)
    arrivals = Arrivals(me=test_run.me, claims=(*test_run.claims, *later), waited=0.0)
    return tuple(rendezvous_checks.rank_duplicated(arrivals))


def all_there(test_run: TestRun) -> bool:
    """Whether every rank came exactly once, with the same number of ranks as rank 0."""
    ranks = [claim.rank for claim in test_run.claims if claim.world == test_run.me.world]
    return sorted(ranks) == list(range(test_run.me.world)) and len(test_run.claims) == len(ranks)


def _seen(log: Log) -> list[Claim]:
    """New claims, with the time at which rank 0 saw them: the clocks of other hosts may be wrong."""
    return [replace(claim, seen=time.time()) for claim in log.news(Claim) if 0 <= claim.rank < claim.world <= MAX_RANKS]


def _said(claims: Sequence[Claim], world: int, hosts: tuple[str, ...]) -> str:
    here, places = {claim.rank for claim in claims}, len({claim.host for claim in claims})
    missing = tuple(rank for rank in range(world) if rank not in here)
    absent = f", {named(missing, hosts)} not" if missing else ""
    return f"{world - len(missing)} of {world} ranks are here, on {places} host{'s' * (places != 1)}{absent}"


MESH_SECONDS = 20.0
SPEED_SECONDS = {Mode.DEFAULT: 20.0, Mode.FULL: 240.0}
SPEED_SHARE, SPEED_CALLS = 0.1, 150
"""The part of the deadline, and the number of exchanges as long as those before, that the measurement of speed may take."""
ENDING = 3.5
"""Seconds that an order takes beyond its time where ranks do not answer: their last answers, and a call to each."""
IMPORTING = 120.0
"""Seconds in which DeepSpeed's layer must make progress: its import may take long from a network file system."""


def mesh(test_run: TestRun, phase: Phase) -> None:
    """Every rank tries the others over TCP."""
    if test_run.me.world == 1:
        phase.skipped = "a single rank has no peer to reach"
        return
    if _no_time(test_run, phase):
        return
    gathered = test_run.ask(CommPhase.MESH, seconds=min(MESH_SECONDS, test_run.left * 0.5))
    # of a rank that failed meanwhile only that failure is reported
    every = tuple(reach for answer in gathered.answers for reach in answer.reaches)
    fallen = tuple(reach for reach in every if {reach.source, reach.target} & set(gathered.silent))
    test_run.reaches = tuple(reach for reach in every if not {reach.source, reach.target} & set(gathered.silent))
    called = (Reach(source=0, target=rank, outcome=how) for rank, how in gathered.silent.items())
    seen = ConnectionMatrix(test_run.claims, test_run.reaches, fallen=(*fallen, *called))
    phase.findings = tuple(finding for check in mesh_checks.CHECKS for finding in check(seen))
    # who does not answer at an address that two hosts have, or rank 0 at such a one, is not known to have died
    shared = shared_addresses(seen)
    cut_off = {rank for rank in gathered.silent if {seen.by_rank[one].address for one in (0, rank)} & {*shared}}
    test_run.mute |= cut_off
    if gone := {rank: how for rank, how in gathered.silent.items() if rank not in cut_off}:
        phase.findings = test_run.trouble(replace(gathered, silent=gone), "the mesh") + phase.findings
    reached = sum(reach.outcome is ConnectOutcome.REACHED for reach in test_run.reaches)
    wanted = test_run.me.world * len(peers(0, test_run.me.world))
    phase.said = f"{reached} of {wanted} connections between ranks"
    if reached < wanted and not phase.findings:
        phase.skipped = f"not tried to the end, {phase.said}"


def right(test_run: TestRun, phase: Phase) -> None:
    """The collectives, with values."""
    if _no_time(test_run, phase):
        return
    gathered = test_run.ask(CommPhase.RIGHT, seconds=_most_of(test_run.left))
    by_rank = results(gathered)
    notable = {rank: result.exchanges for rank, result in by_rank.items()}
    phase.findings = collective_checks.examine(notable, test_run.hosts) + test_run.trouble(gathered, "the collectives")
    phase.findings += _nccl(test_run, gathered)
    who = {claim.rank: claim.process for claim in test_run.claims}
    states = {answer.rank: answer.supervisor for answer in gathered.answers}
    phase.findings += tuple(supervisor_stopped(who, states))
    test_run.tested = done = max((result.done for result in by_rank.values()), default=0)
    test_run.wrong = collective_checks.RankExchanges(exchanges=notable, hosts=test_run.hosts).senders
    wrong = sum(exchange.wrong is not None for exchanges in notable.values() for exchange in exchanges)
    phase.findings += tuple(exchanges_unfinished(done, phase.findings))
    phase.said = f"{done} exchanges on each rank, {wrong or 'none'} wrong" if done else "no rank finished"


def exchanges_unfinished(done: int, findings: tuple[Finding, ...]) -> Iterator[Finding]:
    """No rank came to the end of the collectives, and no other finding says why."""
    if not done and not has_error(findings):
        yield book.finding("exchanges-unfinished", Severity.ERROR)


def _nccl(test_run: TestRun, gathered: Responses) -> tuple[Finding, ...]:
    """What NCCL logged on all ranks."""
    if test_run.member.backend != "nccl":
        return ()
    test_run.nccl = parse_nccl_log("\n".join(answer.nccl for answer in gathered.answers))
    return nccl.examine(test_run.nccl, test_run.claims)


def speed(test_run: TestRun, phase: Phase) -> None:
    """The collectives and pairs, timed."""
    if test_run.settings.mode is Mode.QUICK:
        phase.skipped = "--quick"
    elif test_run.me.world == 1:
        phase.skipped = "a single rank has no peer to send to"
    if phase.skipped or _no_time(test_run, phase):
        return
    usual = max(SPEED_SECONDS[test_run.settings.mode], test_run.settings.deadline * SPEED_SHARE)
    seconds = max(usual, test_run.call * SPEED_CALLS)
    gathered = test_run.ask(CommPhase.SPEED, seconds=min(seconds, test_run.left * 0.7))
    ended = {rank: result.speeds for rank, result in results(gathered).items()}
    timed = (ended.get(answer.rank) or answer.speeds for answer in gathered.answers)
    test_run.timed = tuple(speeds for speeds in timed if speeds)
    test_run.speeds, test_run.pairs = (
        merge(test_run.timed),
        tuple(pair for speeds in test_run.timed for pair in speeds.pairs),
    )
    measured = speed_checks.Measured(
        speeds=test_run.speeds,
        pairs=tuple(pair for pair in test_run.pairs if not {pair.source, pair.target} & {*test_run.slow}),
        paces=tuple(speeds.pace for speeds in test_run.timed if speeds.pace),
        starts={claim.rank: claim.delayed for claim in test_run.claims},
        held=tuple(speeds.held for speeds in test_run.timed if speeds.held),
        reaches=test_run.reaches,
        # what a slow node does to the collectives is known already
        limit=None if test_run.slow else limit(test_run.claims, test_run.member.backend),
        hosts=test_run.hosts,
        backend=test_run.member.backend,
    )
    phase.findings = speed_checks.examine(measured) + test_run.trouble(gathered, "the measurement of speed")
    best = max((speed.busbw for speed in test_run.speeds if speed.op == "all_reduce"), default=0.0)
    phase.said = f"all_reduce at most {best / 1e9:.2f} GB/s (busbw); {len(test_run.speeds)} sizes and collectives timed"
    if not test_run.speeds:
        phase.said = "nothing was timed to its end"
        phase.skipped = None if phase.findings else phase.said


def deepspeed(test_run: TestRun, phase: Phase) -> None:
    """The same through deepspeed.comm."""
    if test_run.settings.mode is Mode.QUICK:
        phase.skipped = "--quick"
    elif without := tuple(claim.rank for claim in test_run.claims if "deepspeed" not in claim.fingerprint):
        phase.skipped = f"DeepSpeed is not installed on {named(without, test_run.hosts)}"
    if phase.skipped or _no_time(test_run, phase):
        return
    gathered = test_run.ask(CommPhase.DEEPSPEED, seconds=_most_of(test_run.left), patience=IMPORTING)
    by_rank = results(gathered)
    notable = {rank: result.exchanges for rank, result in by_rank.items()}
    phase.findings = collective_checks.examine(notable, test_run.hosts)
    if not phase.findings and (because := slowed(gathered, test_run.phase_log.phases)):
        phase.skipped = because
        return
    phase.findings += test_run.trouble(gathered, "DeepSpeed's own layer")
    done = max((result.done for result in by_rank.values()), default=0)
    phase.said = f"{done} exchanges on each rank through deepspeed.comm"
    if not done and not phase.findings:
        phase.skipped = "no exchange through deepspeed.comm finished"


def slowed(gathered: Responses, before: Sequence[PhaseResult]) -> str | None:
    """Why an order that only lacked time is no finding of its own: an earlier phase named what is slow. None where none did."""
    if (
        gathered.all_succeeded
        or not gathered.timed_out_in_progress
        or all(phase.state is not PhaseState.SLOW for phase in before)
    ):
        return None
    return f"the deadline left {gathered.order.seconds:.0f} s for it, too little with what is slow (see above)"


def _most_of(left: float) -> float:
    """The seconds of an order of what is left: who did not answer is waited for, called and reported within the rest.

    >>> round(_most_of(100.0)), round(_most_of(9.0), 1), round(_most_of(3.0), 1)
    (90, 5.5, 1.5)
    """
    return max(min(left * 0.9, left - ENDING), left / 2)


def _no_time(test_run: TestRun, phase: Phase) -> bool:
    """Whether there is no time left for a phase, which is then skipped: it must not count as OK."""
    if test_run.left < MIN_PHASE_SECONDS:
        phase.skipped = f"no time is left before the deadline ({test_run.settings.deadline:g} s)"
    return phase.skipped is not None


# The phases that try smaller groups of ranks: how fast nodes are together, and where exchanges break.


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
        if left < MIN_PHASE_SECONDS or phase.findings:
            return None
        gathered = _in_groups(test_run, groups, CommPhase.NODES, min(longest, left))
        phase.findings = test_run.trouble(gathered, "the test of nodes")
        if phase.findings:
            return None
        return Trial(what=what, groups=groups, failed=(), figures=_figures(groups, gathered))

    def judge(trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
        return judged(trials, backend, link.bandwidth if link else None)

    outcome = play(parts_of(test_run.claims, 1), run, judge)
    seen = NodeSpeeds(outcome=outcome, hosts=test_run.hosts, trips=round_trips(test_run.reaches))
    phase.findings += tuple(finding for check in NODE_CHECKS for finding in check(seen))
    test_run.slow = tuple(rank for part in outcome.bad for rank in part)
    phase.said = f"{len(set(test_run.hosts))} nodes in {len(outcome.trials)} rounds; pairs do {seen.usual}"
    if not outcome.trials and not phase.findings:
        phase.skipped = "no time is left for it"


def _in_groups(test_run: TestRun, groups: Groups, phase: CommPhase, seconds: float) -> Responses:
    flat = tuple(tuple(sorted(rank for part in group for rank in part)) for group in groups)
    return test_run.ask(phase, groups=flat, seconds=seconds)


def _figures(groups: Groups, gathered: Responses) -> dict[tuple[Part, ...], float]:
    """busbw of each group, by its slowest rank's best call."""
    timings = {rank: result.speeds.timings for rank, result in results(gathered).items() if result.speeds}
    found = {}
    for group in groups:
        mine = [timings[rank] for part in group for rank in part if rank in timings]
        if mine:
            small, large = max(mine, key=lambda pair: pair[1].least)
            found[group] = bandwidth(group, large.size, large.least, small.least)
    return found


def search(test_run: TestRun, phase: Phase) -> None:
    """Exchange again in smaller groups, until a single rank, host or transport is left."""
    if test_run.left < 2 * MIN_PHASE_SECONDS:
        phase.skipped = "no time is left for it"
        return

    def in_groups(what: str, groups: Groups) -> Trial | None:
        if test_run.left < MIN_PHASE_SECONDS:
            return None
        bad = _bad(_in_groups(test_run, groups, CommPhase.RIGHT, min(TRIAL_SECONDS, test_run.left - 1)))
        failed = tuple(group for group in groups if any(rank in bad for part in group for rank in part))
        return Trial(what=what, groups=groups, failed=failed)

    def with_switch(switch: Switch) -> bool | None:
        if test_run.left < MIN_PHASE_SECONDS:
            return None
        everyone = (tuple(range(test_run.me.world)),)
        seconds, variables = min(TRIAL_SECONDS, test_run.left - 1), {switch.variable: switch.value}
        return not _bad(test_run.ask(CommPhase.RIGHT, groups=everyone, variables=variables, seconds=seconds))

    found = isolate(test_run.claims, test_run.member.backend, with_switch, in_groups)
    phase.findings = tuple(finding for check in ISOLATE_CHECKS for finding in check(found))
    phase.said = found.trials_text
    if not found.switches and not found.outcome.trials:
        phase.skipped = f"{test_run.me.world} ranks cannot be distinguished in smaller groups"


def _bad(gathered: Responses) -> set[int]:
    """The ranks that did not come to the end, or got something wrong."""
    wrong = {rank for rank, result in results(gathered).items() if any(one.wrong for one in result.exchanges)}
    return wrong | set(gathered.silent) | {answer.rank for answer in gathered.answers if answer.stuck}
