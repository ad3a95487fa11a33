"""The command that tests communication: comm. Under a launcher each of its processes is one rank."""

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts.validators import Number

from dsdoctor.cli.ending import FOUND, OK, columns, interrupted_by, print_result
from dsdoctor.cli.options import Json, Verbose
from dsdoctor.comm.command import (
    CommRequest,
    read_result,
    report_without_verdict,
    run_all,
    run_rank,
    tell_torchrun,
    test_node,
)
from dsdoctor.comm.control.supervisor import Screen
from dsdoctor.comm.launch.rank import rank_of
from dsdoctor.comm.models import MAX_RANKS, CommSettings, Mode, PhaseState, Rank
from dsdoctor.comm.results import PhaseResult, Report
from dsdoctor.comm.text import phase_line, report_lines
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import check_folder
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.options import flag, option
from dsdoctor.core.processes import age
from dsdoctor.core.text import encode
from dsdoctor.ui.terminal import Stream, show

SLOW = 6
STATUS = {PhaseState.OK: 0, PhaseState.SKIPPED: 0, PhaseState.SLOW: SLOW, PhaseState.BROKEN: FOUND}
DEADLINES = {Mode.QUICK: 60.0, Mode.DEFAULT: 180.0, Mode.FULL: 900.0}
MIN_DEADLINE_SECONDS = 5.0
BACKENDS = ("auto", "gloo", "nccl")

Quick = Annotated[bool, flag(name="--quick", help="Test only connections and results; takes seconds.")]
Full = Annotated[bool, flag(name="--full", help="Test every collective, all sizes and pairs, and DeepSpeed's layer.")]
Nproc = Annotated[
    int | None,
    option(
        validator=Number(gte=1, lte=MAX_RANKS),
        help="Ranks to start here, or on each host. Default: one per GPU, else 2.",
    ),
]
Hostfile = Annotated[
    str | None,
    option(metavar="FILE", help="DeepSpeed's hostfile: inspect every host, then start ranks there over ssh."),
]
Static = Annotated[bool, flag(name="--static", help="With --hostfile: inspect the hosts, start no rank.")]
Include = Annotated[
    str | None,
    option(metavar="HOSTS", help="With --hostfile: only these, as in gpu[01-08],login or n1@n2."),
]
Exclude = Annotated[str | None, option(metavar="HOSTS", help="With --hostfile: all hosts but these.")]
SkipBad = Annotated[
    bool,
    flag(
        name="--skip-bad",
        help="With --hostfile: leave out hosts that cannot take part, test the others, and write both lists.",
    ),
]
Backend = Annotated[str, option(metavar="|".join(BACKENDS), help="auto is nccl with GPUs, else gloo.")]
Deadline = Annotated[
    float | None,
    option(metavar="SECONDS", help="Time limit of the whole test. Default: 60 (--quick), 180, 900 (--full)."),
]
OutFolder = Annotated[Path | None, option(name="--out", metavar="DIR", help="Keep each rank's file and log here.")]
Read = Annotated[
    str | None,
    option(metavar="FILE|-", help="Read the --json output of a test that a scheduler started; start no rank."),
]
Html = Annotated[Path | None, option(name="--html", metavar="FILE", help="Write a page with the pairs and curves.")]
Prolog = Annotated[
    bool,
    flag(
        name="--prolog",
        help="Test only this node before a job, within a minute, and print one JSON line. Exit status 1 if it is broken, else 0.",
    ),
]
LocalRank = Annotated[str | None, option(name=["--local_rank", "--local-rank"], show=False)]


