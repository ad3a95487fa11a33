"""The book of rules: what each rule means, why it matters, how to fix it, and by which wordings a log's rule is known.

The words stand in TOML beside this module, and nowhere else: ``ROOM.toml`` has the pages of a room's findings, ``logs/TOPIC.toml``
the rules of logs, ``order.toml`` their order. A rule in TOML::

    [[rule]]
    id = "host-named-twice"
    title = "{host} stands {count} times in {hostfile|the hostfile}"
    means = "What it means, in a line; then more, where there is more."
    matters = "What goes wrong for the user, and when."
    fix = "one or two sentences, as they stand behind a finding's arrow"
    steps = ["a command with a {place} for a value  # its note", "or: another way", "on {host}: one for another host"]
    since = "0.2"
    formerly = ["ids-of-earlier-releases"]

    [[rule.case]]
    name = "other-slots"
    title = "the same finding in other words; a case has a title, a fix and steps of its own, or its rule's"
    when = "how its fix is introduced on the page; without it the page does not show this fix"

Code names a rule, a case and values, and never writes the words: ``finding("host-named-twice", Severity.ERROR, host=...)``.
What several rules say has a table of its own, under a name: ``[[remedy]]`` is a fix with its steps, ``[[phrase]]`` a part of
a sentence. Evidence stays in code where it says what was measured; what explains it, and what to do, stands here.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from dsdoctor.core.finding import FIELD, Finding, Fix, Follows, Severity, Step, step
from dsdoctor.core.text import ManualPage
from dsdoctor.rules.store import ID, LOGS, Table, entries_in, files_of, order, parse, read, texts_of

Value = str | int | Iterable[str] | None
"""What fills a place: a list is joined by ", " in a sentence and is several words in a command; None and "" leave it out."""
Filling = str | int | tuple[str, ...]
NOTHING: Mapping[str, Filling] = {}
FIRST_VERSION = "0.1"
ALTERNATIVE = "or: "
ON_HOST = "on {host}: "
"""Begins a command that is typed on another host: quoted once for the shell there, and as a whole for the one here."""
SSH = "ssh {host} {remote}"
OR = "or "
HEADER = re.compile(r"^\[\[(\w+)\]\]$", re.MULTILINE)
NAME = re.compile(r'^name = "([\w-]+)"$', re.MULTILINE)
SHARED = {"remedy", "phrase"}


def finding(
    rule: str,
    severity: Severity,
    /,
    *,
    case: str = "",
    evidence: Iterable[str] = (),
    affects: Iterable[str] = (),
    blames: Iterable[int] = (),
    steps: Iterable[Step] | None = None,
    **values: Value,
) -> Finding:
    """A finding in the book's words, with the values in their places.

    ``case`` names the words to take, "" the rule's own. ``blames``: the ranks that cause it. ``steps``: commands that only
    the caller can put together; by default the book's. Raises LookupError for a rule or a case that the book does not have.

    >>> finding("node-folder-left", Severity.WARNING, folder="/tmp/x").title
    'the folder of the copy could not be removed: /tmp/x'
    """
    given = {name: _filling(value) for name, value in values.items() if value is not None and value != ""}
    words = words_of(rule, case)
    text = fill(words.get("fix", ""), given)
    return Finding(
        rule=rule,
        severity=severity,
        title=fill(words["title"], given),
        evidence=tuple(evidence),
        affects=tuple(affects),
        ranks=tuple(blames),
        fix=Fix(text=text, steps=steps_of(words, given) if steps is None else tuple(steps)) if text else None,
    )


def remedy(room: str, name: str, /, **values: Value) -> Fix:
    """What to do, where several rules say the same: a ``[[remedy]]`` of a room.

    >>> remedy("hang", "signal").text
    'find out who should send that signal'
    """
    words = _named(room, "remedy", name)
    given = {name: _filling(value) for name, value in values.items() if value is not None and value != ""}
    return Fix(text=fill(words["fix"], given), steps=steps_of(words, given))


def phrase(room: str, name: str, /, **values: Value) -> str:
    """A part of a sentence that several rules or reports say: a ``[[phrase]]`` of a room."""
    given = {name: _filling(value) for name, value in values.items() if value is not None and value != ""}
    return fill(_named(room, "phrase", name)["text"], given)


def _filling(value: str | int | Iterable[str]) -> Filling:
    return value if isinstance(value, (str, int)) else tuple(value)


def fill(text: str, values: Mapping[str, Filling]) -> str:
    """A sentence with ``{name}`` and ``{name|text without it}`` filled; a name without a value stands in capitals.

    >>> fill("nvcc is CUDA {nvcc|unknown}, torch {torch}: {op}", {"torch": "2.1"})
    'nvcc is CUDA unknown, torch 2.1: OP'
    """

    def filled(place: re.Match[str]) -> str:
        value = values.get(place["name"], place["name"].upper() if place["without"] is None else place["without"])
        return ", ".join(value) if isinstance(value, tuple) else str(value)

    return FIELD.sub(lambda place: f"{place['start'] or ''}{filled(place)}", text)


def rule_ids() -> tuple[str, ...]:
    """The id of every rule, sorted."""
    return tuple(sorted({rule for room in order()["rooms"] for text in _rules_in(room) for rule in ID.findall(text)}))


def entries(rule: str) -> Iterator[tuple[str, Table]]:
    """Each room that has the rule, with its table there. Nothing else of the book is parsed."""
    for room, text in texts_of(rule):
        yield room, parse(f"[[rule]]{text}")["rule"][0]


def successor(rule: str) -> str | None:
    """The rule of which an earlier release's rule is a part now; None where there is none.

    >>> successor("data-worker-gone"), successor("data-worker-failed")
    ('data-worker-failed', None)
    """
    texts = (text for room in order()["rooms"] for text in _rules_in(room) if f'"{rule}"' in text)
    tables = (parse(f"[[rule]]{text}")["rule"][0] for text in texts)
    return next((table["id"] for table in tables if rule in table.get("formerly", ())), None)


def went(rule: str) -> bool:
    """Whether an earlier release had this rule, and the general answer has its place now."""
    return rule in order()["went"]


def titles_have(rule: str, place: str) -> bool:
    """Whether every title of a rule has a place for a value of this name.

    >>> titles_have("op-cannot-be-built", "op"), titles_have("libaio-missing", "op")
    (True, False)
    """
    tables = [one for _, table in entries(rule) for one in (table, *table.get("case", ()), *table.get("wording", ()))]
    titles = [table["title"] for table in tables if "title" in table]
    return bool(titles) and all(any(found["name"] == place for found in FIELD.finditer(title)) for title in titles)


def heading(room: str) -> str:
    """What heads a page of a room; nothing where every reader knows."""
    return str(order()["headings"].get(room, ""))


def room_rules(room: str) -> dict[str, Table]:
    """The rules of a room by their ids, in the book's order."""
    return {table["id"]: table for file in files_of(room) for table in _parsed(file).get("rule", ())}


