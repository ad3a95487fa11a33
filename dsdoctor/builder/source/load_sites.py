"""A DeepSpeed tree -> every place in it that loads an op. It is parsed, and nothing of it is run."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MENTIONS = re.compile(r"Builder\s*\(|_op_builder\s*\(")
BY_NAME = {"create_op_builder", "get_op_builder"}
HARMLESS = {"is_compatible", "compatible_ops"}


@dataclass(frozen=True, kw_only=True, order=True)
class LoadSite:
    """``file`` is relative to the package deepspeed, ``function`` its qualified name, ``line`` the text of the line."""

    file: str
    function: str
    op: str
    line: str


def find_load_sites(tree: Path) -> tuple[LoadSite, ...]:
    """All sites, of every accelerator. ``tree`` holds the package deepspeed: a source tree, or a site-packages."""
    package = tree / "deepspeed"
    builders = builder_names(tree)
    found: set[LoadSite] = set()
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if file.startswith("ops/op_builder/"):
            continue
        found.update(_sites(path, file, builders))
    for path in sorted(_op_builder(tree).rglob("*.py")):
        file = f"ops/op_builder/{path.relative_to(_op_builder(tree)).as_posix()}"
        found.update(_sites(path, file, builders))
    return tuple(sorted(found))


def builder_names(tree: Path) -> dict[str, str]:
    """Each class of op_builder that builds an op -> the op's name."""
    found: dict[str, str] = {}
    folder = _op_builder(tree)
    for path in sorted(folder.rglob("*.py"), key=lambda path: (len(path.parts), path)):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef) and (name := _op_name(node)):
                found.setdefault(node.name, name)
    return found


def _op_builder(tree: Path) -> Path:
    """In a source tree it stands beside the package, which has a link to it."""
    beside = tree / "op_builder"
    return beside if beside.is_dir() else tree / "deepspeed" / "ops" / "op_builder"


def _op_name(node: ast.ClassDef) -> str | None:
    for statement in node.body:
        if (
            isinstance(statement, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "NAME" for target in statement.targets)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            return statement.value.value
    return None


def _sites(path: Path, file: str, builders: dict[str, str]) -> Iterator[LoadSite]:
    content = path.read_text(encoding="utf-8", errors="replace")
    if not MENTIONS.search(content):
        return
    lines = content.splitlines()
    for function, call in _calls(ast.parse(content), ()):
        op = _loaded(call, builders)
        if op is not None:
            yield LoadSite(file=file, function=".".join(function), op=op, line=lines[call.lineno - 1].strip())


def _calls(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    """Every call with the names of the classes and functions around it, but for what is only asked whether it is compatible."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and child.attr in HARMLESS:
            continue
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.Call):
            yield inside, child
        yield from _calls(child, (*inside, child.name) if named else inside)  # type: ignore[attr-defined]


def _loaded(call: ast.Call, builders: dict[str, str]) -> str | None:
    """The op whose builder a call makes, or None."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called in builders:
        return builders[called]
    if called in BY_NAME and call.args and isinstance(call.args[0], ast.Constant):
        return builders.get(str(call.args[0].value), str(call.args[0].value))
    return None
