"""Every option that a benchmark gives to a command of ours, or to another benchmark, exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.run.__main__ import make_parser

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
FISH = (ROOT / "completions" / "dsdoctor.fish").read_text()
SCRIPTS = {file.name for file in BENCHMARKS}
SAME = {"dsdoctor.comm": "comm", "forked_ranks.py": "comm"}
"""What takes the options of another command."""
OPTION = re.compile(r"--[a-z][\w-]*")
Scope = ast.Module | ast.FunctionDef
Known = dict[str, str]
"""The command that a list begins, by the name of the variable that holds it."""


def options_of(command: str) -> set[str]:
    """Those that a command takes: of dsdoctor by the completions, of a benchmark by what its parser is told."""
    if command == "dsdoctor.run":
        return set(OPTION.findall(make_parser({}).format_help()))
    if command.endswith(".py"):
        return set(OPTION.findall(" ".join(words(ast.parse((ROOT / "benchmarks" / command).read_text())))))
    taken = re.findall(rf"^complete .*using_command {command}' -l ([\w-]+)", FISH, re.MULTILINE)
    return {"--help", "--version", *(f"--{name}" for name in taken)}


def words(tree: ast.AST) -> Iterator[str]:
    """The first words of each add_argument."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
            yield from (str(each.value) for each in call.args if isinstance(each, ast.Constant))


def text(node: ast.expr) -> str:
    """What stands there; of ``str(HERE / "scan.py")`` the last part."""
    constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return str(constants[-1]) if constants else ""


def given(literal: ast.List | ast.Tuple, known: Known) -> tuple[str, list[str]]:
    """The command that a list calls, "" for none of ours, and the options behind it."""
    command, options, before = "", list[str](), ""
    for element in literal.elts:
        if isinstance(element, ast.Starred):
            command = known.get(ast.unparse(element.value), command)
            continue
        word = text(element)
        if before == "-m" and word.startswith("dsdoctor"):
            command = SAME.get(word, word)
        elif before == "-m" and word.startswith("benchmarks."):
            script = word.removeprefix("benchmarks.") + ".py"
            command = SAME.get(script, script)
        elif (command == "dsdoctor" and not word.startswith("-")) or (not command and word in SCRIPTS):
            command = SAME.get(word, word)
        elif command and isinstance(element, ast.Constant) and OPTION.fullmatch(word):
            options.append(word)
        before = word
    return command, options


def calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each option that stands behind a command of ours, with the command."""
    module: Known = {}
    scopes: list[Scope] = [tree, *(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))]
    for scope in scopes:
        known = module if scope is tree else {**module}
        inside = scope.body if scope is tree else [scope]
        for node in (each for statement in inside for each in ast.walk(statement)):
            if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(node.value, ast.List | ast.Tuple):
                target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                command, options = given(node.value, known)
                if isinstance(node, ast.AugAssign) and target in known:
                    command, options = known[target], [text(each) for each in node.value.elts]
                    yield from ((command, option) for option in options if OPTION.fullmatch(option))
                elif command:
                    known[target] = command
        for node in ast.walk(scope):
            if isinstance(node, ast.List | ast.Tuple):
                command, options = given(node, known)
                yield from ((command, option) for option in options)


@pytest.mark.slow
def test_every_option_that_a_benchmark_gives_to_a_command_exists() -> None:
    found = {file.name: set(calls(ast.parse(file.read_text()))) for file in BENCHMARKS}
    known = {command: options_of(command) for each in found.values() for command, _ in each}
    wrong = [(name, *call) for name, each in found.items() for call in each if call[1] not in known[call[0]]]

    assert wrong == []
    assert {"comm", "dsdoctor.run", "memory", "build-wheel", "checkpoint", "scan.py", "overflow.py"} <= {*known}
    assert {("comm", "--json"), ("comm", "--full"), ("scan.py", "--json")} <= found["gpu.py"]
    assert ("build-wheel", "--arch") in found["build.py"]


def test_an_option_that_is_gone_is_seen() -> None:
    was = 'comm = ["-m", "dsdoctor", "comm", "--full"]\ndef parts():\n    return [python, *comm, "--save", name]'

    assert ("comm", "--save") in set(calls(ast.parse(was)))
    assert "--save" not in options_of("comm")
