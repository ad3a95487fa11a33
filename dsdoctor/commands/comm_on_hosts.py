"""comm --hostfile: a look at every host, then the ranks of all that are meant; with --skip-bad again without the bad ones."""

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.comm.bad_ranks import bad_ranks
from dsdoctor.comm.control.phases import state_of
from dsdoctor.comm.launch.commands import HostOrder, host_orders
from dsdoctor.comm.launch.evidence_files import write_files
from dsdoctor.comm.launch.start import RankEnded, free_port
from dsdoctor.comm.launch.start_on_hosts import start_on_hosts
from dsdoctor.comm.local.gpu_links import read_gpus
from dsdoctor.comm.models import CommPhase, CommSettings, Mode, PhaseState
from dsdoctor.comm.preflight import checks as preflight_checks
from dsdoctor.comm.preflight.facts import LONGEST, look_forwarded, look_preflight
from dsdoctor.comm.preflight.left_out import LeftOut, bad_hosts, files_of, hosts_left_out, without
from dsdoctor.comm.preflight.never_came import WORDS, master_unreachable
from dsdoctor.comm.report_document import read_remote_report
from dsdoctor.comm.results import PhaseResult, Report
from dsdoctor.comm.verdict import ended, verdict
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.files import write_text
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.hosts.hostfile import Slots

OnPhase = Callable[[PhaseResult], None]
MARGIN = 2.0
"""Seconds after the deadline at which the ranks are ended, if they have not ended by themselves."""
NOTHING_TOLD = "see what it wrote above, and whether the folder for its files (--out, else TMPDIR) has space"
LOGIN, MOST_LOGIN = 0.5, 30.0
"""The part of the deadline in which a host must answer over ssh, and the most seconds: a slow login is no broken one."""
MOST_ROUNDS = 3
"""Tests, each without the hosts that were bad in the one before."""


@dataclass(frozen=True, kw_only=True)
class CommRequest:
    """The request of the command line where no launcher started this process."""

    settings: CommSettings
    nproc: int | None = None
    hostfile: str | None = None
    only_static: bool = False
    include: str | None = None
    exclude: str | None = None
    skip_bad: bool = False


class HostsTest:
    """The test of a hostfile's hosts."""

    def __init__(self, host: LocalHost, request: CommRequest, folder: Path, on_phase: OnPhase) -> None:
        assert request.hostfile is not None
        self._host, self._request, self._folder, self._on_phase = host, request, folder, on_phase
        self._began = time.monotonic()
        self._facts = look_preflight(
            host,
            hostfile=request.hostfile,
            python=sys.executable,
            folder=os.getcwd(),  # noqa: PTH109
            accelerator="cuda" if read_gpus(host)[0] else "cpu",
            limit=login_patience(request.settings.deadline),
            include=request.include,
            exclude=request.exclude,
        )
        if self._facts.hosts is None:
            raise UsageError(
                f"--hostfile is {request.hostfile}, and that file cannot be read",
                hint="name the hostfile: a line for each host, such as: node1 slots=8",
            )
        self._asked = self._facts.hosts.hosts
        self._bad = dict(bad_hosts(self._facts))
        self._gone: dict[int, str] = {}

    def report(self) -> Report:
        """Test what can be tested."""
        if self._request.skip_bad and len(self._bad) < len(self._asked):
            self._facts = without(self._facts, self._bad)
        static = self._static(time.monotonic() - self._began)
        self._on_phase(static)
        if self._request.only_static or static.state is PhaseState.BROKEN:
            return self._without_ranks(static)
        report = self._tested()
        rounds = 1
        while self._request.skip_bad and rounds < MOST_ROUNDS and (worse := self._bad_of(report)):
            self._bad |= worse
            self._facts = without(self._facts, worse)
            report, rounds = self._tested(), rounds + 1
        return self._joined(report, self._static(static.seconds))

    @property
    def _hosts(self) -> tuple[Slots, ...]:
        """Those that are tested."""
        hosts = self._facts.hosts.hosts if self._facts.hosts else ()
        return tuple(replace(entry, slots=self._request.nproc or entry.slots) for entry in hosts)

    def _static(self, seconds: float) -> PhaseResult:
        findings = tuple(finding for check in preflight_checks.CHECKS for finding in check(self._facts))
        bad = self._left_out()
        state = state_of(CommPhase.STATIC, findings)
        if bad and self._request.skip_bad and state is not PhaseState.BROKEN:
            state = PhaseState.SLOW
        visits = self._facts.visits
        answered = f"{sum(visit.answered for visit in visits)} answer to ssh" if visits else "none was asked"
        less = (
            f"; without {len(self._asked) - len(self._hosts)} bad ones" if len(self._asked) > len(self._hosts) else ""
        )
        return PhaseResult(
            phase=CommPhase.STATIC,
            state=state,
            seconds=seconds,
            said=f"{len(self._hosts)} hosts in {self._facts.hostfile}, {answered}{less}",
            findings=(*bad, *findings) if self._request.skip_bad else (*findings, *bad),
        )

    def _left_out(self) -> tuple[Finding, ...]:
        """What is said of the bad hosts, after their lists were written."""
        left = LeftOut(
            hostfile=str(self._facts.hostfile),
            bad=self._bad,
            good=tuple(entry for entry in self._asked if entry.name not in self._bad),
            good_file=str(self._folder / "good-hosts"),
            bad_file=str(self._folder / "bad-hosts"),
            tested=self._request.skip_bad,
        )
        found = tuple(hosts_left_out(left))
        for path, text in files_of(left) if found else ():
            write_text(Path(path), text)
        return found

    def _tested(self) -> Report:
        """The ranks of all hosts that are left."""
        settings = self._request.settings
        told = start_on_hosts(
            self._orders(),
            python=sys.executable,
            folder=self._facts.folder,
            variables=look_forwarded(self._host, self._facts.folder),
            seconds=settings.deadline + MARGIN,
        )
        self._gone = {gone.rank: f"{gone.how}: {gone.last_line}".rstrip(": ") for gone in told.ended if gone.how}
        write_files(self._folder, told.files)
        report = report_of(read_remote_report(told.document), told.ended, settings)
        return with_last_words(report, {gone.rank: gone.last_line for gone in told.ended if gone.how})

    def _orders(self) -> dict[str, HostOrder]:
        settings, hosts = self._request.settings, self._hosts
        first = next((visit for visit in self._facts.visits if visit.host == hosts[0].name), None)
        return host_orders(
            hosts,
            master=next(iter(first.addresses), hosts[0].name) if first else hosts[0].name,
            port=free_port(),
            token=secrets.token_hex(16),
            seconds=settings.deadline + MARGIN,
            arguments=arguments_of(settings, self._folder if settings.out else None),
        )

    def _bad_of(self, report: Report) -> dict[str, str]:
        """The hosts whose ranks are the cause; none where it would be half of all: then the fault is elsewhere."""
        names = [host.name for host in self._hosts for _ in range(host.slots)]
        bad: dict[str, str] = {}
        came = {claim.rank for claim in report.ranks}
        for rank, why in bad_ranks(report).items():
            told = f" ({self._gone[rank]})" if rank in self._gone and rank not in came else ""
            bad.setdefault(names[rank], f"rank {rank}: {why}{told}")
        return bad if 2 * len(bad) < len(self._hosts) else {}

    def _without_ranks(self, static: PhaseResult) -> Report:
        """The report where no rank is started: the hosts are not in order, or only they were to be checked."""
        phases: tuple[PhaseResult, ...] = (static,)
        if static.state is PhaseState.BROKEN:
            phases += (
                PhaseResult(
                    phase=CommPhase.RENDEZVOUS, state=PhaseState.SKIPPED, seconds=0.0, said="the hosts are not in order"
                ),
            )
        hosts, settings = tuple(entry.name for entry in self._hosts for _ in range(entry.slots)), self._request.settings
        return Report(
            world=len(hosts),
            backend=settings.backend,
            launcher="dsdoctor",
            mode=settings.mode,
            verdict=verdict(phases, world=len(hosts), hosts=hosts, backend=settings.backend),
            state=ended(phases),
            seconds=time.monotonic() - self._began,
            phases=phases,
            hosts=hosts,
            left_out=self._bad,
            out=settings.out,
        )

    def _joined(self, report: Report, static: PhaseResult) -> Report:
        """The report with the phase that came before any rank."""
        phases = (static, *report.phases)
        told = verdict(phases, world=report.world, hosts=report.hosts, backend=report.backend)
        return replace(report, phases=phases, verdict=told, state=ended(phases), left_out=self._bad)


