"""The command that says why a training hangs: from the files of a watched run, torch's flight recorder, or running processes."""

from pathlib import Path
from typing import Annotated

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.hang import judge_folder, judge_processes
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.options import OUTPUT, argument, option, options
from dsdoctor.hang.page import check_page, write_page
from dsdoctor.hang.verdict import hang_lines
from dsdoctor.ui.screen import first_step, next_line

DEFAULT = Path("dsdoctor-hang")
Folder = Annotated[
    Path | None,
    argument(
        metavar="DIR",
        help="The folder that dsdoctor.run named (default: dsdoctor-hang), or one with nccl_trace_rank_* files.",
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
        help="Look at ranks that run now on this host, or at those below a launcher. Their stacks are read by py-spy (extra hang).",
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
    """Say which rank of a hanging training did not come, where it stands and why.

    Reads what the watch of python -m dsdoctor.run wrote when nothing moved any more, one file a rank; or, of a job that never
    knew dsdoctor, the dumps of torch's flight recorder, or with --pid the running processes. Nothing in them is executed.
    While a job runs, kill -USR2 PID of one of its ranks makes the watch tell at once.

    Example: dsdoctor hang dsdoctor-hang
    """
    if pid and folder:
        raise UsageError(f"--pid looks at processes, and {folder} is a folder", hint="leave one of them out")
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
