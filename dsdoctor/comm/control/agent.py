"""The control process of a rank: joins the board, leads or follows, while another process imports torch.

Reports to its supervisor over a pipe."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from dsdoctor.comm.control import phases
from dsdoctor.comm.control.data_process import ForkServer
from dsdoctor.comm.control.member import Member, why_unable
from dsdoctor.comm.control.messages import Phase, PhaseLog, StartInfo, Update
from dsdoctor.comm.control.test_state import TestRun, release
from dsdoctor.comm.local import fingerprint
from dsdoctor.comm.local.checks import blamed, is_tiny
from dsdoctor.comm.local.interfaces import limit
from dsdoctor.comm.models import CommPhase, PhaseState, Rank
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import Absent, addresses_of
from dsdoctor.comm.rendezvous.notices import AFTER_NOTICE, Notice, Notices, send_notice
from dsdoctor.comm.rendezvous.store import MessageBoard, Served, StoreUnreachable, open_board
from dsdoctor.comm.rendezvous.tcp_store import StoreClient
from dsdoctor.comm.results import ConnectOutcome, Report, ended, verdict
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.processes import redirect
from dsdoctor.rules import book

# Rank 0 leads the test: runs the phases in order, and makes the Report.


Act = Callable[[TestRun, Phase], None]
BEGINNINGS: tuple[tuple[CommPhase, Act], ...] = (
    (CommPhase.RENDEZVOUS, phases.rendezvous),
    (CommPhase.LOCAL, phases.local),
)
EXCHANGES: tuple[tuple[CommPhase, Act], ...] = (
    (CommPhase.MESH, phases.mesh),
    (CommPhase.SAME, phases.same),
    (CommPhase.RIGHT, phases.right),
    (CommPhase.NODES, phases.nodes),
    (CommPhase.SPEED, phases.speed),
    (CommPhase.DEEPSPEED, phases.deepspeed),
)
"""In this order, the mesh while torch is imported; after a broken phase the later ones are skipped."""
REPORTED_FIRST = {CommPhase.RENDEZVOUS: 0, CommPhase.LOCAL: 1, CommPhase.SAME: 2, CommPhase.MESH: 3}
"""The place of a phase in the report, whichever ran first; that of the others is behind these, as they ran."""
STATUS = {PhaseState.OK: 0, PhaseState.SKIPPED: 0, PhaseState.SLOW: 6, PhaseState.BROKEN: 1}


def lead(test_run: TestRun) -> Report:
    """Go through the phases."""
    for phase, act in BEGINNINGS:
        _write(test_run, phase, act)
    reason = None if phases.all_there(test_run) else "not every rank is present exactly once"
    if reason is None:
        test_run.member.say(Update(found=fingerprint.examine(test_run.claims)))
    for phase, act in EXCHANGES:
        if phase is CommPhase.NODES and not phases.enough_nodes(test_run):
            continue
        if phase is CommPhase.SAME:
            if phases.all_there(test_run):
                _write(test_run, phase, act)
                reason = reason or phases.not_all_ready(test_run)
        elif reason:
            test_run.phase_log.skip(phase, reason)
        elif _write(test_run, phase, act) is PhaseState.BROKEN:
            reason = f"broken before: {phase.value}"
            if phase is CommPhase.RIGHT and _unnamed(test_run):
                _write(test_run, CommPhase.ISOLATE, phases.search)
    phases.count_again(test_run)
    test_run.phase_log.add_to(CommPhase.RENDEZVOUS, phases.claimed_later(test_run))
    test_run.phase_log.add_to(CommPhase.RIGHT, _untested(test_run))
    if test_run.phase_log.broken and any(
        claim.local and is_tiny(claim.local, claim.world, claim.backend) for claim in test_run.claims
    ):
        test_run.phase_log.change(CommPhase.LOCAL, blamed)
    return report(test_run)


def _untested(test_run: TestRun) -> tuple[Finding, ...]:
    """That the deadline came before the collectives could be tested: then nothing is known of them."""
    so_far = test_run.phase_log.phases
    tried = any(phase.phase is CommPhase.RIGHT and phase.state is not PhaseState.SKIPPED for phase in so_far)
    if tried or test_run.phase_log.broken:
        return ()
    spent = [f"{phase.phase.value}: {phase.seconds:.1f} s" for phase in so_far if phase.seconds > 0.5]
    deadline = f"{test_run.settings.deadline:g}"
    return (book.finding("time-used-up", Severity.ERROR, case="untested", evidence=spent, seconds=deadline),)


def report(test_run: TestRun) -> Report:
    """The report of everything known so far."""
    backend = test_run.member.backend
    results = tuple(sorted(test_run.phase_log.phases, key=lambda result: REPORTED_FIRST.get(result.phase, 4)))
    return Report(
        world=test_run.me.world,
        backend=backend,
        launcher=test_run.me.launcher,
        mode=test_run.settings.mode,
        verdict=verdict(results, world=test_run.me.world, hosts=test_run.hosts, backend=backend),
        state=ended(results),
        seconds=time.monotonic() - test_run.began,
        phases=results,
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
        versions=next(
            (claim.fingerprint for claim in test_run.claims if claim.rank == 0), test_run.member.claim.fingerprint
        ),
        out=test_run.settings.out or (test_run.member.briefing.folder if ended(results) is PhaseState.BROKEN else None),
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


REACHING = "reaching the store of rank 0"
MARGIN = 0.6
"""Seconds by which the other ranks wait longer than rank 0: else they would leave just before its order comes."""
RESERVE = 1.0
"""Seconds of the deadline that are kept for the end: final answers and the report."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_SHOW_CPP_STACKTRACES": "0"}


