"""Sentences of Python that fill a place of a finding's words: ``python -m tests.rules.prose [ROOM]`` lists them.

Followed from each call of ``book.finding``: constants, functions of the room, and what is given to a field by its name. An
exception's ``hint`` is that error's own, and evidence says what was measured: both are left out.
"""

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator

from tests.source import PACKAGE, trees

LONG = 40
MIN_WORDS = 5
NO_WORDS = {"case", "evidence", "affects", "blames", "steps"}
NO_PROSE = re.compile(r"\\|^\S*$|\w\(\)$|^\w+(?:Error|Exception)\b")
"""A pattern, a key, a call, or what another program raises."""
PASSING_ON = {"next", "sorted", "tuple", "list", "set"}
PASSING_ON_METHODS = {"join", "get", "format"}
SCREENS = {"text", "page"}
"""Modules that show a report: their words are no finding's."""
LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
"""Nodes that hold no text and no name."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOTED = (*FUNCTIONS, ast.Module, ast.Call)


class Room:
    """The modules of a room: what its names and fields may stand for."""

    def __init__(self, name: str) -> None:
        self.trees = {
            str(path.relative_to(PACKAGE)): tree
            for path, tree in trees().items()
            if path.is_relative_to(PACKAGE / name) and path.stem not in SCREENS
        }
        self._named: dict[str, list[ast.AST]] = {}
        self._fields: dict[str, list[ast.AST]] = {}
        self._inside: dict[ast.AST, ast.AST] = {}
        self._file: dict[ast.AST, str] = {}
        self._seen: set[ast.AST] = set()
        self._calls: list[ast.Call] = []
        self._given: dict[ast.AST, dict[str, list[ast.AST]]] = {}
        for file, tree in self.trees.items():
            self._read(file, tree)

    def _read(self, file: str, tree: ast.Module) -> None:
        waiting: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
        while waiting:
            node, function = waiting.pop()
            self._file[node] = file
            if function is not None:
                self._inside[node] = function
            if isinstance(node, NOTED):
                self._note(node)
            within = node if isinstance(node, FUNCTIONS) else function
            waiting += [(each, within) for each in ast.iter_child_nodes(node) if not isinstance(each, LEAVES)]

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, FUNCTIONS):
            self._named.setdefault(node.name, []).append(node)
        if isinstance(node, ast.Module):
            for line in node.body:
                if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                    self._named.setdefault(line.targets[0].id, []).append(line.value)
        if isinstance(node, ast.Call) and is_finding(node):
            self._calls.append(node)
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                self._fields.setdefault(keyword.arg or "", []).append(keyword.value)

    def found(self) -> Iterator[tuple[str, str]]:
        """Each sentence with its file."""
        for call in self._calls:
            for keyword in call.keywords:
                if keyword.arg not in NO_WORDS:
                    yield from ((f, text) for f, text in self._texts(keyword.value) if is_sentence(text))

    def _texts(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        if node in self._seen or isinstance(node, ast.Compare):
            return
        self._seen.add(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield self._file[node], node.value
        if isinstance(node, ast.JoinedStr):
            yield (
                self._file[node],
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
            self._seen.update(part for part in node.values if isinstance(part, ast.Constant))
        for each in self._behind(node):
            yield from self._texts(each)

    def _behind(self, node: ast.AST) -> Iterator[ast.AST]:
        """What an expression may be made of."""
        if isinstance(node, FUNCTIONS):
            gives = (ast.Return, ast.Yield, ast.YieldFrom)
            yield from (line.value for line in ast.walk(node) if isinstance(line, gives) and line.value is not None)
        elif isinstance(node, ast.IfExp):
            yield from (node.body, node.orelse)
        elif isinstance(node, ast.Name):
            yield from self._local(node) or self._named.get(node.id, ())
        elif isinstance(node, ast.Attribute):
            yield from self._fields.get(node.attr, ()) if node.attr != "hint" else ()
            yield from self._named.get(node.attr, ())
        elif isinstance(node, ast.Call):
            yield node.func
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from node.args if name in PASSING_ON | PASSING_ON_METHODS else ()
        else:
            yield from ast.iter_child_nodes(node)

    def _local(self, name: ast.Name) -> list[ast.AST]:
        """What a function gives to a name of its own."""
        function = self._inside.get(name)
        if function is None:
            return []
        if function not in self._given:
            self._given[function] = given = defaultdict(list)
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    targets, value = node.targets, node.value
                elif isinstance(node, ast.For | ast.comprehension):
                    targets, value = [node.target], node.iter
                else:
                    continue
                for target in _names(*targets):
                    given[target].append(value)
        return self._given[function].get(name.id, [])


def _names(*targets: ast.expr) -> set[str]:
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def is_finding(call: ast.Call) -> bool:
    """Whether it is ``book.finding(...)``."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "finding"


def is_sentence(text: str) -> bool:
    """Whether a text says more than a value does."""
    return len(text) > LONG and len(re.findall(r"[a-z']{2,}", text)) >= MIN_WORDS and not NO_PROSE.search(text)


@functools.cache
def sentences(room: str) -> tuple[tuple[str, str], ...]:
    """Each sentence of a room that fills a place, with its file."""
    return tuple(sorted(set(Room(room).found())))


if __name__ == "__main__":
    for room in sys.argv[1:]:
        print(*(f"{file}: {text!r}" for file, text in sentences(room)), sep="\n")