def report_of(report: Report | None, gone: tuple[RankEnded, ...], settings: CommSettings) -> Report:
    """Rank 0's report. Raises DoctorError where there is none, with what became of rank 0."""
    if report is not None:
        return report
    first = next((rank for rank in gone if rank.rank == 0), None)
    how = f"it had not ended {MARGIN:g} s after its deadline of {settings.deadline:g} s"
    if first is not None:
        how = first.how or "it ended with status 0, and wrote no document"
        how = {"killed": f"it was {how}", "exit": f"it ended with {how}"}.get(how.split(" ")[0], how)
    raise DoctorError(f"rank 0 wrote no report: {how}", hint=NOTHING_TOLD)


def login_patience(deadline: float) -> float:
    """Seconds in which a host must answer over ssh.

    >>> login_patience(5), login_patience(50), login_patience(600)
    (10.0, 25.0, 30.0)
    """
    return max(LONGEST, min(deadline * LOGIN, MOST_LOGIN))


def with_last_words(report: Report, words: Mapping[int, str]) -> Report:
    """The report with what ranks said that never came: they were started, which rank 0 cannot know."""
    came = {claim.rank for claim in report.ranks}
    found = tuple(master_unreachable(words, report.hosts, came)) if len(report.hosts) == report.world else ()
    told = {rank for rank, text in words.items() if WORDS.search(text)} | came

    def explained(phase: PhaseResult) -> PhaseResult:
        if phase.phase is not CommPhase.RENDEZVOUS or not found:
            return phase
        rest = (one for one in phase.findings if one.rule != "rank-missing" or len(told) < report.world)
        return replace(phase, findings=(*found, *rest))

    return replace(report, phases=tuple(explained(phase) for phase in report.phases))


def arguments_of(settings: CommSettings, out: Path | None) -> tuple[str, ...]:
    """The arguments of each rank."""
    mode = {Mode.QUICK: ("--quick",), Mode.FULL: ("--full",), Mode.DEFAULT: ()}[settings.mode]
    folder = ("--out", str(out.absolute())) if out else ()
    return ("--json", *mode, "--backend", settings.backend, "--deadline", f"{settings.deadline:g}", *folder)
