"""The command that compares recorded machines: compare."""

from pathlib import Path
from typing import Annotated

from dsdoctor.checks.compare import difference_lines, differences
from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import argument


def compare_command(
    *files: Annotated[Path, argument(help="Snapshots to compare, two or more.")], as_json: Json = False
) -> int:
    """Compare snapshots of machines, the minority first.

    Example: dsdoctor machine compare node1.json node2.json
    """
    if len(files) < 2:
        raise UsageError("machine compare needs two or more snapshots", hint="dsdoctor machine record FILE writes one")
    found = differences(files)
    print_result("machine compare", as_json, difference_lines(found, len(files)), (), differences=found)
    return FOUND if found else OK