def control(briefing: StartInfo, pipe: BinaryIO, shown: Callable[[], None], served: Served | None = None) -> None:
    """Run a control process from start to end; ``shown`` returns when the supervisor has shown the report. ``served``: the store of
    rank 0, for which the supervisor answers."""
    folder = Path(briefing.folder)
    os.umask(0o077)
    try:
        redirect(folder / f"rank-{briefing.rank.rank:05d}.log")
    except OSError:
        redirect(Path(os.devnull))
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})

    told = ""

    def say(news: Update) -> None:
        nonlocal told
        if news == Update(at=told):
            return
        told = news.at or told
        pipe.write(msgspec.json.encode(news) + b"\n")
        pipe.flush()

    say(Update(at=REACHING))
    fork_server = ForkServer(briefing.settings.backend, gpus=bool(briefing.local.gpus))
    board = open_board(briefing.rank, _arrival(briefing), served)
    if isinstance(board, StoreUnreachable):
        say(Update(alone=_alone(briefing, board)))
        return
    member = Member(briefing, board, fork_server, say)
    if not _arrived(member, briefing):
        return
    if board.ours:
        _lead(member, briefing, _notices(briefing.rank, board, served), shown)
    else:
        _follow(member, briefing, fork_server)


def _notices(rank: Rank, board: MessageBoard, served: Served | None) -> Notices:
    """What rank 0 hears of ranks that cannot come: in the store of the board, and where that is torchrun's in its own beside it."""
    stores = [cast(StoreClient, board.store)]
    if rank.agent_store and served and served.beside:
        with suppress(OSError):
            stores.append(StoreClient(*served.beside))
    return Notices(rank, stores)


def _arrived(member: Member, briefing: StartInfo) -> bool:
    """Whether the claim is written; a store that went meanwhile is this rank's finding."""
    try:
        member.arrive()
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        gone = StoreUnreachable(outcome=ConnectOutcome.CUT_OFF, seconds=time.monotonic() - briefing.began, ended=True)
        member.say(Update(alone=_alone(briefing, gone)))
        return False
    return True


def _alone(briefing: StartInfo, why: StoreUnreachable) -> tuple[Finding, ...]:
    """What a rank finds that did not reach the board. A rank 0 with another port hears it: it would wait."""
    rank, local = briefing.rank, briefing.local
    resolved = addresses_of(rank.master)
    absent = Absent(
        me=rank,
        host=local.hostname,
        why=why,
        addresses=tuple(interface.address for interface in local.interfaces if interface.kind != "loopback"),
        resolved=resolved,
    )
    found = tuple(finding for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent))
    if absent.case == "port differs" and why.rank_zero:
        (why_not,) = rendezvous_checks.master_port_differs(replace(absent, named=False))
        notice = Notice(run=rank.run, rank=rank.rank, host=local.hostname, why=why_not.title, port=rank.port)
        send_notice(rank.master, why.rank_zero.port, notice, seconds=AFTER_NOTICE, stay=AFTER_NOTICE)
    return found


def _follow(member: Member, briefing: StartInfo, fork_server: ForkServer) -> None:
    member.say(Update(at="waiting for rank 0's first order"))
    until = briefing.began + briefing.settings.deadline + MARGIN
    try:
        if holders := member.replaced_processes(until):
            held = StoreUnreachable(
                outcome=ConnectOutcome.STRANGER, seconds=time.monotonic() - briefing.began, holders=holders
            )
            member.say(Update(alone=_alone(briefing, held)))
            return
        status = member.follow(until)
    except (OSError, msgspec.MsgspecError) as error:
        # the store of rank 0 has gone
        print(f"{type(error).__name__}: {error}", flush=True)
        status = None
        if briefing.rank.rank == 0:
            # it was that of another rank 0, which had the port
            gone = StoreUnreachable(
                outcome=ConnectOutcome.CUT_OFF, seconds=time.monotonic() - briefing.began, ended=True
            )
            member.say(Update(alone=_alone(briefing, gone)))
            return
    if (facts := fork_server.facts) and facts.unable:
        member.say(Update(alone=(why_unable(facts, briefing),)))
        return
    member.say(Update(end=status, verdict=member.verdict, lost=status is None))


def _lead(member: Member, briefing: StartInfo, notices: Notices, shown: Callable[[], None]) -> None:
    test_run = TestRun(
        member=member,
        notices=notices,
        phase_log=PhaseLog(member.say),
        began=briefing.began,
        end=briefing.began + briefing.settings.deadline - RESERVE,
    )
    report = lead(test_run)
    member.say(Update(report=report))
    shown()
    release(member, STATUS[report.state], test_run.orders + 1, mute=len(test_run.mute), verdict=report.verdict)


def _arrival(briefing: StartInfo) -> float:
    """Seconds in which the board must be reached, counted from the start of the rank."""
    whole = min(briefing.settings.deadline * phases.ARRIVAL, phases.MAX_ARRIVAL_SECONDS)
    return max(whole - (time.monotonic() - briefing.began), 1.0)