def comm_command(
    *,
    quick: Quick = False,
    full: Full = False,
    nproc: Nproc = None,
    hostfile: Hostfile = None,
    static: Static = False,
    include: Include = None,
    exclude: Exclude = None,
    skip_bad: SkipBad = False,
    backend: Backend = "auto",
    deadline: Deadline = None,
    out: OutFolder = None,
    html: Html = None,
    read: Read = None,
    prolog: Prolog = False,
    as_json: Json = False,
    verbose: Verbose = False,
    local_rank: LocalRank = None,  # noqa: ARG001 (DeepSpeed's launcher adds it; the rank is read from the environment)
) -> int:
    """Test that all ranks reach each other and get the same results.

    Names the rank and the host at fault, and the fix. On its own it tests this machine; with --hostfile, all of its hosts.
    Under a launcher each process is a rank:
    torchrun -m dsdoctor.comm, deepspeed --module dsdoctor.comm, srun or mpirun python -m dsdoctor.comm.

    Example: dsdoctor comm --hostfile hosts --quick
    """
    began = time.monotonic() - age()
    settings = _settings(quick, full, backend, deadline, out)
    wanted = CommRequest(
        settings=settings,
        nproc=nproc,
        hostfile=hostfile,
        only_static=static,
        include=include,
        exclude=exclude,
        skip_bad=skip_bad,
    )
    if prolog:
        return _prolog(wanted)
    _check_places(out, html)
    window = Window(as_json, verbose, html)
    if read is not None:
        window.report(read_result(read))
        return window.status
    return _test(wanted, window, began)


def _prolog(wanted: CommRequest) -> int:
    """One line; a node that is slow or was not tested is not kept from its job."""
    given = {"--hostfile": wanted.hostfile is not None, "--full": wanted.settings.mode is Mode.FULL}
    for name in (name for name, is_given in given.items() if is_given):
        raise UsageError(f"--prolog tests only this node, within a minute, but {name} was given", hint="leave it out")
    test = test_node(wanted)
    sys.stdout.write(encode(test).decode() + "\n")
    return FOUND if test.failed else OK


def _test(wanted: CommRequest, window: "Window", began: float) -> int:
    """Play a rank's part under a launcher, or start all ranks; the exit status."""
    _refuse_without_hostfile(wanted)
    rank = rank_of(LocalHost().variables(""))
    if rank is not None:
        window.shown = rank.rank == 0
        _refuse_under_launcher(rank, wanted)
        try:
            return _as_rank(rank, wanted.settings, window, began)
        except KeyboardInterrupt as error:
            if rank.rank == 0:
                raise
            # ranks share stdout under most launchers, and rank 0's document is the only one there
            return interrupted_by(error.args[0] if error.args else signal.SIGINT)
    window.report(run_all(wanted, on_phase=window.phase))
    return window.status


class Window:
    """Where a test is shown: phases on stderr while it runs, the report on stdout at its end, files beside it."""

    def __init__(self, as_json: bool, verbose: bool, html: Path | None) -> None:
        self._as_json, self._verbose, self._html = as_json, verbose, html
        self._talk = Stream(stderr=True)
        self.shown = True
        self.status = 0
        self._told: set[tuple[str, str]] = set()

    def phase(self, result: PhaseResult) -> None:
        """A phase has ended."""
        if self.shown:
            show(self._talk, [phase_line(result)])
        self.found(result.findings)

    def found(self, findings: tuple[Finding, ...]) -> None:
        """What is known before the end, each once, without what is only to be known."""
        fresh = [
            one for one in findings if one.severity is not Severity.NOTE and (one.rule, one.title) not in self._told
        ]
        self._told |= {(one.rule, one.title) for one in fresh}
        if self.shown:
            marks = {Severity.ERROR: "✗", Severity.WARNING: "!"}
            show(self._talk, [f"  {marks[one.severity]} {one.title}  [{one.rule}]" for one in fresh])

    def progress(self, at: str) -> None:
        """What the test has been in for a while."""
        if self.shown:
            show(self._talk, [f"· {at}"])

    def broken_off(self, rank: Rank, at: str) -> None:
        """A signal ends the test."""
        show(self._talk, [f"✗ rank {rank.rank} was ended by a signal; it was at: {at}"])

    def report(self, report: Report) -> None:
        """The end."""
        self.status = STATUS[report.state]
        if self._html:
            from dsdoctor.comm.page import write_page

            write_page(report, self._html)
        if self.status:
            tell_torchrun(report.verdict, report_lines(report, verbose=False))
        lines = report_lines(report, verbose=self._verbose, width=columns())
        print_result("comm", self._as_json, lines, report.findings, report=report)
        if sys.stdout is not None:
            sys.stdout.flush()


