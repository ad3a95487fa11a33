"""The command comm: one rank under a launcher, or all ranks of this machine or of a hostfile -> a Report."""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from dsdoctor.comm.control.phases import state_of
from dsdoctor.comm.control.supervisor import Outcomes, Screen, supervise
from dsdoctor.comm.launch.commands import HostOrder
from dsdoctor.comm.launch.start import PARENT, RankTold, free_port, start_here
from dsdoctor.comm.local.gpu_links import read_gpus
from dsdoctor.comm.models import CommPhase, CommSettings, PhaseState, Rank
from dsdoctor.comm.report_document import read_own_report, read_remote_report
from dsdoctor.comm.results import PhaseResult, Report
from dsdoctor.comm.speed.baseline import compare, slower
from dsdoctor.comm.verdict import ended, verdict
from dsdoctor.commands.comm_on_hosts import MARGIN, CommRequest, HostsTest, OnPhase, arguments_of, report_of
from dsdoctor.core.errors import NotWritten, UsageError
from dsdoctor.core.files import LARGEST, make_folder, read_limited
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import die_with

RANKS_ON_CPU = 2
WRITES = "srun ... python -m dsdoctor.comm --json > comm.json writes one"
WRITES_EARLIER = "name the file that an earlier python -m dsdoctor comm --json > FILE wrote"


def run_rank(rank: Rank, settings: CommSettings, screen: Screen, *, began: float) -> Outcomes:
    """Run this process as a rank."""
    parent = os.environ.get(PARENT)
    if parent:
        die_with(int(parent))
    return supervise(rank, settings, screen, began=began)


def run_all(request: CommRequest, *, on_phase: OnPhase) -> Report:
    """Start every rank of this machine, or of a hostfile's hosts after a look at them, and return rank 0's report."""
    host = LocalHost()
    with kept_when_broken(request.settings) as (folder, outcome):
        if request.hostfile is not None:
            report = HostsTest(host, request, folder, on_phase).report()
        else:
            told = _here(host, request, folder)
            report = report_of(read_own_report(told.document), told.ended, request.settings)
        keep = report.state is PhaseState.BROKEN or bool(report.left_out) or request.settings.out is not None
        outcome.append(keep)
        return replace(report, out=str(folder) if keep else None)


def read_result(name: str, *, earlier: bool = False) -> Report:
    """The report in what a test with --json wrote elsewhere, whatever stands around it; "-" is stdin. ``earlier``: it is the one
    to compare with. Raises UsageError without."""
    hint = WRITES_EARLIER if earlier else WRITES
    try:
        content = sys.stdin.buffer.read(LARGEST) if name == "-" else read_limited(Path(name))
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}", hint=hint) from error
    found = map(read_remote_report, _documents(content.decode(errors="replace")))
    report = next((report for report in found if report is not None), None)
    if report is None:
        raise UsageError(f"{name} holds no report of dsdoctor comm --json", hint=hint)
    return report


def _documents(text: str) -> Iterator[str]:
    """What may be the document: the whole; else the last line that looks so; else lines from one brace to another (``jq .``)."""
    yield text.removeprefix("\ufeff")
    lines = text.splitlines()
    yield from ("{" + line.partition("{")[2] for line in reversed(lines) if '"schema"' in line)
    if "{" in lines and "}" in lines:
        yield "\n".join(lines[lines.index("{") : len(lines) - lines[::-1].index("}")])


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
    count = request.nproc or len(read_gpus(host)[0]) or RANKS_ON_CPU
    order = HostOrder(
        first=0,
        count=count,
        world=count,
        master="127.0.0.1",
        port=free_port(),
        token=secrets.token_hex(16),
        seconds=request.settings.deadline + MARGIN,
        arguments=arguments_of(request.settings, folder),
    )
    return start_here(order, host.environment(), folder)


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


def compared(report: Report, base: Report) -> Report:
    """The report with what got slower since another one, in its phase of speed."""
    findings = slower(report, base)
    phases = tuple(
        replace(phase, findings=phase.findings + findings, state=_worse(phase, findings))
        if phase.phase is CommPhase.SPEED
        else phase
        for phase in report.phases
    )
    found_slower = any(finding.severity is not Severity.NOTE for finding in findings)
    also = "" if found_slower else compare(report, base).told or "nothing could be compared with before"
    told = verdict(phases, world=report.world, hosts=report.hosts, backend=report.backend, also=also)
    return replace(report, phases=phases, verdict=told, state=ended(phases))


def _worse(phase: PhaseResult, findings: tuple[Finding, ...]) -> PhaseState:
    return (
        phase.state
        if phase.state in {PhaseState.SKIPPED, PhaseState.BROKEN}
        else state_of(phase.phase, phase.findings + findings)
    )
