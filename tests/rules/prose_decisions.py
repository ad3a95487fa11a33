"""Code that looks into the words of a finding to decide something, read from the syntax tree."""

import ast
from collections.abc import Iterator, Sequence

TESTS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "find", "index"}
"""Methods of a text that ask what it says."""
PATTERNS = {"match", "search", "fullmatch", "findall", "finditer", "split"}
"""Methods of a pattern, or of ``re``, that ask what a text says."""
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)


def decisions(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Every look into a title, the text of a fix or a line of evidence: ``x in finding.title``, a prefix, a pattern.

    >>> [ast.unparse(found) for found in decisions([*ast.walk(ast.parse("'harmless' in finding.title"))])]
    ["'harmless' in finding.title"]
    """
    for node in nodes:
        if _looks(node):
            yield node
        lines = set(_evidence_lines(node))
        yield from (inner for inner in ast.walk(node) if _looks(inner, lines)) if lines else ()


def _looks(node: ast.AST, lines: set[str] | None = None) -> bool:
    """Whether an expression asks what prose says. ``lines``: ask only about these names, which hold lines of evidence."""
    if isinstance(node, ast.Compare) and any(isinstance(one, ast.In | ast.NotIn) for one in node.ops):
        # a title looked up in another text is the same look from the other side
        return any(_is_prose(side, lines) for side in node.comparators) or (lines is None and _is_words(node.left))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    asks = node.func.attr in TESTS and _is_prose(node.func.value, lines)
    return asks or (node.func.attr in PATTERNS and any(_is_prose(given, lines) for given in node.args))


def _evidence_lines(node: ast.AST) -> Iterator[str]:
    """The names that a loop gives to lines of evidence."""
    loops = [node] if isinstance(node, ast.For) else node.generators if isinstance(node, COMPREHENSIONS) else ()
    for loop in loops:
        over = isinstance(loop.iter, ast.Attribute) and loop.iter.attr == "evidence"
        if over and isinstance(loop.target, ast.Name):
            yield loop.target.id


def _is_words(node: ast.expr) -> bool:
    """A title, or the text of a fix."""
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return node.attr == "title" or (node.attr == "text" and name == "fix")


def _is_prose(node: ast.expr, lines: set[str] | None) -> bool:
    if lines is not None:
        return isinstance(node, ast.Name) and node.id in lines
    return _is_words(node) or (isinstance(node, ast.Attribute) and node.attr == "evidence")
