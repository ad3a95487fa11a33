"""The command that teaches: explain."""

import shutil
from typing import Annotated

from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.commands.explain import every_rule, fix_commands, manual
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import argument, flag
from dsdoctor.core.pages import ADDRESS, page_address
from dsdoctor.ui.terminal import flowed

WIDTH = 100
"""Columns: a page that is read is no wider."""


def explain_command(
    rule: Annotated[str | None, argument(help="The id in brackets behind a finding.", offers=every_rule)] = None,
    /,
    *,
    listed: Annotated[bool, flag(name="--list", help="List every rule and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Print the manual page of a rule: what it means, why it matters, how to fix it.

    Example: dsdoctor explain cuda-home-wrong
    """
    if listed:
        print_result("explain", as_json, every_rule(), (), rules=every_rule())
        return
    if rule is None:
        raise UsageError("name a rule", hint="dsdoctor explain --list names them all")
    page, address = manual(rule), page_address(rule)
    # where nobody knows where the pages are, half an address helps nobody
    where = ["", address] if ADDRESS else []
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    lines = [rule, "", *flowed(page.splitlines(), min(width, WIDTH)), *where]
    print_result("explain", as_json, lines, (), rule=rule, manual=page, url=address, fixes=fix_commands(rule))
