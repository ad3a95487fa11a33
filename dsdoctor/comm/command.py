"""All ranks of this machine, or of a hostfile -> a Report."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from dsdoctor.comm.control.messages import state_of
from dsdoctor.comm.control.supervisor import Outcomes, Screen, supervise
from dsdoctor.comm.launch.on_host import HostTold
from dsdoctor.comm.launch.start import (
    MAX_FILE_BYTES,
    MAX_FILES,
    PARENT,
    Endings,
    HostOrder,
    RankEnded,
    RankTold,
    check_proc,
    free_port,
    host_orders,
    module_command,
    private_folder,
    remote_command,
    start_here,
    write_files,
)
from dsdoctor.comm.local.facts import read_gpus
from dsdoctor.comm.models import MAX_RANKS, CommPhase, CommSettings, Mode, PhaseState, Rank
from dsdoctor.comm.preflight import checks as preflight_checks
from dsdoctor.comm.preflight.checks import (
    WORDS,
    LeftOut,
    bad_hosts,
    files_of,
    hosts_left_out,
    master_unreachable,
    without,
)
from dsdoctor.comm.preflight.facts import PREFLIGHT_TIMEOUT_SECONDS, look_forwarded, look_preflight
from dsdoctor.comm.results import PhaseResult, Report, bad_ranks, ended, read_own_report, read_remote_report, verdict
from dsdoctor.core.errors import DoctorError, ImpossiblePlan, NotWritten, UsageError
from dsdoctor.core.files import MAX_READ_BYTES as MAX_REPORT_BYTES
from dsdoctor.core.files import PRIVATE, make_folder, read_limited, write_text
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import die_with
from dsdoctor.core.text import decode
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.hosts.ssh import SESSION_OPTIONS, HostCommand, on_hosts

# Starts the ranks of a hostfile, one ssh a host, and waits for rank 0's report. Acts; judges nothing.


ON_HOST = "dsdoctor.comm.launch.on_host"


def start_on_hosts(
    orders: Mapping[str, HostOrder],
    *,
    python: str,
    folder: str,
    variables: Mapping[str, str],
    seconds: float,
    ssh: Sequence[str] = ("ssh", *SESSION_OPTIONS),
) -> RankTold:
    """Run the ranks of each host in ``folder`` with ``variables``. Whatever happens, no ssh is left, and what runs on a host ends
    when its connection does."""
    commands = [
        HostCommand(
            host=host,
            command=remote_command(
                module_command(python, ON_HOST, msgspec.json.encode(order).decode(), folder=folder),
                folder,
                variables,
                ON_HOST,
            ),
        )
        for host, order in orders.items()
    ]
    heard = _Heard(orders)
    on_hosts(commands, heard, ssh=ssh, seconds=seconds, until=heard.endings.over)
    told = heard.endings.told
    return RankTold(document=heard.document, ended=tuple(told[rank] for rank in sorted(told)), files=heard.files)


class _Heard:
    """What the hosts said: rank 0's document, and which ranks ended."""

    def __init__(self, orders: Mapping[str, HostOrder]) -> None:
        self._orders = orders
        self._last_words: dict[str, str] = {}
        self.endings = Endings(next(iter(orders.values())))
        self.document = ""
        self.files: dict[str, str] = {}

    def line(self, host: str, text: str, *, error: bool) -> None:
        """A line of a host: an answer of ours, or words; those of rank 0's host are shown."""
        told = None if error else _answer(text)
        if told is None:
            self._last_words[host] = text.strip() or self._last_words.get(host, "")
            if self._orders[host].first == 0:
                print(text, file=sys.stderr, flush=True)
        elif told.ended is not None:
            if told.ended.rank in self._orders[host].ranks:
                self.endings.add(told.ended, knows=True)
        elif self._orders[host].first == 0 and told.name and len(self.files) < MAX_FILES:
            self.files[told.name] = told.text[-MAX_FILE_BYTES:]
        elif self._orders[host].first == 0 and told.document is not None:
            self.document = told.document

    def ended(self, host: str, status: int) -> None:
        """All ranks of a host that said nothing of their end ended with its command; rank 0 is told, for they cannot."""
        how = f"the command on {host} ended with status {status}"
        last = self._last_words.get(host, "")[:300]
        for rank in self._orders[host].ranks:
            if rank not in self.endings.told:
                self.endings.add(RankEnded(rank=rank, host=host, how=how, last_line=last))


