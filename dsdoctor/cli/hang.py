"""The command that says why a training hangs: from the files of a watched run, or from torch's own flight recorder."""

from pathlib import Path
from typing import Annotated

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.hang import judge_folder
from dsdoctor.core.finding import has_error
from dsdoctor.core.options import argument
from dsdoctor.report.hang import hang_lines

Folder = Annotated[
    Path,
    argument(
        metavar="DIR", help="The folder that dsdoctor.run named (dsdoctor-hang), or one with nccl_trace_rank_* files."
    ),
]


def hang_command(folder: Folder = Path("dsdoctor-hang"), /, *, as_json: Json = False) -> int:
    """Say which rank of a hanging training did not come, where it stands and why.

    Reads what the watch of python -m dsdoctor.run wrote when nothing moved any more, one file a rank; or, of a job that never
    knew dsdoctor, the dumps of torch's flight recorder. Nothing in them is executed.
    While a job runs, kill -USR2 PID of one of its ranks makes the watch tell at once.

    Example: dsdoctor hang dsdoctor-hang
    """
    incident, verdict = judge_folder(folder)
    lines = hang_lines(incident, verdict)
    print_result("hang", as_json, lines, verdict.findings, incident=incident, stacks=verdict.stacks)
    return FOUND if has_error(verdict.findings) else OK
