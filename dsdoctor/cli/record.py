"""The command that writes a machine down: record."""

import sys
from pathlib import Path
from typing import Annotated

from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.record import write_down
from dsdoctor.core.options import argument
from dsdoctor.core.requests import Offline, PythonPath
from dsdoctor.ui.progress import BuildProgress


def record_command(
    file: Annotated[Path, argument(help="The file to write.")],
    /,
    *,
    python: PythonPath = sys.executable,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Write this machine down into a file: everything that was asked, and nothing else.

    check, plan, env, verify and compare take it with --machine, on any machine. No token and no unrelated variable is in it,
    and the home folder is written as /home/user.

    Example: dsdoctor record node1.json
    """
    with BuildProgress(quiet=as_json) as progress:
        write_down(python, file, offline=offline, say=progress.say)
    print_result("record", as_json, [f"✓ {file}  (look into it before you pass it on)"], (), file=str(file))
