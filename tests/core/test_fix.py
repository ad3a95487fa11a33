"""No value can become shell: every line of our source that is printed to be pasted is tried with hostile values in a real shell."""

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from dsdoctor.core.finding import FIELD, Follows, Risk, Step, alternative, step
from dsdoctor.rules.book import room_rules, steps_of
from dsdoctor.rules.store import log_topics
from tests.source import PACKAGE, nodes

BOOK = "dsdoctor/rules/book.py:"
ROOMS = ("logs", *(file.stem for file in sorted((PACKAGE / "rules").glob("*.toml")) if file.stem != "order"))
MAKERS = {"step", "alternative"}
HOSTILE = (
    "1'; touch P; echo '",
    '"; touch P; "',
    "$(touch P)",
    "`touch P`",
    "DS_BUILD_FUSED$(touch P)",
    "HOME[$(touch P)]",
    "x; touch P #",
    "x && touch P",
    "x | touch P",
    "x > P",
    "~/../P",
    "*",
    "\\",
    "\\'; touch P; '",
    "a b\tc",
    "-oProxyCommand=touch P",
    "x\ntouch P\n",
    "x\rtouch P",
    "!!",
    "{a,b}",
    "\u202etouch P",
    "\udce9; touch P",
    "",
)


@functools.cache
def calls() -> tuple[tuple[str, ast.Call], ...]:
    """Every call of ``step`` and ``instead`` in the package, by the module that imports them."""
    found = []
    for path, every in nodes().items():
        imported = {
            name.name
            for node in every
            if isinstance(node, ast.ImportFrom) and node.module == "dsdoctor.core.finding"
            for name in node.names
        }
        here = [
            node
            for node in every
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS & imported
        ]
        found += [(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", node) for node in here]
    return tuple(found)


@pytest.fixture(scope="module")
def templates() -> tuple[str, ...]:
    """Every line that can be printed: those of the code, and those of the book of rules."""
    written = [node.args[0] for _, node in calls()]
    in_code = [node.value for node in written if isinstance(node, ast.Constant)]
    return tuple(dict.fromkeys([*in_code, *(one.template for one in book_steps())]))


def book_steps() -> Iterator[Step]:
    tables = [table for room in ROOMS for table in room_rules(room).values()]
    tables += [wording for table in tables for wording in table.get("wording", ())]
    tables += log_topics()["regressions"]["regression"]
    return (one for table in tables for one in steps_of(table))


def test_a_step_is_a_literal_of_our_own_source_and_so_is_its_note() -> None:
    for place, node in calls():
        if place.startswith(BOOK):  # it reads the lines of TOML, which is our own source too
            continue
        assert len(node.args) == 1, place
        assert isinstance(node.args[0], ast.Constant), f"{place}: the line is a literal; values have names in it"
        for keyword in node.keywords:
            if keyword.arg == "note":
                parts = (keyword.value.body, keyword.value.orelse) if isinstance(keyword.value, ast.IfExp) else None
                assert all(isinstance(part, ast.Constant) for part in parts or (keyword.value,)), place
            elif keyword.arg is not None:
                assert f"{{{keyword.arg}" in node.args[0].value, f"{place}: {keyword.arg} has no place in the line"


def test_steps_are_made_in_one_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path != PACKAGE / "core" / "finding.py":
            assert not [line for line in path.read_text().splitlines() if re.search(r"\bStep\(", line)], path


def test_a_place_stands_outside_of_quotes(templates: tuple[str, ...]) -> None:
    assert len(templates) > 100
    for template in templates:
        marked = FIELD.sub("\x00", template)
        assert "\x00" not in quoted_parts(marked), template


def quoted_parts(line: str) -> str:
    """What stands inside of quotes; ``$( )`` begins anew, in double quotes too.

    >>> quoted_parts('a "b $(c "d") e" f')
    'b d e'
    """
    inside, stack = "", [""]
    for place, char in enumerate(line):
        before = line[place - 1 : place]
        if char == "'" and stack[-1] != '"':
            stack.pop() if stack[-1] == "'" else stack.append("'")
        elif char == '"' and stack[-1] != "'":
            stack.pop() if stack[-1] == '"' else stack.append('"')
        elif char == "(" and before == "$" and stack[-1] != "'":
            stack.append("(")
        elif char == ")" and stack[-1] == "(":
            stack.pop()
        elif stack[-1] in {"'", '"'}:
            inside += char if char != "$" else ""
    return inside


def harm(lines: list[str], folder: Path) -> list[str]:
    """Run lines in a real shell in which only ``touch`` is a program, and give back what it left."""
    programs, home = folder / "bin", folder / "home"
    programs.mkdir()
    home.mkdir()
    (programs / "touch").symlink_to(shutil.which("touch") or "")
    script = folder / "script"
    blocks = (f"( {{ {line}\n}} ) </dev/null >/dev/null 2>&1" for line in lines)
    head = ("command_not_found_handle() { return 0; }", "set +H")
    script.write_text("\n".join([*head, *blocks, "echo whole"]), encoding="utf-8")
    environment = {"PATH": str(programs), "HOME": str(home), "LANG": "C.UTF-8"}
    done = subprocess.run(
        ["/bin/bash", "--norc", script], cwd=home, env=environment, text=True, capture_output=True, check=True
    )
    assert done.stdout == "whole\n", done.stderr[-2000:]
    return sorted(path.name for path in folder.rglob("P*"))


@pytest.mark.slow
def test_no_value_becomes_shell(templates: tuple[str, ...], tmp_path: Path) -> None:
    """Each line with a place x each hostile value."""
    lines = []
    for template, hostile in product(templates, HOSTILE):
        if names := {found["name"] for found in FIELD.finditer(template)}:
            lines.append(Step(template=template, values=tuple((name, hostile) for name in names)).line)
    assert len(lines) > 1000

    assert harm(lines, tmp_path) == []


@pytest.mark.parametrize("line", ["ping x; touch P", "export A=$(touch P)", "unset 'HOME[$(touch P)]'", "ls x > P"])
def test_the_shell_of_these_tests_would_show_harm(line: str, tmp_path: Path) -> None:
    assert harm([line], tmp_path) == ["P"]


def test_a_hostile_value_is_one_word_or_is_not_there() -> None:
    for hostile in HOSTILE:
        argv = step("ssh-keygen -R {host}", host=hostile).argv
        assert argv in (("ssh-keygen", "-R", hostile), ("ssh-keygen", "-R", "HOST"))


def test_the_name_of_a_variable_is_one() -> None:
    assert step("unset {variable}", variable="NCCL_X").line == "unset NCCL_X"
    assert step("unset {variable}", variable="a[$(id)]").line == "unset VARIABLE"


def test_platform_and_risk_are_those_of_the_program() -> None:
    install = step("sudo apt-get install libaio-dev")
    assert (install.platform, install.risks) == ("Debian, Ubuntu", (Risk.ROOT,))
    assert step("rm -- {lock}", lock="x").risks == (Risk.DELETES,)
    assert step("python -m pip install -U torch").risks == (Risk.REPLACES,)
    assert alternative("conda install libaio").follows is Follows.ALTERNATIVE


def test_what_takes_a_shell_has_no_argv() -> None:
    lines = ('eval "$(x)"', "export A=1", "A=1 b", "a | b", "ls ~/x", "a > b", "unset A", "cd x")
    assert [step(line).argv for line in lines] == [None] * len(lines)
    assert step("pip install 'ninja>=1.13'").argv == ("pip", "install", "ninja>=1.13")


def test_a_step_that_deletes_comes_after_one_that_shows_who_uses_it() -> None:
    for place, node in calls():
        if place.startswith(BOOK):
            continue
        template = node.args[0].value
        if Risk.DELETES in Step(template=template).risks and "{files}" not in template:
            module = place.rpartition(":")[0]
            near = [
                other for where, other in calls() if where.startswith(module) and 0 < node.lineno - other.lineno < 4
            ]
            assert any("fuser" in other.args[0].value for other in near), place