def tables(room: str, name: str) -> tuple[Table, ...]:
    """The other tables of a room under a name: words that are no rule's, such as what ssh's own message means."""
    return tuple(table for file in files_of(room) for table in _parsed(file).get(name, ()))


def prepare(room: str) -> None:
    """Read the words of a room's findings now: a watch makes them later, where no file may be read."""
    rooms = order()["rooms"]
    for before in rooms[: rooms.index(room) + 1]:
        if before != LOGS:
            _rules_in(before)
            _shared_in(before)


def page(table: Table) -> ManualPage:
    """The manual page of a rule: its steps stand as commands below the fix, then the fixes of its cases."""
    cases = [{**table, **case} for case in table.get("case", ()) if "when" in case]
    fixes = [_fix_text(table), *(f"{case['when']}, {_fix_text(case, begins=False)}" for case in cases)]
    since = table.get("since", FIRST_VERSION)
    return ManualPage(means=table["means"], why=table.get("matters", ""), fix="\n\n".join(fixes), since=since)


def _fix_text(table: Table, *, begins: bool = True) -> str:
    """The fix as one or two whole sentences, and its commands; what a finding would fill in stands in capitals."""
    text = fill(table["fix"], {})
    sentence = f"{text[:1].upper()}{text[1:]}" if begins else text
    end = "" if text.endswith((".", "!", "?", ":")) else "."
    lines = [f"    {OR if one.follows is Follows.ALTERNATIVE else ''}$ {one.printed}" for one in steps_of(table)]
    return "\n".join([f"{sentence}{end}", *(["", *lines] if lines else [])])


def steps_of(table: Table, values: Mapping[str, Filling] = NOTHING) -> tuple[Step, ...]:
    """The steps of a rule, a wording or a regression, with these values in their places."""
    return tuple(_step(line, values) for line in table.get("steps", ()))


def _step(line: str, values: Mapping[str, Filling]) -> Step:
    command, _, note = line.partition("  # ")
    follows = Follows.ALTERNATIVE if command.startswith(ALTERNATIVE) else Follows.THEN
    command = command.removeprefix(ALTERNATIVE)
    if command.startswith(ON_HOST):
        there = _filled_step(command.removeprefix(ON_HOST), values)
        command, values = SSH, {**values, "remote": there.line}
    return replace(_filled_step(command, values), follows=follows, note=note)


def _filled_step(template: str, values: Mapping[str, Filling]) -> Step:
    """A command with those values for which it has a place."""
    names = dict.fromkeys(place["name"] for place in FIELD.finditer(template))
    words = ((name, values[name]) for name in names if name in values)
    return replace(step(template), values=tuple((name, v if isinstance(v, tuple) else str(v)) for name, v in words))


@functools.cache
def words_of(rule: str, case: str = "") -> Table:
    """The title, the fix and the steps of a rule, or of one of its cases. Raises LookupError if there is none."""
    # the logs' rules last: they are by far the most, and few of them are findings of code
    rooms = sorted(order()["rooms"], key=lambda room: room == LOGS)
    text = next((text for room in rooms for text in _rules_in(room) if rule in ID.findall(text)), None)
    if text is None:
        raise LookupError(f"the book has no rule {rule}")
    table: Table = parse(f"[[rule]]{text}")["rule"][0]
    if not case:
        return table
    found = next((one for one in table.get("case", ()) if one["name"] == case), None)
    if found is None:
        raise LookupError(f"{rule} has no case {case}")
    return {**table, **found}


@functools.cache
def _rules_in(room: str) -> tuple[str, ...]:
    return tuple(text for file in files_of(room) for text in entries_in(file))


@functools.cache
def _named(room: str, kind: str, name: str) -> Table:
    """A table that is no rule. Raises LookupError if there is none of this name."""
    for of_kind, text in _shared_in(room):
        if of_kind == kind and NAME.findall(text) == [name]:
            table: Table = parse(f"[[{kind}]]{text}")[kind][0]
            return table
    raise LookupError(f"the book has no {kind} {name} of {room}")


@functools.cache
def _shared_in(room: str) -> tuple[tuple[str, str], ...]:
    """The text of each remedy and phrase of a room, with its kind; nothing is parsed."""
    parts = [HEADER.split(read(file)) for file in files_of(room)]
    return tuple(each for part in parts for each in zip(part[1::2], part[2::2], strict=True) if each[0] in SHARED)


@functools.cache
def _parsed(file: str) -> Table:
    return parse(read(file))
