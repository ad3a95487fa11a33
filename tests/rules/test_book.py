"""The book and the code know the same rules, each room its own; every page is whole."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.core.finding import FIELD
from dsdoctor.rules.book import entries, room_rules, rule_ids, successor, tables, words_of
from dsdoctor.rules.store import FOLDER, LOGS, Table, log_topics, order
from tests.each import each
from tests.rules.prose import sentences
from tests.rules.voice import habits, texts
from tests.source import PACKAGE, nodes, trees

ROOMS = sorted(file.stem for file in FOLDER.glob("*.toml") if file.stem != "order")
ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
SEVERITIES = {"error", "warning", "note"}


@functools.cache
def named() -> set[str]:
    """Ids that the code writes, and the names of its generators as ids."""
    every = [node for found in nodes().values() for node in found]
    written = {node.value for node in every if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return written | {node.name.replace("_", "-") for node in every if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("room", ROOMS)
def test_every_rule_of_a_room_is_one_that_its_code_names(room: str) -> None:
    assert {rule for rule in room_rules(room) if rule not in named()} == set()


def test_every_finding_that_the_code_makes_has_a_rule_in_the_book() -> None:
    made = {rule for _, node, tree in calls() for rule in strings(node.args[0], tree)} | {
        node.args[0].value
        for _, node in calls_of("Finding")
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in SEVERITIES
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }

    assert len(made) > 100
    assert made - set(rule_ids()) == set()


GIVEN = {"case", "evidence", "affects", "blames", "steps"}


@functools.cache
def calls_of(receiver: str) -> tuple[tuple[Path, ast.Call], ...]:
    """Each call of a method of what has this name."""
    return tuple(
        (path, node)
        for path, found in nodes().items()
        for node in found
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == receiver
    )


def calls() -> Iterator[tuple[str, ast.Call, ast.Module]]:
    """Each call of ``book.finding``, with the place where it stands, and its module."""
    for path, node in calls_of("book"):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "finding":
            yield f"{path.name}:{node.lineno}", node, trees()[path]


def strings(node: ast.expr, tree: ast.Module) -> set[str]:
    """The texts that an expression may be: a literal, one of a choice, or a value of a table of the module."""
    if isinstance(node, ast.IfExp):
        return strings(node.body, tree) | strings(node.orelse, tree)
    if isinstance(node, ast.Subscript):
        return table(node.value, tree)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return table(node.func.value, tree) | strings(node.args[1], tree)
    assert isinstance(node, ast.Constant), (
        f"{ast.unparse(node)}: the id and the case of a finding stand where it is made"
    )
    return {str(node.value)}


def table(name: ast.expr, tree: ast.Module) -> set[str]:
    """The values of a dictionary of texts that a module has under this name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(name):
            assert isinstance(node.value, ast.Dict), f"{ast.unparse(name)}: a table of cases is a dictionary"
            return {text for value in node.value.values for text in strings(value, tree)}
    raise AssertionError(f"{ast.unparse(name)}: no table of this module")


def places(text: str) -> Iterator[tuple[str, bool]]:
    for place in FIELD.finditer(text):
        yield place["name"], place["without"] is None


@each("call", tuple(calls()))
def test_a_finding_is_given_the_values_that_its_words_have_places_for(call: tuple[str, ast.Call, ast.Module]) -> None:
    where, node, tree = call
    given = {keyword.arg for keyword in node.keywords}
    case = next((keyword.value for keyword in node.keywords if keyword.arg == "case"), ast.Constant(value=""))
    used: set[str] = set()
    for rule, name in itertools.product(strings(node.args[0], tree), strings(case, tree)):
        words = words_of(rule, name)
        texts = [words["title"], words["fix"], *(() if "steps" in given else words.get("steps", ()))]
        wanted = dict.fromkeys(place for text in texts for place in places(text))
        used |= {place for place, _ in wanted}

        assert None not in given, f"{where}: its values are named, not spread"
        assert {place for place, needed in wanted if needed} - given == set(), f"{where}: {rule} {name}"
    assert given - GIVEN - used == set(), f"{where}: values without a place"


SHARED = {"remedy": "fix", "phrase": "text"}
"""Tables of words that several rules share, and where their words stand."""


@functools.cache
def shared() -> tuple[tuple[str, str, str, Table], ...]:
    """Each of them with its room, the kind of its table, its name and its words."""
    return tuple(
        (room, kind, table["name"], table)
        for room, kind in itertools.product(ROOMS, SHARED)
        for table in tables(room, kind)
    )


@functools.cache
def shared_calls() -> dict[tuple[str, str], list[ast.Call]]:
    """Calls that take such words, by their room and the kind of table."""
    found: dict[tuple[str, str], list[ast.Call]] = {}
    for node in (node for module in nodes().values() for node in module if isinstance(node, ast.Call)):
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in {f"book.{kind}" for kind in SHARED}:
            room = node.args[0]
            assert isinstance(room, ast.Constant), f"{ast.unparse(node)}: the room stands where it is asked"
            found.setdefault((room.value, node.func.attr), []).append(node)
    return found


