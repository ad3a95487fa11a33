"""The phases in which all ranks act at once: the mesh, the collectives, their speed, DeepSpeed's layer, and the search by parts."""

import math
from collections.abc import Iterator

from dsdoctor.comm.collectives import isolate, nccl_checks, result_checks
from dsdoctor.comm.collectives.deepspeed import compiles_first
from dsdoctor.comm.collectives.nccl_log import parse_nccl_log
from dsdoctor.comm.collectives.stuck_checks import supervisor_stopped
from dsdoctor.comm.control.messages import Kind, Task
from dsdoctor.comm.control.orders import Gathered
from dsdoctor.comm.control.phases import Page
from dsdoctor.comm.control.test_run import LEAST, Course, results
from dsdoctor.comm.local import memory
from dsdoctor.comm.local.link_limits import limit
from dsdoctor.comm.mesh import checks as mesh_checks
from dsdoctor.comm.mesh.matrix import Mesh
from dsdoctor.comm.mesh.mesh import peers
from dsdoctor.comm.models import Mode, Phase, State
from dsdoctor.comm.results import Outcome
from dsdoctor.comm.speed import speed_checks
from dsdoctor.comm.speed.bandwidth import merge
from dsdoctor.comm.words import named
from dsdoctor.core.finding import Finding, Fix, Severity

MESH_SECONDS = 20.0
SPEED_SECONDS = {Mode.DEFAULT: 20.0, Mode.FULL: 240.0}
TRIAL_SECONDS = 6.0


def mesh(course: Course, page: Page) -> None:
    """Every rank tries the others over TCP."""
    if course.me.world == 1:
        page.skipped = "one rank has nobody to reach"
        return
    if _no_time(course, page):
        return
    gathered = course.ask(Kind.MESH, seconds=min(MESH_SECONDS, course.left * 0.5))
    # of a rank that fell out meanwhile nothing can be said but that
    course.reaches = tuple(
        reach
        for answer in gathered.answers
        for reach in answer.reaches
        if not {reach.source, reach.target} & set(gathered.silent)
    )
    seen = Mesh(course.claims, course.reaches)
    page.findings = course.trouble(gathered, "the mesh") if gathered.silent else ()
    page.findings += tuple(finding for check in mesh_checks.CHECKS for finding in check(seen))
    reached = sum(reach.outcome is Outcome.REACHED for reach in course.reaches)
    page.said = f"{reached} of {course.me.world * len(peers(0, course.me.world))} connections between ranks"


def right(course: Course, page: Page) -> None:
    """The collectives, with values."""
    if _no_time(course, page):
        return
    gathered = course.ask(Kind.RUN, task=Task.RIGHT, seconds=course.left * 0.9)
    brought = results(gathered)
    notable = {rank: result.exchanges for rank, result in brought.items()}
    page.findings = result_checks.examine(notable, course.hosts) + course.trouble(gathered, "the collectives")
    tries = {rank: result.memory for rank, result in brought.items() if result.memory}
    page.findings += memory.examine(tries, course.hosts) + _nccl(course, gathered)
    who = {claim.rank: f"rank {claim.rank} ({claim.host}, pid {claim.pid})" for claim in course.claims}
    states = {answer.rank: answer.supervisor for answer in gathered.answers}
    page.findings += tuple(supervisor_stopped(who, states))
    done = max((result.done for result in brought.values()), default=0)
    course.wrong = result_checks.Brought(exchanges=notable, hosts=course.hosts).culprits
    wrong = sum(one.wrong is not None for exchanges in notable.values() for one in exchanges)
    page.said = f"{done} exchanges on each rank, {wrong or 'none'} wrong" if done else "not one rank came to the end"


def _nccl(course: Course, gathered: Gathered) -> tuple[Finding, ...]:
    """What NCCL said of itself on all ranks."""
    if course.member.backend != "nccl":
        return ()
    course.nccl = parse_nccl_log("\n".join(answer.nccl for answer in gathered.answers))
    return nccl_checks.examine(course.nccl, course.claims)


