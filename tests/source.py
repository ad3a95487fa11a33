"""The package's own source, parsed once for all tests that read it."""

import ast
from functools import cache
from pathlib import Path

import dsdoctor

PACKAGE = Path(dsdoctor.__file__).parent


@cache
def trees() -> dict[Path, ast.Module]:
    """Each module of the package, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """All nodes of each module."""
    return {path: tuple(ast.walk(tree)) for path, tree in trees().items()}
