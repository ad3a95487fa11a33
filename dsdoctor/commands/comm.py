"""The command comm: one rank under a launcher, or all ranks of this machine or of a hostfile -> a Report."""

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from dsdoctor.comm.control.phases import state_of
from dsdoctor.comm.control.supervisor import Outcomes, Screen, supervise
from dsdoctor.comm.launch.commands import here, host_orders
from dsdoctor.comm.launch.start import PARENT, RankEnded, RankTold, free_port, start_here
from dsdoctor.comm.launch.start_on_hosts import start_on_hosts
from dsdoctor.comm.local.gpu_links import read_gpus
from dsdoctor.comm.models import CommPhase, CommSettings, Mode, PhaseState, Rank
from dsdoctor.comm.preflight import checks as preflight_checks
from dsdoctor.comm.preflight.facts import PreflightFacts, look_forwarded, look_preflight
from dsdoctor.comm.report_document import read_own_report, read_remote_report
from dsdoctor.comm.results import PhaseResult, Report
from dsdoctor.comm.speed.baseline import Base, slower
from dsdoctor.comm.verdict import ended, verdict
from dsdoctor.core.errors import DoctorError, NotWritten, UsageError
from dsdoctor.core.files import make_folder
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import die_with

OnPhase = Callable[[PhaseResult], None]
MARGIN = 2.0
"""Seconds after the deadline at which the ranks are ended, if they have not ended by themselves."""
RANKS_ON_CPU = 2
NOTHING_TOLD = "see what it wrote above, and whether the folder for its files (--out, else TMPDIR) has space"


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """The request of the command line where no launcher started this process."""

    settings: CommSettings
    nproc: int | None = None
    hostfile: str | None = None
    only_static: bool = False


def run_rank(rank: Rank, settings: CommSettings, screen: Screen, *, began: float) -> Outcomes:
    """Run this process as a rank."""
    parent = os.environ.get(PARENT)
    if parent:
        die_with(int(parent))
    return supervise(rank, settings, screen, began=began)


def run_all(request: CommRequest, *, on_phase: OnPhase) -> Report:
    """Check the hosts first, then start every rank and return rank 0's report."""
    began, host = time.monotonic(), LocalHost()
    with kept_when_broken(request.settings) as (folder, outcome):
        before: tuple[PhaseResult, ...] = ()
        if request.hostfile is not None:
            facts = look_preflight(
                host,
                hostfile=request.hostfile,
                python=sys.executable,
                folder=os.getcwd(),  # noqa: PTH109
                accelerator="cuda" if read_gpus(host)[0] else "cpu",
            )
            if facts.hosts is None:
                raise UsageError(
                    f"--hostfile is {request.hostfile}, and that file cannot be read",
                    hint="name the hostfile: a line for each host, such as: node1 slots=8",
                )
            before = (_preflight(facts, time.monotonic() - began),)
            on_phase(before[0])
            if request.only_static or before[0].state is PhaseState.BROKEN:
                return _without_ranks(before, request, facts, time.monotonic() - began)
            told, read = _on_hosts(host, facts, request, folder), read_remote_report
        else:
            told, read = _here(host, request, folder), read_own_report
        report = read(told.document)
        if report is None:
            raise DoctorError(*_no_report(told.ended, request.settings.deadline), hint=NOTHING_TOLD)
        keep = report.state is PhaseState.BROKEN or request.settings.out is not None
        outcome.append(keep)
        return _joined(replace(report, out=str(folder) if keep else None), before)


@contextmanager
def kept_when_broken(settings: CommSettings) -> Iterator[tuple[Path, list[bool]]]:
    """The folder of the ranks' files: the one that was named; else a private one, that is kept when True is added to the list."""
    folder, outcome = Path(settings.out or tempfile.mkdtemp(prefix="dsdoctor-comm-")), list[bool]()
    make_folder(folder, mode=0o700)
    lock = FileLock(folder / ".lock", mode=0o600, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(f"another test writes to {folder} now", hint="name another folder with --out") from None
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, lock.lock_file) from error
    try:
        yield folder, outcome
    finally:
        lock.release()
        if settings.out is None and not any(outcome):
            shutil.rmtree(folder, ignore_errors=True)


def _here(host: LocalHost, request: CommRequest, folder: Path) -> RankTold:
    """A rank for each GPU of this machine, or as many as were asked for."""
    order = here(
        request.nproc or len(read_gpus(host)[0]) or RANKS_ON_CPU,
        port=free_port(),
        token=secrets.token_hex(16),
        seconds=request.settings.deadline + MARGIN,
        arguments=_arguments(request.settings, folder),
    )
    return start_here(order, host.environment(), folder)