def _as_rank(rank: Rank, settings: CommSettings, window: Window, began: float) -> int:
    """Play one rank's part; a rank that met nobody says so itself."""
    screen = Screen(
        phase=window.phase,
        found=window.found,
        progress=window.progress,
        report=window.report,
        broken_off=lambda at: window.broken_off(rank, at),
    )
    outcome = run_rank(rank, settings, screen, began=began)
    if outcome.report is not None:
        return window.status
    if outcome.alone and rank.rank == 0:
        window.report(report_without_verdict(outcome, rank, settings, time.monotonic() - began))
        return window.status
    if outcome.verdict and outcome.status:
        tell_torchrun(outcome.verdict, [f"by rank 0: {outcome.verdict}"])
    if outcome.alone:
        report = report_without_verdict(outcome, rank, settings, time.monotonic() - began)
        show(Stream(stderr=True), report_lines(report, verbose=False))
        tell_torchrun(report.verdict, report_lines(report, verbose=False))
        if outcome.folder:
            show(Stream(stderr=True), [f"  files of rank {rank.rank}: {outcome.folder}"])
    return outcome.status


def _settings(quick: bool, full: bool, backend: str, deadline: float | None, out: Path | None) -> CommSettings:
    if quick and full:
        raise UsageError("--quick and --full cannot be given together", hint="name one, or neither")
    if backend not in BACKENDS:
        raise UsageError(f"no backend {backend!r} here", hint=f"it takes {', '.join(BACKENDS)}")
    mode = Mode.QUICK if quick else Mode.FULL if full else Mode.DEFAULT
    deadline = DEADLINES[mode] if deadline is None else deadline
    if not math.isfinite(deadline):
        raise UsageError(f"a deadline of {deadline:g} is not a number of seconds", hint="leave it out, or pass seconds")
    if deadline < MIN_DEADLINE_SECONDS:
        raise UsageError(
            f"a deadline of {deadline:g} s is too short",
            hint=f"importing torch alone takes a while: use {MIN_DEADLINE_SECONDS:g} or more",
        )
    return CommSettings(mode=mode, backend=backend, deadline=deadline, out=os.fspath(out.absolute()) if out else None)


def _refuse_without_hostfile(wanted: CommRequest) -> None:
    """What speaks of the hosts of a hostfile needs one."""
    given = {
        "--static looks at": wanted.only_static,
        "--include chooses among": wanted.include is not None,
        "--exclude leaves out some of": wanted.exclude is not None,
        "--skip-bad leaves out some of": wanted.skip_bad,
    }
    for what in (what for what, is_given in given.items() if is_given and wanted.hostfile is None):
        raise UsageError(f"{what} the hosts of a hostfile, but no hostfile was given", hint="add --hostfile FILE")


def _refuse_under_launcher(rank: Rank, wanted: CommRequest) -> None:
    """What starts ranks makes no sense in one."""
    given = [name for name, value in (("--nproc", wanted.nproc), ("--hostfile", wanted.hostfile)) if value is not None]
    if given:
        raise UsageError(
            f"{given[0]} starts ranks, and this is rank {rank.rank} already",
            hint="leave it out, or unset RANK and WORLD_SIZE",
        )


def _check_places(out: Path | None, html: Path | None) -> None:
    """Files that cannot be written are refused before anything is tested."""
    if out is not None:
        check_folder(out, "--out")
    if html is not None:
        _check_page(html)


def _check_page(path: Path) -> None:
    from dsdoctor.ui.page import check_extra, check_target

    check_target(path)
    check_extra(plotly=True)