def _answer(text: str) -> HostTold | None:
    """A line as ``on_host`` writes it; None for anything else, such as what a login script prints."""
    try:
        return decode(text, HostTold)
    except msgspec.MsgspecError:
        return None


# comm --hostfile: a look at every host, then the ranks of all that are meant; with --skip-bad again without the bad ones.


OnPhase = Callable[[PhaseResult], None]
MARGIN = 2.0
"""Seconds after the deadline at which the ranks are ended, if they have not ended by themselves."""
NOTHING_TOLD = "check its output above, and the space in the folder for its files (--out, else TMPDIR)"
LOGIN, MAX_LOGIN_SECONDS = 0.5, 30.0
"""The part of the deadline in which a host must answer over ssh, and the most seconds: a slow login is no broken one."""
MAX_ROUNDS = 3
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
                f"--hostfile is {request.hostfile}, which cannot be read",
                hint="name the hostfile: a line for each host, such as: node1 slots=8",
            )
        self._asked = self._facts.hosts.hosts
        if (ranks := sum(request.nproc or entry.slots for entry in self._asked)) > MAX_RANKS:
            raise UsageError(
                f"{ranks:,} ranks were requested, but a test has {MAX_RANKS:,} at most",
                hint="use a smaller --nproc, or correct the slots in the hostfile",
            )
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
        while self._request.skip_bad and rounds < MAX_ROUNDS and (worse := self._bad_of(report)):
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
    if first is None:
        how = f"it had not ended {MARGIN:g} s after its deadline of {settings.deadline:g} s"
        busy = f"its machine may be too busy (load {os.getloadavg()[0]:.0f} here): run again with a longer --deadline"
        raise ImpossiblePlan(f"rank 0 wrote no report: {how}", hint=busy)
    how = first.how or "it exited with status 0, but wrote no document"
    how = {"killed": f"it was {how}", "exit": f"it ended with {how}"}.get(how.split(" ")[0], how)
    raise DoctorError(f"rank 0 wrote no report: {how}", hint=NOTHING_TOLD)


def login_patience(deadline: float) -> float:
    """Seconds in which a host must answer over ssh.

    >>> login_patience(5), login_patience(50), login_patience(600)
    (10.0, 25.0, 30.0)
    """
    return max(PREFLIGHT_TIMEOUT_SECONDS, min(deadline * LOGIN, MAX_LOGIN_SECONDS))


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


# The command comm: one rank under a launcher, or all ranks of this machine or of a hostfile -> a Report.


RANKS_ON_CPU = 2
WRITES = "srun ... python -m dsdoctor.comm --json > comm.json writes one"


def run_rank(rank: Rank, settings: CommSettings, screen: Screen, *, began: float) -> Outcomes:
    """Run this process as a rank."""
    check_proc()
    parent = os.environ.get(PARENT)
    if parent:
        die_with(int(parent))
    return supervise(rank, settings, screen, began=began)


def run_all(request: CommRequest, *, on_phase: OnPhase) -> Report:
    """Start every rank of this machine, or of a hostfile's hosts after a look at them, and return rank 0's report."""
    check_proc()
    host = LocalHost()
    with evidence_folder(request.settings) as (folder, outcome):
        if request.hostfile is not None:
            report = HostsTest(host, request, folder, on_phase).report()
        else:
            told = _here(host, request, folder)
            report = report_of(read_own_report(told.document), told.ended, request.settings)
        keep = report.state is PhaseState.BROKEN or bool(report.left_out) or request.settings.out is not None
        outcome.append(keep)
        return replace(report, out=str(folder) if keep else None)


