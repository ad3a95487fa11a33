"""The phases in which all ranks act together: the mesh, the collectives, their speed, DeepSpeed's layer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsdoctor.comm.collectives import nccl_checks, result_checks
from dsdoctor.comm.collectives.nccl_log import parse_nccl_log
from dsdoctor.comm.collectives.stuck_checks import supervisor_stopped
from dsdoctor.comm.control.orders import Gathered
from dsdoctor.comm.control.phases import Phase
from dsdoctor.comm.control.test_run import LEAST, TestRun, results
from dsdoctor.comm.local.link_limits import limit
from dsdoctor.comm.mesh import checks as mesh_checks
from dsdoctor.comm.mesh.matrix import Mesh
from dsdoctor.comm.mesh.mesh import peers
from dsdoctor.comm.mesh.one_address import shared_addresses
from dsdoctor.comm.models import CommPhase, Mode, PhaseState
from dsdoctor.comm.rank_names import named
from dsdoctor.comm.results import ConnectOutcome, PhaseResult, Reach
from dsdoctor.comm.speed import speed_checks
from dsdoctor.comm.speed.bandwidth import merge
from dsdoctor.core.finding import Finding, has_error, step

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
        phase.skipped = "a single rank has no other to reach"
        return
    if _no_time(test_run, phase):
        return
    gathered = test_run.ask(CommPhase.MESH, seconds=min(MESH_SECONDS, test_run.left * 0.5))
    # of a rank that failed meanwhile only that failure is reported
    every = tuple(reach for answer in gathered.answers for reach in answer.reaches)
    fallen = tuple(reach for reach in every if {reach.source, reach.target} & set(gathered.silent))
    test_run.reaches = tuple(reach for reach in every if not {reach.source, reach.target} & set(gathered.silent))
    called = (Reach(source=0, target=rank, outcome=how) for rank, how in gathered.silent.items())
    seen = Mesh(test_run.claims, test_run.reaches, fallen=(*fallen, *called))
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
    phase.findings = result_checks.examine(notable, test_run.hosts) + test_run.trouble(gathered, "the collectives")
    phase.findings += _nccl(test_run, gathered)
    who = {claim.rank: f"rank {claim.rank} ({claim.host}, pid {claim.pid})" for claim in test_run.claims}
    states = {answer.rank: answer.supervisor for answer in gathered.answers}
    phase.findings += tuple(supervisor_stopped(who, states))
    test_run.tested = done = max((result.done for result in by_rank.values()), default=0)
    test_run.wrong = result_checks.RankExchanges(exchanges=notable, hosts=test_run.hosts).senders
    wrong = sum(exchange.wrong is not None for exchanges in notable.values() for exchange in exchanges)
    phase.findings += tuple(exchanges_unfinished(done, phase.findings))
    phase.said = f"{done} exchanges on each rank, {wrong or 'none'} wrong" if done else "no rank came to the end"


def exchanges_unfinished(done: int, findings: tuple[Finding, ...]) -> Iterator[Finding]:
    """No rank came to the end of the collectives, and no other finding says why.

    Why it matters: that is no test that went well. What was exchanged before is not known.

    How to fix it: keep each rank's log and stacks, and look at them.

        $ python -m dsdoctor comm --quick --out comm-out

    Since: 0.1
    """
    if not done and not has_error(findings):
        yield Finding.error(
            "exchanges-unfinished",
            "no rank came to the end of the collectives, and nothing that was seen says why",
            fix="keep each rank's log and stacks, and look at them",
            steps=(step("python -m dsdoctor comm --quick --out comm-out"),),
        )


def _nccl(test_run: TestRun, gathered: Gathered) -> tuple[Finding, ...]:
    """What NCCL logged on all ranks."""
    if test_run.member.backend != "nccl":
        return ()
    test_run.nccl = parse_nccl_log("\n".join(answer.nccl for answer in gathered.answers))
    return nccl_checks.examine(test_run.nccl, test_run.claims)


def speed(test_run: TestRun, phase: Phase) -> None:
    """The collectives and pairs, timed."""
    if test_run.settings.mode is Mode.QUICK:
        phase.skipped = "--quick"
    elif test_run.me.world == 1:
        phase.skipped = "a single rank has no other to send to"
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
    phase.findings = result_checks.examine(notable, test_run.hosts)
    if not phase.findings and (because := slowed(gathered, test_run.phase_log.phases)):
        phase.skipped = because
        return
    phase.findings += test_run.trouble(gathered, "DeepSpeed's own layer")
    done = max((result.done for result in by_rank.values()), default=0)
    phase.said = f"{done} exchanges on each rank through deepspeed.comm"
    if not done and not phase.findings:
        phase.skipped = "no exchange through deepspeed.comm came to its end"


def slowed(gathered: Gathered, before: Sequence[PhaseResult]) -> str | None:
    """Why an order that only lacked time is no finding of its own: an earlier phase named what is slow. None where none did."""
    if gathered.well or not gathered.moving or all(phase.state is not PhaseState.SLOW for phase in before):
        return None
    return f"the deadline left {gathered.order.seconds:.0f} s for it, too little with what is slow (told above)"


def _most_of(left: float) -> float:
    """The seconds of an order of what is left: who did not answer is waited for, called and reported within the rest.

    >>> round(_most_of(100.0)), round(_most_of(9.0), 1), round(_most_of(3.0), 1)
    (90, 5.5, 1.5)
    """
    return max(min(left * 0.9, left - ENDING), left / 2)


def _no_time(test_run: TestRun, phase: Phase) -> bool:
    """Whether there is no time left for a phase, which is then skipped: it must not count as OK."""
    if test_run.left < LEAST:
        phase.skipped = f"no time is left of the deadline ({test_run.settings.deadline:g} s)"
    return phase.skipped is not None
