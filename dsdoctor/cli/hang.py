"""The command that says why a training hangs: from the files of a watched run, torch's flight recorder, or running processes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import has_error
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.options import OUTPUT, argument, option, options
from dsdoctor.hang.incidents import SAMPLE_INTERVAL_SECONDS, dumps_in, look_at, read_dumps, read_ranks
from dsdoctor.hang.models import Incident, Verdict
from dsdoctor.hang.page import check_page, write_page
from dsdoctor.hang.processes import rank_processes
from dsdoctor.hang.verdict import hang_lines, judge
from dsdoctor.ui.screen import first_step, next_line

DEFAULT = Path("dsdoctor-hang")
Folder = Annotated[
    Path | None,
    argument(
        metavar="DIR",
        help="Folder that dsdoctor.run printed (default: dsdoctor-hang), or one with nccl_trace_rank_* files.",
    ),
]
Pids = Annotated[
    tuple[int, ...],
    options(
        name="--pid",
        metavar="PID",
        consume_multiple=True,
        allow_leading_hyphen=False,
        negative="",
        help="Inspect ranks running on this host, or those of a launcher. Stacks are read with py-spy (extra hang).",
    ),
]
Html = Annotated[
    Path | None,
    option(
        name="--html",
        metavar="FILE",
        group=OUTPUT,
        help="Also write a page: verdict, timeline, calls, stacks (extra plot).",
    ),
]


def hang_command(folder: Folder = None, /, *, pid: Pids = (), html: Html = None, as_json: Json = False) -> int:
    """Find the rank that a hanging run waits for, and why.

    Reads the files that the watch of dsdoctor run writes when there is no progress, one per rank. For a job started
    without dsdoctor it reads dumps of torch's flight recorder or, with --pid, the running processes. Runs nothing from the files.
    During a job, send SIGUSR2 to one of its ranks (kill -USR2 PID) to get the verdict at once.

    Example: dsdoctor hang dsdoctor-hang
    """
    if pid and folder:
        raise UsageError(f"--pid inspects processes, but {folder} is a folder", hint="leave one of them out")
    if html:
        check_page(html)
    incident, verdict = judge_processes(pid, LocalHost()) if pid else judge_folder(folder or DEFAULT)
    if html:
        write_page(incident, verdict, html)
    command = first_step(verdict.findings)
    page = [f"the page: {html}"] if html else []
    lines = [*hang_lines(incident, verdict), *page, *([next_line(command)] if command else [])]
    print_result("hang", as_json, lines, verdict.findings, incident=incident, stacks=verdict.stacks)
    return FOUND if has_error(verdict.findings) else OK


def judge_folder(folder: Path) -> tuple[Incident, Verdict]:
    """Judge what a folder holds. Raises UsageError for one that holds nothing of a hang."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}", hint="name the folder that dsdoctor.run printed: dsdoctor hang DIR"
        )
    dumps = dumps_in(folder)
    incident = read_dumps(dumps) if dumps and not any(folder.glob("rank-*.json")) else read_ranks(folder)
    return incident, judge(incident)


def judge_processes(
    pids: Iterable[int], host: Host, *, apart: float = SAMPLE_INTERVAL_SECONDS
) -> tuple[Incident, Verdict]:
    """Judge the ranks among some processes and below them. Raises UsageError for processes that are not there."""
    incident = look_at(rank_processes(pids), host, apart=apart)
    return incident, judge(incident)