def read_result(name: str) -> Report:
    """The report in what a test with --json wrote elsewhere, whatever stands around it; "-" is stdin. Raises UsageError
    without."""
    try:
        content = sys.stdin.buffer.read(MAX_REPORT_BYTES) if name == "-" else read_limited(Path(name))
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}", hint=WRITES) from error
    found = map(read_remote_report, _documents(content.decode(errors="replace")))
    report = next((report for report in found if report is not None and 1 <= report.world <= MAX_RANKS), None)
    if report is None:
        raise UsageError(f"{name} is not a report of dsdoctor comm --json", hint=WRITES)
    return report


def _documents(text: str) -> Iterator[str]:
    """What may be the document: the whole; else the last line that looks so; else lines from one brace to another (``jq .``)."""
    yield text.removeprefix("\ufeff")
    lines = text.splitlines()
    yield from ("{" + line.partition("{")[2] for line in reversed(lines) if '"schema"' in line)
    if "{" in lines and "}" in lines:
        yield "\n".join(lines[lines.index("{") : len(lines) - lines[::-1].index("}")])


@contextmanager
def evidence_folder(settings: CommSettings) -> Iterator[tuple[Path, list[bool]]]:
    """The folder of the ranks' files: the one that was named; else a private one, that is kept when True is added to the list."""
    outcome = list[bool]()
    if settings.out is None:
        with private_folder() as (folder, keep):
            try:
                yield folder, outcome
            finally:
                if any(outcome):
                    keep()
        return
    folder = Path(settings.out)
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


def report_without_verdict(outcome: Outcomes, rank: Rank, settings: CommSettings, seconds: float) -> Report:
    """The report of a rank that got no verdict from rank 0: what it found by itself, in the phase it was in."""
    known = next((phase for phase in CommPhase if phase.value == outcome.at.partition(": ")[0]), CommPhase.RENDEZVOUS)
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


def tell_torchrun(verdict: str, lines: Iterable[str]) -> None:
    """Write a verdict into the file in which torchrun looks for the error of this rank (torch/distributed/elastic/multiprocessing/
    errors, ``record_exception``): its own summary shows ``py_callstack`` then, of the rank whose file is the oldest."""
    path = LocalHost().variable("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
    error = {"message": {"message": verdict, "extraInfo": extra}}
    with suppress(OSError):
        # the verdict was said already
        write_text(Path(path), msgspec.json.encode(error).decode(), mode=PRIVATE)


# A node is tested before a job gets it (--prolog), in one line.


NODE_SCHEMA = "dsdoctor-node/1"
MAX_PROLOG_SECONDS = 55.0
"""The deadline: with the start of Python the line is there within a minute."""


@dataclass(frozen=True, kw_only=True)
class NodeTest:
    """One test of one node. ``time`` is UTC, such as "2026-11-22T21:05:09Z"; ``state`` a PhaseState's value, or "unknown" where
    dsdoctor itself failed; ``files`` is the folder of what was kept."""

    schema: str = NODE_SCHEMA
    node: str
    time: str
    state: str
    verdict: str
    rules: tuple[str, ...] = ()
    seconds: float = 0.0
    job: str | None = None
    files: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the node did not pass."""
        return self.state == PhaseState.BROKEN.value


def test_node(request: CommRequest) -> NodeTest:
    """Test this node."""
    host, node = LocalHost(), socket.gethostname()
    now, job = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), host.variable("SLURM_JOB_ID")
    settings = replace(request.settings, mode=Mode.QUICK, deadline=min(request.settings.deadline, MAX_PROLOG_SECONDS))
    try:
        report = run_all(replace(request, settings=settings), on_phase=lambda _: None)
    except DoctorError as error:
        return NodeTest(node=node, time=now, state="unknown", verdict=f"· not tested: {error.message}", job=job)
    serious = (finding.rule for finding in report.findings if finding.severity is not Severity.NOTE)
    return NodeTest(
        node=node,
        time=now,
        state=report.state.value,
        verdict=report.verdict,
        rules=tuple(dict.fromkeys(serious)),
        seconds=round(report.seconds, 1),
        job=job,
        files=report.out,
    )
