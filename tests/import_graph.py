"""The imports of a package, parsed and not run: which module imports which, and the circles among them at every depth."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, frozenset[str]]
"""Each module's dotted name, and the modules of the same package that it imports."""

PLACE = re.compile(r"(\w+(?:\.\w+)+):\w+")
"""How a string names a function for importlib: "package.module:function"."""
QUOTED_PLACE = re.compile(rf"[\"']{PLACE.pattern}[\"']")


def read_graph(package: Path, trees: Mapping[Path, ast.Module]) -> dict[str, frozenset[str]]:
    """All modules of a package folder, parsed. Imports inside functions count; those under ``if TYPE_CHECKING`` do not."""
    files = {_name(package, path): path for path in trees}
    return {
        name: imports_of(
            name,
            trees[path],
            files,
            is_package=path.name == "__init__.py",
            has_places=bool(QUOTED_PLACE.search(path.read_text(encoding="utf-8"))),
        )
        for name, path in files.items()
    }


def imports_of(
    name: str, tree: ast.Module, modules: Iterable[str], *, is_package: bool = False, has_places: bool = True
) -> frozenset[str]:
    """The modules, of those given, that a parsed module imports. Without places in strings, no expression is looked at."""
    known = modules if isinstance(modules, Mapping) else frozenset(modules)
    found = set()
    for target in _targets(tree, name if is_package else name.rpartition(".")[0], has_places):
        # ``from a import b`` names a module b or a name in a: the longest part that is a module counts
        while target and target not in known:
            target = target.rpartition(".")[0]
        found.add(target)
    return frozenset(found - {"", name})


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Every circle among what stands side by side in a folder, a folder standing for all that is in it.

    That finds each circle of files too: where their paths part, the folders or files go in a circle.
    """
    return [circle for folder in sorted(_folders(graph)) for circle in _components(_arrows(graph, folder))]


def arrows_into(graph: Graph, folder: str) -> list[str]:
    """Imports of a folder's modules by modules outside of it."""
    return [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if _is_below(other, folder) and not _is_below(module, folder)
    ]


def _name(package: Path, path: Path) -> str:
    return ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")


def _targets(tree: ast.AST, inside: str, has_places: bool) -> Iterator[str]:
    """What the import statements below a node name, relative ones resolved, and what strings name for importlib."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _module(node, inside)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from PLACE.findall(node.value) if PLACE.fullmatch(node.value) else ()
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        else:
            waiting += (one for one in ast.iter_child_nodes(node) if has_places or not isinstance(one, ast.expr))


def _module(node: ast.ImportFrom, inside: str) -> str:
    parts = inside.split(".")
    above = parts[: len(parts) + 1 - node.level] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _is_below(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def _folders(graph: Graph) -> set[str]:
    return {".".join(parts[:size]) for name in graph for parts in [name.split(".")] for size in range(1, len(parts))}


def _arrows(graph: Graph, folder: str) -> dict[str, set[str]]:
    """What stands directly in a folder, and whom it imports there. The folder's own ``__init__`` is a file among the others."""
    depth = len(folder.split(".")) + 1
    children = {module: ".".join(module.split(".")[:depth]) for module in graph if _is_below(module, folder)}
    arrows: dict[str, set[str]] = {child: set() for child in children.values()}
    for module, child in children.items():
        arrows[child] |= {children[other] for other in graph[module] if other in children} - {child}
    return arrows


def _components(arrows: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """The sets of more than one in which each reaches each."""
    reach = {start: _reachable(arrows, start) for start in arrows}
    found = {tuple(sorted(other for other in reach[start] if start in reach[other])) for start in arrows}
    return sorted(found - {()})


def _reachable(arrows: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(arrows[start])
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting.extend(arrows[name])
    return reached