def speed(course: Course, page: Page) -> None:
    """The collectives and pairs, timed."""
    if course.settings.mode is Mode.QUICK:
        page.skipped = "--quick"
    elif course.me.world == 1:
        page.skipped = "one rank has nobody to send to"
    if page.skipped or _no_time(course, page):
        return
    gathered = course.ask(
        Kind.RUN, task=Task.SPEED, seconds=min(SPEED_SECONDS[course.settings.mode], course.left * 0.7)
    )
    course.timed = tuple(result.speeds for result in results(gathered).values() if result.speeds)
    course.speeds, course.pairs = merge(course.timed), tuple(pair for one in course.timed for pair in one.pairs)
    page.findings = speed_checks.examine(
        speeds=course.speeds,
        pairs=course.pairs,
        paces=tuple(one.pace for one in course.timed if one.pace),
        limit=limit(course.claims, course.member.backend),
        hosts=course.hosts,
        backend=course.member.backend,
    ) + course.trouble(gathered, "the measurement of speed")
    best = max((one.busbw for one in course.speeds if one.op == "all_reduce"), default=0.0)
    page.said = f"all_reduce at most {best / 1e9:.2f} GB/s (busbw); {len(course.speeds)} sizes and collectives timed"
    if not course.speeds:
        page.said = "nothing was timed to its end"


def deepspeed(course: Course, page: Page) -> None:
    """The same through deepspeed.comm, which may compile at its first use."""
    if course.settings.mode is Mode.QUICK:
        page.skipped = "--quick"
    elif without := tuple(claim.rank for claim in course.claims if "deepspeed" not in claim.fingerprint):
        page.skipped = f"DeepSpeed is not installed on {named(without, course.hosts)}"
    else:
        page.skipped = compiles_first() if course.settings.mode is not Mode.FULL else None
    if page.skipped or _no_time(course, page):
        return
    gathered = course.ask(Kind.RUN, task=Task.DEEPSPEED, seconds=course.left * 0.9, patience=math.inf)
    brought = results(gathered)
    notable = {rank: result.exchanges for rank, result in brought.items()}
    page.findings = result_checks.examine(notable, course.hosts) + course.trouble(gathered, "DeepSpeed's own layer")
    done = max((result.done for result in brought.values()), default=0)
    page.said = f"{done} exchanges on each rank through deepspeed.comm"


def search(course: Course, page: Page) -> None:
    """Exchange again by parts, until one rank, host or transport is left."""
    if course.left < 2 * LEAST:
        page.skipped = "no time is left for it"
        return

    def run(what: str, groups: isolate.Groups, switch: isolate.Switch | None) -> isolate.Trial | None:
        if course.left < LEAST:
            return None
        groups = groups or (tuple(range(course.me.world)),)
        variables = {switch.variable: switch.value} if switch else {}
        seconds = min(TRIAL_SECONDS, course.left - 1)
        gathered = course.ask(Kind.RUN, task=Task.RIGHT, groups=groups, variables=variables, seconds=seconds)
        bad = set(gathered.silent) | {answer.rank for answer in gathered.answers if answer.stuck}
        brought = results(gathered)
        bad |= {rank for rank, result in brought.items() if any(one.wrong for one in result.exchanges)}
        failed = tuple(group for group in groups if bad & set(group))
        return isolate.Trial(what=what, groups=groups, failed=failed, switch=switch)

    trials = isolate.isolate(course.claims, course.member.backend, run)
    page.findings = tuple(finding for check in isolate.CHECKS for finding in check(trials, course.claims))
    page.said = f"{len(trials)} trials by parts"
    if not trials:
        page.skipped = f"{course.me.world} ranks of one kind cannot be told apart by parts"


def _no_time(course: Course, page: Page) -> bool:
    """Whether a phase is left out for want of time. Where that leaves the question open, it is no answer, and no "OK"."""
    if course.left < LEAST:
        page.skipped = f"no time is left of the deadline ({course.settings.deadline:g} s)"
    return page.skipped is not None


def deadline_too_short(course: Course) -> Iterator[Finding]:
    """The deadline came before the ranks could be tested.

    Importing torch and meeting took the time, so nothing is known of the collectives. Give more seconds."""
    if any(phase.phase is Phase.RIGHT and phase.state is not State.SKIPPED for phase in course.book.phases):
        return
    if not course.book.broken:
        yield Finding(
            rule="deadline-too-short",
            severity=Severity.ERROR,
            title=f"the deadline of {course.settings.deadline:g} s came before the collectives were tested",
            evidence=tuple(
                f"{phase.phase.value}: {phase.seconds:.1f} s" for phase in course.book.phases if phase.seconds > 0.5
            ),
            fix=Fix(text="give it more time", commands=("python -m dsdoctor comm --quick --deadline 60",)),
        )
