"""The exit statuses at the end of each command's help: those of the README, once, and those that the command's code can give."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.cli.app import COMMANDS
from dsdoctor.cli.ending import FAILED, FOUND, IMPOSSIBLE
from dsdoctor.cli.statuses import GENERAL, OF_GROUP, OWN, SIGNAL, SLOW, UNDECIDED, statuses_line, statuses_of
from tests.cli.runner import run
from tests.import_graph import Graph, read_graph
from tests.source import PACKAGE, trees

ROOT = Path(__file__).parents[2]
NUMBERS = {"FOUND": FOUND, "IMPOSSIBLE": IMPOSSIBLE, "FAILED": FAILED, "SLOW": SLOW, "UNDECIDED": UNDECIDED}
NO_FETCH = {"machine record", "wheel index"}
"""They import what can fetch: machine record goes on without what could not be fetched, and wheel index joins what is there."""


def module_of(command: str) -> str:
    """Where a command's function stands: those of cache stand in one file."""
    name = "cache" if command.startswith("cache ") else command
    return f"dsdoctor.cli.{name.replace(' ', '.').replace('-', '_')}"


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def given_by(command: str) -> Iterator[int]:
    """The statuses that the functions of a command's file return, or keep to return, by name."""
    functions = [node for node in ast.walk(trees()[file_of(module_of(command))]) if isinstance(node, ast.FunctionDef)]
    others = {f"{other.split()[-1]}_command" for other in OWN if " " in other} - {f"{command.split()[-1]}_command"}
    for function in functions:
        if function.name not in others:
            yield from (
                NUMBERS[node.id] for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in NUMBERS
            )


def reached(graph: Graph, module: str) -> set[str]:
    found, left = {module}, [module]
    while left:
        more = graph.get(left.pop(), frozenset()) - found
        found |= more
        left += more
    return found


def test_every_command_has_its_statuses_and_none_that_its_code_does_not_give() -> None:
    assert set(OWN) == {name for name in COMMANDS if not COMMANDS[name].place.endswith(":app")}
    wrong = []
    for command in OWN:
        told, given = set(statuses_of(command)), set(given_by(command))
        if not given <= told or not {0, 2, 3, 5} <= told:
            wrong.append((command, "lacks", given - told))
        elif 1 in told - given:
            wrong.append((command, "never ends with", {1}))
        if (SLOW in told) != (command in {"comm", "diagnose"}):
            wrong.append((command, "slow or undecided", told))
    assert wrong == []


@pytest.mark.slow
def test_a_command_ends_with_4_where_what_it_uses_can_fail_so() -> None:
    graph = read_graph(PACKAGE, trees())
    failing = {
        module for module in graph if file_of(module).is_file() and "raise BuildFailed" in file_of(module).read_text()
    }
    wrong = [
        command
        for command in OWN
        if (FAILED in statuses_of(command))
        != (
            FAILED in given_by(command)
            or (command not in NO_FETCH and bool(reached(graph, module_of(command)) & failing))
        )
    ]

    assert wrong == []


@pytest.mark.slow
def test_each_help_ends_with_the_statuses_of_its_command_and_tells_them_nowhere_else() -> None:
    wrong = []
    for command in ("", *COMMANDS):
        words = command.split() or ("help", "--all")
        told = " ".join(run(*words, *(["--help"] if command else []), COLUMNS="500").stdout.split())
        group = command and COMMANDS[command].place.endswith(":app")
        line = OF_GROUP if group else statuses_line(statuses_of(command) if command else GENERAL)
        if not told.endswith(line) or told.count("Exit status:") != (0 if group else 1):
            wrong.append((command, told[-300:]))

    assert wrong == []


def test_the_statuses_are_those_of_the_readme() -> None:
    table = (ROOT / "README.md").read_text().split("## Exit status")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (\d|128 \+ N) \| (.*) \|$", table, re.MULTILINE))

    assert [int(number) for number in rows if number.isdigit()] == sorted(GENERAL)
    assert (rows["3"].split(";")[0], rows["4"]) == (GENERAL[IMPOSSIBLE], GENERAL[FAILED])
    assert SIGNAL.startswith("128+N")
