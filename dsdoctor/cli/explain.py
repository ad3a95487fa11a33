"""Every rule that dsdoctor can name -> its manual page: those of the checks, of the log catalogue, and of building itself.

One rule's page needs the part that has the rule, and not the eleven of them: importing all takes a quarter of a second.
"""

import functools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from dsdoctor.cli.ending import print_result
from dsdoctor.cli.options import Json
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Follows
from dsdoctor.core.options import argument, flag
from dsdoctor.core.pages import ADDRESS, page_address
from dsdoctor.core.text import ManualPage, page_lines, parse_page
from dsdoctor.ui.terminal import flowed

if TYPE_CHECKING:
    from dsdoctor.diagnosis.models import Rule


OR = "or "
PACKAGE = Path(__file__).parents[1]
Pages: TypeAlias = Mapping[str, "str | Rule"]
"""Manual pages by their rules' ids: the text, or the log rule that one is made of."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of dsdoctor that has rules: what their pages are headed with, where their ids are written, and what reads them.

    ``module`` is what reading them imports.
    """

    where: str = ""
    written: str
    module: str
    pages: Callable[[], Pages]


def manual(rule: str) -> str:
    """The manual of a rule: a page for each place that uses the rule. Raises UsageError for a rule that does not exist."""
    found = tuple(pages(rule))
    if not found:
        import difflib

        near = difflib.get_close_matches(rule, every_rule(), n=1)
        meant = f"did you mean {near[0]}?" if near else "dsdoctor explain --list names them all"
        raise UsageError(f"there is no rule {rule!r}", hint=meant)
    return "\n\n".join("\n".join([*([f"{where}:", ""] if where else []), *page_lines(page)]) for where, page in found)


def pages(rule: str) -> Iterator[tuple[str, ManualPage]]:
    """Where a rule is used ("" for a check of the machine), and its page for that place."""
    for part in PARTS:
        looked_at = part.module in sys.modules or may_have(rule, source_of(part))
        page = part.pages().get(rule) if looked_at else None
        if isinstance(page, str):
            yield part.where, parse_page(page)
        elif page is not None:
            yield f"{part.where} ({page.stage.value})", _page_of(page)


def source_of(part: Part) -> bytes:
    """The text of a part's files; b"" where only compiled ones are installed."""
    place = PACKAGE / part.written
    files = place.rglob("*.py") if place.is_dir() else [place] if place.is_file() else []
    return b"\n".join(file.read_bytes() for file in files)


def may_have(rule: str, source: bytes) -> bool:
    """Whether a part can have a rule: its id stands there, or the name of the function that the id is made of.

    >>> may_have("late-rank", b"def late_rank(case):"), may_have("late-rank", b"late-rank-again"), may_have("late-rank", b"")
    (True, False, True)
    """
    names = (re.escape(name.encode(errors="replace")) for name in (rule, rule.replace("-", "_")))
    return not source or any(re.search(name + rb"(?![\w-])", source) for name in names)


def fix_commands(rule: str) -> tuple[str, ...]:
    """The commands on a rule's pages, each once."""
    lines = (line.strip() for _, page in pages(rule) for line in page.fix.splitlines())
    return tuple(dict.fromkeys(line.removeprefix(OR)[2:] for line in lines if line.removeprefix(OR).startswith("$ ")))


def every_rule() -> tuple[str, ...]:
    """All rule ids, sorted."""
    return tuple(sorted({rule for part in PARTS for rule in part.pages()}))


def _page_of(rule: "Rule") -> ManualPage:
    """A log rule's page: its fix is the one that a finding shows, with names in capitals for what a log would fill in."""
    from dsdoctor.diagnosis.facts import fill, placeholders

    text = fill(rule.fix, placeholders(rule.fix))
    words = [OR if step.follows is Follows.INSTEAD else "" for step in rule.steps]
    commands = [f"    {word}$ {step.printed}" for word, step in zip(words, rule.steps, strict=True)]
    fix = "\n".join([f"{text[:1].upper()}{text[1:]}.", *(["", *commands] if commands else [])])
    return replace(parse_page(rule.manual), fix=fix, since=rule.since)


@functools.cache
def _checks() -> Pages:
    from dsdoctor import checks

    return {rule: checks.manual(check) for rule, check in checks.checks().items()}


def _logs() -> Pages:
    from dsdoctor.diagnosis.catalogue.rules import RULES

    return RULES


@functools.cache
def _overflow() -> Pages:
    from dsdoctor.overflow.verdict import verdict

    return verdict.manual_pages()


@functools.cache
def _comm() -> Pages:
    from dsdoctor.comm import manual

    return manual.manual_pages()


@functools.cache
def _hang() -> Pages:
    from dsdoctor.hang import verdict

    return verdict.manual_pages()


def _building() -> Pages:
    from dsdoctor.builder import manual

    return manual.PAGES


def _configurations() -> Pages:
    from dsdoctor.config import manual

    return manual.PAGES


def _checkpoints() -> Pages:
    from dsdoctor.checkpoint import manual

    return manual.PAGES


def _diagnosis() -> Pages:
    from dsdoctor.diagnosis import manual

    return manual.PAGES


def _memory() -> Pages:
    from dsdoctor.memory import manual

    return manual.PAGES


def _push() -> Pages:
    from dsdoctor.hosts import push

    return push.MANUAL


PARTS = (
    Part(written="checks", module="dsdoctor.checks", pages=_checks),
    Part(where="In a log", written="diagnosis/catalogue", module="dsdoctor.diagnosis.catalogue.rules", pages=_logs),
    Part(
        where="In a watched training",
        written="overflow/verdict",
        module="dsdoctor.overflow.verdict.verdict",
        pages=_overflow,
    ),
    Part(where="Between ranks", written="comm", module="dsdoctor.comm.manual", pages=_comm),
    Part(where="In a training that hangs", written="hang", module="dsdoctor.hang.verdict", pages=_hang),
    Part(written="builder/manual.py", module="dsdoctor.builder.manual", pages=_building),
    Part(written="config/manual.py", module="dsdoctor.config.manual", pages=_configurations),
    Part(written="checkpoint/manual.py", module="dsdoctor.checkpoint.manual", pages=_checkpoints),
    Part(where="In a log", written="diagnosis/manual.py", module="dsdoctor.diagnosis.manual", pages=_diagnosis),
    Part(written="memory/manual.py", module="dsdoctor.memory.manual", pages=_memory),
    Part(where="In a push", written="hosts/push.py", module="dsdoctor.hosts.push", pages=_push),
)


# The command that teaches: explain.


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
