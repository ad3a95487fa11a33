"""Each rule of logs names its reason: a public thread that shows its line, or the installed source that prints it."""

import ast
import functools
import mmap
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.rules.store import Table, log_topics
from tests.each import each

RULES = {
    table["id"]: table for topic in log_topics().values() for table in topic["rule"] if not table.get("general", False)
}
RAISED = {rule: table["raised"] for rule, table in RULES.items() if "raised" in table}
THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+")
SOURCE = re.compile(r"[\w/.+-]+\.(?:py:[\w.]+|so|h)")
WORD = re.compile(r"\w+")
RUN = 4
"""So many words in a row, in the source and in a sample, are the same message."""
SHORTEST = 16
"""Fewer words in a row are the same message where they have so many letters."""


def samples(table: Table) -> str:
    """All samples of a rule, regressions included."""
    rows = [*table.get("wording", ())]
    if table["id"] == "known-regression":
        rows += log_topics()["regressions"]["regression"]
    return "\n".join(row["sample"] for row in rows)


@each("rule", sorted(RULES))
def test_a_rule_cites_a_thread_or_the_source_that_prints_its_line(rule: str) -> None:
    table = RULES[rule]

    assert "seen" in table or "raised" in table
    assert THREAD.fullmatch(table.get("seen", "a/b#1"))
    assert SOURCE.fullmatch(table.get("raised", "a.so"))


@pytest.mark.launch
@each(("rule", "source"), sorted(RAISED.items()))
def test_the_installed_source_prints_what_a_sample_shows(rule: str, source: str) -> None:
    file, _, function = source.partition(":")
    path = Path(sysconfig.get_path("purelib")) / file

    assert path.is_file()
    assert is_in(path, function, samples(RULES[rule]))


def is_in(path: Path, function: str, shown: str) -> bool:
    """Whether the function, or the file where none is named, prints words of the samples."""
    if not function:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(run.encode()) >= 0 for run in runs(shown))
    nodes = nodes_at(path, function)
    if any(isinstance(node, ast.ClassDef) and node.name in WORD.findall(shown) for node in nodes):
        return True
    said = " ".join(" ".join(WORD.findall(text)) for node in nodes for text in texts(node))
    sample = " ".join(WORD.findall(shown))
    words = said.split()
    return any(
        f" {' '.join(words[at : at + size])} " in f" {sample} "
        for size in range(2, RUN + 1)
        for at in range(len(words) - size + 1)
        if size == RUN or len("".join(words[at : at + size])) >= SHORTEST
    )


def runs(shown: str) -> Iterator[str]:
    """Parts of the samples' lines of so many words, without the first, which names the exception."""
    for line in shown.splitlines():
        words = line.split()[1:]
        yield from (" ".join(words[at : at + RUN]) for at in range(len(words) - RUN + 1))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes_at(path: Path, function: str) -> list[ast.AST]:
    """The functions or classes of that name, as Class.function.inner: more than one where it is overloaded."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes: list[ast.AST] = [tree_of(path)]
    for name in function.split("."):
        nodes = [one for node in nodes for one in ast.walk(node) if isinstance(one, kinds) and one.name == name]
    return nodes


def texts(node: ast.AST) -> Iterator[str]:
    """What is written in quotes there, and no docstring."""
    docs = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Expr)}
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docs:
            yield one.value
