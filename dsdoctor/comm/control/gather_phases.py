"""The phases in which rank 0 collects and compares: which ranks come, their hosts, whether all are the same."""

import time
from collections.abc import Sequence
from dataclasses import replace

from dsdoctor.comm.control.member import GATHERED
from dsdoctor.comm.control.messages import News
from dsdoctor.comm.control.phases import Phase
from dsdoctor.comm.control.test_run import LEAST, TestRun
from dsdoctor.comm.local import counters, fingerprint
from dsdoctor.comm.local.checks import examine_all
from dsdoctor.comm.models import Claim, CommPhase
from dsdoctor.comm.rank_names import named
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.board import Log
from dsdoctor.comm.rendezvous.checks import Arrivals
from dsdoctor.comm.rendezvous.names import addresses_of

ARRIVAL, LONGEST_ARRIVAL = 0.6, 90.0
"""The part of the deadline in which ranks must come, and the most seconds for that."""
COUNTING = 6.0
"""Seconds for another reading of the counters."""
DUPLICATES = 0.15
"""Seconds to wait for a second claim of a rank that came already: duplicates are started at the same time."""
MOST_RANKS = 1_000_000
"""A claim of a larger world is no claim of a rank."""
SHOWN = ("torch", "cuda", "nccl", "deepspeed", "python")


def rendezvous(test_run: TestRun, phase: Phase) -> None:
    """Wait for the claims of all ranks. The phase counts from the start of this rank."""
    phase.began = test_run.began
    log, claims = test_run.member.board.log("claims"), list[Claim]()
    until = min(test_run.end, test_run.began + min(test_run.settings.deadline * ARRIVAL, LONGEST_ARRIVAL))
    while not _settled(claims, test_run.me.world) and time.monotonic() < until:
        absent = {claim.rank for claim in claims} | test_run.notices.heard.keys()
        if len(absent) >= test_run.me.world:
            break
        came = len(claims)
        claims += _seen(log)
        if len(claims) != came:
            test_run.claims = tuple(claims)
            test_run.member.say(News(at=_said(claims, test_run.me.world, test_run.me.hosts)))
        time.sleep(test_run.member.pace)
    time.sleep(DUPLICATES)
    test_run.claims = (*claims, *_seen(log))
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
    phase.said = (
        f"{_said(test_run.claims, test_run.me.world, test_run.me.hosts)}, {max(times) - min(times):.1f} s apart"
    )


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
    """Compare what should be the same on all ranks."""
    phase.findings = fingerprint.examine(test_run.claims)
    mine = test_run.member.claim.fingerprint
    phase.said = ", ".join(f"{name} {mine[name]}" for name in SHOWN if name in mine)


def count_again(test_run: TestRun) -> None:
    """Read every host's error counters once more, and put what rose into the phases that it concerns."""
    if test_run.orders == 0 or test_run.mute or test_run.left < LEAST:
        return
    gathered = test_run.ask(CommPhase.LOCAL, seconds=COUNTING)
    before = {claim.rank: claim.local.counters for claim in test_run.claims if claim.local and claim.local_rank == 0}
    after = {answer.rank: answer.counters for answer in gathered.answers if answer.counters}
    rose = counters.rose(before, after, test_run.hosts)
    test_run.phase_log.add_to(CommPhase.LOCAL, tuple(counters.gpu_errors_rose(rose)))
    test_run.phase_log.add_to(CommPhase.MESH, tuple(counters.link_errors_rose(rose)))
    found = {finding.rule for phase in test_run.phase_log.phases for finding in phase.findings}
    if not found & {"mesh-lossy", "mesh-mtu-hole"}:
        test_run.phase_log.add_to(CommPhase.MESH, tuple(counters.tcp_resends(rose)))


def all_there(test_run: TestRun) -> bool:
    """Whether every rank came exactly once, with the same number of ranks as rank 0."""
    ranks = [claim.rank for claim in test_run.claims if claim.world == test_run.me.world]
    return sorted(ranks) == list(range(test_run.me.world)) and len(test_run.claims) == len(ranks)


def _seen(log: Log) -> list[Claim]:
    """New claims, with the time at which rank 0 saw them: the clocks of other hosts may be wrong."""
    return [
        replace(claim, seen=time.time()) for claim in log.news(Claim) if 0 <= claim.rank < claim.world <= MOST_RANKS
    ]


def _settled(claims: Sequence[Claim], world: int) -> bool:
    """Whether there is nothing more to wait for: all came, or a claim is a duplicate or of another number of ranks."""
    if any(claim.world != world for claim in claims) or len({claim.rank for claim in claims}) < len(claims):
        return True
    return len(claims) >= world


def _said(claims: Sequence[Claim], world: int, hosts: tuple[str, ...]) -> str:
    here, places = {claim.rank for claim in claims}, len({claim.host for claim in claims})
    missing = tuple(rank for rank in range(world) if rank not in here)
    absent = f", {named(missing, hosts)} not" if missing else ""
    return f"{world - len(missing)} of {world} ranks are here, on {places} host{'s' * (places != 1)}{absent}"
