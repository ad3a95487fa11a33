"""The book of rules: what each rule means, why it matters, how to fix it, and by which wordings a log's rule is known.

The words stand in TOML beside this module, and nowhere else: ``ROOM.toml`` has the pages of a room's findings, ``logs/TOPIC.toml``
the rules of logs, ``order.toml`` their order. A rule in TOML::

    [[rule]]
    id = "host-named-twice"
    means = "What it means, in a line; then more, where there is more."
    matters = "What goes wrong for the user, and when."
    fix = "One or two sentences."
    steps = ["a command that can be pasted  # its note", "or: another way to do the same"]
    since = "0.2"
"""

import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsdoctor.core.finding import Follows, Step, instead, step
from dsdoctor.core.text import ManualPage

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

Table = Mapping[str, Any]
FOLDER = Path(__file__).parent
LOGS = "logs"
"""The folder of the rules of logs, and the place of their pages among the rooms'."""
FIRST_VERSION = "0.1"
ALTERNATIVE = "or: "
OR = "or "
ENTRY = re.compile(r"^\[\[(?:rule|regression)\]\]$", re.MULTILINE)
ID = re.compile(r'^id = "([\w-]+)"$', re.MULTILINE)


def rule_ids() -> tuple[str, ...]:
    """The id of every rule, sorted."""
    return tuple(sorted({rule for _, text in _entries() for rule in ID.findall(text)}))


def entries(rule: str) -> Iterator[tuple[str, Table]]:
    """Each room that has the rule, with its table there. Nothing else of the book is parsed."""
    for room, text in _entries():
        if rule in ID.findall(text):
            yield room, _parse(f"[[rule]]{text}")["rule"][0]


def heading(room: str) -> str:
    """What heads a page of a room; nothing where every reader knows."""
    return str(_order()["headings"].get(room, ""))


def room_rules(room: str) -> dict[str, Table]:
    """The rules of a room by their ids, in the book's order."""
    return {table["id"]: table for file in _files(room) for table in _parse(_read(file)).get("rule", ())}


def log_topics() -> dict[str, Table]:
    """The whole tables of the logs' topics, in their order: the first rule that explains a line counts."""
    return {file.stem: _parse(_read(file)) for file in _files(LOGS)}


def page(table: Table) -> ManualPage:
    """The manual page of a rule: its steps stand as commands below the fix."""
    lines = [f"    {OR if one.follows is Follows.INSTEAD else ''}$ {one.printed}" for one in steps_of(table)]
    fix = "\n".join([table["fix"], *(["", *lines] if lines else [])])
    since = table.get("since", FIRST_VERSION)
    return ManualPage(means=table["means"], why=table.get("matters", ""), fix=fix, since=since)


def steps_of(table: Table) -> tuple[Step, ...]:
    """The steps of a rule, a wording or a regression."""
    return tuple(_step(line) for line in table.get("steps", ()))


def _step(line: str) -> Step:
    command, _, note = line.partition("  # ")
    if command.startswith(ALTERNATIVE):
        return instead(command.removeprefix(ALTERNATIVE), note=note)
    return step(command, note=note)


@functools.cache
def _entries() -> tuple[tuple[str, str], ...]:
    """Each rule's text behind its ``[[rule]]``, with its room."""
    files = [(room, file) for room in _order()["rooms"] for file in _files(room)]
    return tuple((room, text) for room, file in files for text in ENTRY.split(_read(file))[1:])


@functools.cache
def _order() -> Table:
    return _parse(_read(FOLDER / "order.toml"))


def _files(room: str) -> list[Path]:
    return [FOLDER / LOGS / f"{topic}.toml" for topic in _order()[LOGS]] if room == LOGS else [FOLDER / f"{room}.toml"]


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _parse(text: str) -> Table:
    table: Table = toml.loads(text)
    return table