@each(("room", "kind", "name", "words"), shared())
def test_shared_words_are_used_and_get_the_values_that_they_have_places_for(
    room: str, kind: str, name: str, words: Table
) -> None:
    asked = shared_calls().get((room, kind), [])
    own = [node for node in asked if isinstance(node.args[1], ast.Constant) and node.args[1].value == name]
    others = [node for node in asked if not isinstance(node.args[1], ast.Constant)]
    wanted = {
        place for text in (words[SHARED[kind]], *words.get("steps", ())) for place, needed in places(text) if needed
    }

    assert set(words) <= {"name", SHARED[kind], "steps"}
    assert [one[2] for one in shared() if one[:2] == (room, kind)].count(name) == 1
    assert own or (others and name in named() | members())
    missing = [wanted - {keyword.arg for keyword in node.keywords} for node in own or others]
    assert (any if own else all)(missing) is False, f"{room}: {kind} {name} {missing}"


@functools.cache
def members() -> set[str]:
    """The names of the members of every enum, as names of the book."""
    bodies = (node.body for each in nodes().values() for node in each if isinstance(node, ast.ClassDef))
    targets = (line.targets[0] for body in bodies for line in body if isinstance(line, ast.Assign))
    return {target.id.lower().replace("_", "-") for target in targets if isinstance(target, ast.Name)}


def test_words_that_code_asks_for_by_a_name_are_there() -> None:
    known = {one[:3] for one in shared()}
    for (room, kind), asked in shared_calls().items():
        for node in asked:
            if isinstance(node.args[1], ast.Constant | ast.IfExp):
                for name in strings(node.args[1], ast.Module(body=[], type_ignores=[])):
                    assert (room, kind, name) in known, ast.unparse(node)


def test_every_title_and_case_of_a_room_is_used() -> None:
    """A case that no call names is dead; a rule with a title is made by a call."""
    made: dict[str, set[str]] = {}
    for _, node, tree in calls():
        case = next((keyword.value for keyword in node.keywords if keyword.arg == "case"), ast.Constant(value=""))
        for rule in strings(node.args[0], tree):
            made.setdefault(rule, set()).update(strings(case, tree))
    tables = {rule: table for room in ROOMS for rule, table in room_rules(room).items()}
    cases = {(rule, case["name"]) for rule, table in tables.items() for case in table.get("case", ())}

    assert cases - {(rule, name) for rule, names in made.items() for name in names} == set()
    assert {rule for rule, table in tables.items() if "title" in table and "" not in made.get(rule, set())} == set()


def test_an_id_stands_once_in_a_room() -> None:
    ids = {room: re.findall(r'^id = "(.*)"$', (FOLDER / f"{room}.toml").read_text(), re.MULTILINE) for room in ROOMS}
    ids[LOGS] = [table["id"] for topic in log_topics().values() for table in topic["rule"]]

    assert {room: [one for one, times in Counter(found).items() if times > 1] for room, found in ids.items()} == {
        room: [] for room in ids
    }
    assert {one for found in ids.values() for one in found} == set(rule_ids())


@each("rule", rule_ids())
def test_a_rule_says_what_it_means_and_uses_no_key_that_nobody_reads(rule: str) -> None:
    known = {"id", "title", "means", "matters", "fix", "steps", "since", "formerly", "case"}
    of_logs = {"stage", "seen", "raised", "general", "explained_by", "wording"}

    assert ID.fullmatch(rule)
    for room, table in entries(rule):
        assert set(table) <= known | (of_logs if room == LOGS else set())
        for case in table.get("case", ()):
            assert set(case) <= {"name", "title", "when", "where", "fix", "steps"}, case["name"]


def test_what_nobody_wrote_is_in_no_room() -> None:
    assert list(entries("a-rule-of-nobody")) == []


@pytest.mark.slow
def test_the_findings_of_a_room_that_was_prepared_read_no_file() -> None:
    """Each room in a process of its own: what other tests and rooms have read is read there again."""
    script = """
import os, sys
from dsdoctor.core.finding import Severity
from dsdoctor.rules import book
for room in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0, room
else:
    sys.exit()
book.prepare(room)
tables = book.room_rules(room)
cases = [(rule, case) for rule in tables for case in ("", *(one["name"] for one in tables[rule].get("case", ())))]
opened = []
sys.addaudithook(lambda event, given: event in {"open", "import"} and opened.append(given[0]))
made = [book.finding(rule, Severity.ERROR, case=case) for rule, case in cases if "title" in book.words_of(rule, case)]
assert len(made) > 15, made
assert opened == [], opened
"""
    subprocess.run([sys.executable, "-c", script, "hang", "overflow", "comm"], check=True, cwd=PACKAGE.parent)


@pytest.mark.slow
def test_the_words_of_log_rules_are_plain() -> None:
    logs = [(place, text) for place, text in texts() if place.startswith(f"{LOGS}/")]

    assert len(logs) > len(log_topics())
    assert [f"{place}: {habit}" for place, text in logs for habit in habits(text)] == []


def test_an_id_of_an_earlier_release_leads_to_one_rule_or_is_known_to_have_gone() -> None:
    formerly = [old for rule in rule_ids() for _, table in entries(rule) for old in table.get("formerly", ())]
    known = [*formerly, *order()["went"]]

    assert len(formerly) > 50 and len(order()["went"]) > 70
    assert [one for one, times in Counter(known).items() if times > 1] == []
    assert set(known) & set(rule_ids()) == set()
    assert successor("data-worker-gone") == "data-worker-failed"


@pytest.mark.slow  # every module of the package is followed
def test_no_sentence_of_a_finding_stands_in_python() -> None:
    rooms = sorted(set(ROOMS) - {"diagnosis"})

    assert {room: found for room in rooms if (found := sentences(room))} == {}
