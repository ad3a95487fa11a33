"""The command that teaches: explain. It reads the book of rules, and of the book only the files that name the rule."""

import shutil
from collections.abc import Iterator
from typing import Annotated

from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import argument, flag
from dsdoctor.core.release import ADDRESS, page_address
from dsdoctor.core.text import ManualPage, nearest, page_lines
from dsdoctor.rules import book
from dsdoctor.rules.store import LOGS
from dsdoctor.ui.terminal import flowed

WIDTH = 100
"""Columns: a page that is read is no wider."""


def manual(rule: str) -> str:
    """The manual of a rule: a page for each place that uses the rule. Raises UsageError for a rule that does not exist."""
    found = tuple(pages(rule))
    if not found and book.went(rule):
        raise UsageError(
            f"{rule} is no longer a rule: diagnose now quotes such messages in a general answer",
            hint="dsdoctor explain unexplained-failure",
        )
    if not found:
        near = nearest(rule, book.rule_ids())
        meant = f"did you mean {near}?" if near else "dsdoctor explain --list names them all"
        raise UsageError(f"there is no rule {rule!r}", hint=meant)
    return "\n\n".join("\n".join([*([f"{where}:", ""] if where else []), *page_lines(page)]) for where, page in found)


def pages(rule: str) -> Iterator[tuple[str, ManualPage]]:
    """Where a rule is used ("" for a check of the machine), and its page for that place."""
    for room, table in book.entries(rule):
        where = book.heading(room)
        yield f"{where} ({table['stage']})" if room == LOGS else where, book.page(table)


def fix_commands(rule: str) -> tuple[str, ...]:
    """The commands on a rule's pages, each once."""
    lines = (line.strip() for _, page in pages(rule) for line in page.fix.splitlines())
    return tuple(
        dict.fromkeys(line.removeprefix(book.OR)[2:] for line in lines if line.removeprefix(book.OR).startswith("$ "))
    )


def explain_command(
    rule: Annotated[str | None, argument(help="The id in brackets after a finding.", offers=book.rule_ids)] = None,
    /,
    *,
    listed: Annotated[bool, flag(name="--list", help="List every rule and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Explain a rule: what it means, why it matters, how to fix it.

    Example: dsdoctor explain cuda-home-wrong
    """
    if listed:
        print_result("explain", as_json, book.rule_ids(), (), rules=book.rule_ids())
        return
    if rule is None:
        raise UsageError("name a rule", hint="dsdoctor explain --list names them all")
    new = book.successor(rule) if not any(pages(rule)) else None
    rule, formerly = new or rule, rule if new else None
    page, address = manual(rule), page_address(rule)
    # where nobody knows where the pages are, half an address helps nobody
    where = ["", address] if ADDRESS else []
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    lines = [
        f"{rule} (formerly {formerly})" if formerly else rule,
        "",
        *flowed(page.splitlines(), min(width, WIDTH)),
        *where,
    ]
    extra = {"formerly": formerly} if formerly else {}
    print_result("explain", as_json, lines, (), rule=rule, manual=page, url=address, fixes=fix_commands(rule), **extra)
