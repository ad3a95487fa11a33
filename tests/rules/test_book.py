"""The book and the code know the same rules, each room its own; every page is whole."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from dsdoctor.cli.explain import pages
from dsdoctor.rules.book import FOLDER, LOGS, entries, log_topics, room_rules, rule_ids
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
    made = {
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


def test_an_id_stands_once_in_a_room() -> None:
    ids = {room: re.findall(r'^id = "(.*)"$', (FOLDER / f"{room}.toml").read_text(), re.MULTILINE) for room in ROOMS}
    ids[LOGS] = [table["id"] for topic in log_topics().values() for table in topic["rule"]]

    assert {room: [one for one, times in Counter(found).items() if times > 1] for room, found in ids.items()} == {
        room: [] for room in ids
    }
    assert {one for found in ids.values() for one in found} == set(rule_ids())


@each("rule", rule_ids())
def test_a_rule_says_what_it_means_and_uses_no_key_that_nobody_reads(rule: str) -> None:
    known = {"id", "means", "matters", "fix", "steps", "since"}
    of_logs = {"stage", "seen", "raised", "title", "family", "explained_by", "wording"}

    assert ID.fullmatch(rule)
    assert len(list(pages(rule))) == len(list(entries(rule))) >= 1
    for room, table in entries(rule):
        assert set(table) <= known | (of_logs if room == LOGS else set())


def test_what_nobody_wrote_is_in_no_room() -> None:
    assert list(entries("a-rule-of-nobody")) == []
