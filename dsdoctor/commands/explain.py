"""Every rule that dsdoctor can name -> its manual page: those of the checks, of the log catalogue, and of building itself."""

import difflib
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor import checks
from dsdoctor.builder import manual as building
from dsdoctor.checkpoint import manual as checkpoints
from dsdoctor.comm import manual as comm
from dsdoctor.config import manual as configurations
from dsdoctor.core.errors import UsageError
from dsdoctor.core.fix import Follows
from dsdoctor.core.manual import ManualPage, page_lines, parse_page
from dsdoctor.diagnosis import manual as logs
from dsdoctor.diagnosis.catalogue.rules import RULES
from dsdoctor.diagnosis.models import Rule
from dsdoctor.diagnosis.templates import fill, placeholders
from dsdoctor.hang import verdict as hang
from dsdoctor.memory import manual as memory
from dsdoctor.overflow.verdict import verdict
from dsdoctor.push import errors as problems

OR = "or "


def manual(rule: str) -> str:
    """The manual of a rule: a page for each place that uses the rule. Raises UsageError for a rule that does not exist."""
    found = tuple(pages(rule))
    if not found:
        near = difflib.get_close_matches(rule, every_rule(), n=1)
        meant = f"did you mean {near[0]}?" if near else "dsdoctor explain --list names them all"
        raise UsageError(f"there is no rule {rule!r}", hint=meant)
    return "\n\n".join("\n".join([*([f"{where}:", ""] if where else []), *page_lines(page)]) for where, page in found)


def pages(rule: str) -> Iterator[tuple[str, ManualPage]]:
    """Where a rule is used ("" for a check of the machine), and its page for that place."""
    if check := checks.checks().get(rule):
        yield "", parse_page(checks.manual(check))
    if log_rule := RULES.get(rule):
        yield f"In a log ({log_rule.stage.value})", _page_of(log_rule)
    if page := verdict.manual_pages().get(rule):
        yield "In a watched training", parse_page(page)
    if page := comm.manual_pages().get(rule):
        yield "Between ranks", parse_page(page)
    if page := hang.manual_pages().get(rule):
        yield "In a training that hangs", parse_page(page)
    if page := building.PAGES.get(rule):
        yield "", parse_page(page)
    if page := configurations.PAGES.get(rule):
        yield "", parse_page(page)
    if page := checkpoints.PAGES.get(rule):
        yield "", parse_page(page)
    if page := logs.PAGES.get(rule):
        yield "In a log", parse_page(page)
    if page := memory.PAGES.get(rule):
        yield "", parse_page(page)
    if page := problems.MANUAL.get(rule):
        yield "In a push", parse_page(page)


def fix_commands(rule: str) -> tuple[str, ...]:
    """The commands on a rule's pages, each once."""
    lines = (line.strip() for _, page in pages(rule) for line in page.fix.splitlines())
    return tuple(dict.fromkeys(line.removeprefix(OR)[2:] for line in lines if line.removeprefix(OR).startswith("$ ")))


def every_rule() -> tuple[str, ...]:
    """All rule ids, sorted."""
    return tuple(
        sorted(
            {
                *checks.checks(),
                *RULES,
                *verdict.manual_pages(),
                *comm.manual_pages(),
                *hang.manual_pages(),
                *building.PAGES,
                *configurations.PAGES,
                *checkpoints.PAGES,
                *logs.PAGES,
                *memory.PAGES,
                *problems.MANUAL,
            }
        )
    )


def _page_of(rule: Rule) -> ManualPage:
    """A log rule's page: its fix is the one that a finding shows, with names in capitals for what a log would fill in."""
    text = fill(rule.fix, placeholders(rule.fix))
    words = [OR if step.follows is Follows.INSTEAD else "" for step in rule.steps]
    commands = [f"    {word}$ {step.printed}" for word, step in zip(words, rule.steps, strict=True)]
    fix = "\n".join([f"{text[:1].upper()}{text[1:]}.", *(["", *commands] if commands else [])])
    return replace(parse_page(rule.manual), fix=fix, since=rule.since)