def _on_hosts(host: LocalHost, facts: PreflightFacts, request: CommRequest, folder: Path) -> RankTold:
    assert facts.hosts is not None
    hosts = facts.hosts.hosts
    if request.nproc:
        hosts = tuple(replace(entry, slots=request.nproc) for entry in hosts)
    first = next((visit for visit in facts.visits if visit.host == hosts[0].name), None)
    seconds = request.settings.deadline + MARGIN
    orders = host_orders(
        hosts,
        master=next(iter(first.addresses), hosts[0].name) if first else hosts[0].name,
        port=free_port(),
        token=secrets.token_hex(16),
        seconds=seconds,
        arguments=_arguments(request.settings, folder if request.settings.out else None),
    )
    return start_on_hosts(
        orders,
        python=sys.executable,
        folder=facts.folder,
        variables=look_forwarded(host, facts.folder),
        seconds=seconds,
    )


def _arguments(settings: CommSettings, out: Path | None) -> tuple[str, ...]:
    mode = {Mode.QUICK: ("--quick",), Mode.FULL: ("--full",), Mode.DEFAULT: ()}[settings.mode]
    folder = ("--out", str(out.absolute())) if out else ()
    return ("--json", *mode, "--backend", settings.backend, "--deadline", f"{settings.deadline:g}", *folder)


def _preflight(facts: PreflightFacts, seconds: float) -> PhaseResult:
    findings = tuple(finding for check in preflight_checks.CHECKS for finding in check(facts))
    hosts = facts.hosts.hosts if facts.hosts else ()
    answered = sum(visit.answered for visit in facts.visits)
    said = f"{len(hosts)} hosts in {facts.hostfile}, {answered} answer to ssh"
    return PhaseResult(
        phase=CommPhase.STATIC,
        state=state_of(CommPhase.STATIC, findings),
        seconds=seconds,
        said=said,
        findings=findings,
    )


def _without_ranks(
    phases: tuple[PhaseResult, ...], request: CommRequest, facts: PreflightFacts, seconds: float
) -> Report:
    """The report where no rank is started: the hosts are not in order, or only they were to be checked."""
    hosts = tuple(entry.name for entry in facts.hosts.hosts for _ in range(entry.slots)) if facts.hosts else ()
    if phases[0].state is PhaseState.BROKEN:
        phases += (
            PhaseResult(
                phase=CommPhase.RENDEZVOUS, state=PhaseState.SKIPPED, seconds=0.0, said="the hosts are not in order"
            ),
        )
    return Report(
        world=len(hosts),
        backend=request.settings.backend,
        launcher="dsdoctor",
        mode=request.settings.mode,
        verdict=verdict(phases, world=len(hosts), hosts=hosts, backend=request.settings.backend),
        state=ended(phases),
        seconds=seconds,
        phases=phases,
        hosts=hosts,
        out=request.settings.out,
    )


def _no_report(gone: tuple[RankEnded, ...], deadline: float) -> tuple[str]:
    first = next((rank for rank in gone if rank.rank == 0), None)
    how = f"had not ended {MARGIN:g} s after its deadline of {deadline:g} s"
    if first is not None:
        how = first.how or "ended with status 0, and wrote no document"
    return (f"rank 0 wrote no report: it {how}",)


def _joined(report: Report, before: tuple[PhaseResult, ...]) -> Report:
    """The report with the phases that came before any rank."""
    if not before:
        return report
    phases = before + report.phases
    told = verdict(phases, world=report.world, hosts=report.hosts, backend=report.backend)
    return replace(report, phases=phases, verdict=told, state=ended(phases))


def unmet(outcome: Outcomes, rank: Rank, settings: CommSettings, seconds: float) -> Report:
    """The report of a rank that got no verdict from rank 0: what it found by itself, in the phase it was in."""
    known = next((phase for phase in CommPhase if phase.value == outcome.at), CommPhase.RENDEZVOUS)
    last = PhaseResult(phase=known, state=PhaseState.BROKEN, seconds=seconds, said="alone", findings=outcome.alone)
    whole = (*outcome.phases, last) if rank.rank == 0 else (last,)
    return Report(
        world=rank.world,
        backend=settings.backend,
        launcher=rank.launcher,
        mode=settings.mode,
        verdict=verdict(whole, world=rank.world, hosts=rank.hosts, backend=settings.backend),
        state=PhaseState.BROKEN,
        seconds=seconds,
        phases=whole,
        hosts=rank.hosts,
        out=settings.out,
    )


def compared(report: Report, base: Base) -> Report:
    """The report with what got slower since a saved one, in its phase of speed."""
    findings = tuple(slower(report, base))
    phases = tuple(
        replace(phase, findings=phase.findings + findings, state=_worse(phase, findings))
        if phase.phase is CommPhase.SPEED
        else phase
        for phase in report.phases
    )
    told = verdict(phases, world=report.world, hosts=report.hosts, backend=report.backend)
    return replace(report, phases=phases, verdict=told, state=ended(phases))


def _worse(phase: PhaseResult, findings: tuple[Finding, ...]) -> PhaseState:
    return (
        phase.state
        if phase.state in {PhaseState.SKIPPED, PhaseState.BROKEN}
        else state_of(phase.phase, phase.findings + findings)
    )
