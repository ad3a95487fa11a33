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

from dsdoctor.cli.explain import pages
from dsdoctor.core.finding import FIELD
from dsdoctor.rules.book import FOLDER, LOGS, entries, log_topics, room_rules, rule_ids, words_of
from tests.each import each

PACKAGE = FOLDER.parent
ROOMS = sorted(file.stem for file in FOLDER.glob("*.toml") if file.stem != "order")
ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
SEVERITIES = {"error", "warning", "note"}
MADE_UP = ("config-optimizer-", "config-scheduler-")
"""Beginnings of ids that the code puts together: f"config-{what}-unknown"."""


@functools.cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


@functools.cache
def named() -> set[str]:
    """Ids that the code writes, and the names of its generators as ids."""
    nodes = [node for tree in sources().values() for node in ast.walk(tree)]
    written = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return written | {node.name.replace("_", "-") for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("room", ROOMS)
def test_every_rule_of_a_room_is_one_that_its_code_names(room: str) -> None:
    assert {rule for rule in room_rules(room) if rule not in named() and not rule.startswith(MADE_UP)} == set()


def test_every_finding_that_the_code_makes_has_a_rule_in_the_book() -> None:
    made = {rule for _, node in calls() for rule in strings(node.args[0])} | {
        node.args[0].value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "Finding"
        and node.func.attr in SEVERITIES
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }

    assert len(made) > 100
    assert made - set(rule_ids()) == set()


GIVEN = {"case", "evidence", "affects", "steps"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call of ``book.finding``, with the place where it stands."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "book.finding":
                yield f"{path.name}:{node.lineno}", node


def strings(node: ast.expr) -> set[str]:
    """The texts that an expression may be: a literal, or one of the literals of a choice."""
    if isinstance(node, ast.IfExp):
        return strings(node.body) | strings(node.orelse)
    assert isinstance(node, ast.Constant), (
        f"{ast.unparse(node)}: the id and the case of a finding stand where it is made"
    )
    return {str(node.value)}


def places(text: str) -> Iterator[tuple[str, bool]]:
    for place in FIELD.finditer(text):
        yield place["name"], place["without"] is None


@each("call", tuple(calls()))
def test_a_finding_is_given_the_values_that_its_words_have_places_for(call: tuple[str, ast.Call]) -> None:
    where, node = call
    given = {keyword.arg for keyword in node.keywords}
    case = next((keyword.value for keyword in node.keywords if keyword.arg == "case"), ast.Constant(value=""))
    used: set[str] = set()
    for rule, name in itertools.product(strings(node.args[0]), strings(case)):
        words = words_of(rule, name)
        texts = [words["title"], words["fix"], *(() if "steps" in given else words.get("steps", ()))]
        wanted = dict.fromkeys(place for text in texts for place in places(text))
        used |= {place for place, _ in wanted}

        assert None not in given, f"{where}: its values are named, not spread"
        assert {place for place, needed in wanted if needed} - given == set(), f"{where}: {rule} {name}"
    assert given - GIVEN - used == set(), f"{where}: values without a place"


def test_every_title_and_case_of_a_room_is_used() -> None:
    """A case that no call names is dead; a rule with a title is made by a call."""
    made: dict[str, set[str]] = {}
    for _, node in calls():
        case = next((keyword.value for keyword in node.keywords if keyword.arg == "case"), ast.Constant(value=""))
        for rule in strings(node.args[0]):
            made.setdefault(rule, set()).update(strings(case))
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
    known = {"id", "title", "means", "matters", "fix", "steps", "since", "case"}
    of_logs = {"stage", "family", "explained_by", "wording"}

    assert ID.fullmatch(rule)
    assert len(list(pages(rule))) == len(list(entries(rule))) >= 1
    for room, table in entries(rule):
        assert set(table) <= known | (of_logs if room == LOGS else set())
        for case in table.get("case", ()):
            assert set(case) <= {"name", "title", "when", "fix", "steps"}, case["name"]


def test_what_nobody_wrote_is_in_no_room() -> None:
    assert list(entries("a-rule-of-nobody")) == []


AT_ITS_LIMIT = """
import resource
from dsdoctor.core.finding import Severity
from dsdoctor.rules import book

book.read_ahead()
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
print(book.finding("ssh-missing", Severity.ERROR, count=2).title)
"""


def test_a_process_that_may_open_no_more_files_has_the_words_that_it_read_ahead() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ITS_LIMIT], capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.startswith("ssh "), done.stderr) == (True, "")
