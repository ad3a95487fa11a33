"""A module imports only from floors below its own; rooms of one floor do not know each other."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import dsdoctor

ROOT = Path(dsdoctor.__file__).parent
FLOORS = {
    "errors": 1,
    "machine": 1,
    "finding": 1,
    "sessions": 1,
    "limits": 1,
    "needs": 1,
    "architectures": 2,
    "isa": 2,
    "host": 2,
    "record": 2,
    "answers": 2,
    "built": 2,
    "probe": 3,
    "checks": 3,
    "builder": 3,
    "diagnosis": 3,
    "comm": 3,
    "overflow": 3,
    "delivery": 3,
    "report": 4,
    "work": 5,
    "doctor": 5,
    "sight": 5,
    "order": 5,
    "judging": 5,
    "inspection": 5,
    "picking": 5,
    "targeting": 5,
    "matrix": 5,
    "pushing": 5,
    "caching": 5,
    "finished": 5,
    "rules": 5,
    "run": 5,
    "script": 5,
    "startup": 5,
    "communication": 5,
    "cli": 5,
    "__main__": 5,
}
ROOMS = {"probe", "checks", "builder", "diagnosis", "comm", "overflow", "delivery"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """The names below ``dsdoctor`` that a file imports."""
    found = set()
    for node in ast.walk(tree(path)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("dsdoctor.")}
    return found


DOORS = {ROOT / "comm/__main__.py"}
"""`python -m dsdoctor.comm` is the command line's door, and stands where the launchers' users look for it."""


def place(path: Path) -> str:
    return "__main__" if path in DOORS else path.relative_to(ROOT).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if place(path) not in {"__init__", "inside"}]


def test_no_module_imports_upwards_or_sideways() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in modules()
        for other in imports(path)
        if other != place(path) and (FLOORS[other] > FLOORS[place(path)] or {other, place(path)} <= ROOMS)
    ]

    assert wrong == []


def test_every_module_has_a_floor() -> None:
    assert {place(path) for path in modules()} <= set(FLOORS)


def test_the_scripts_for_other_interpreters_know_nothing_of_us() -> None:
    assert all(imports(path) == set() for path in (ROOT / "inside").glob("*.py"))


HEAVY = {"torch", "deepspeed", "op_builder", "triton", "plotly"}


def heavy_imports(path: Path) -> set[str]:
    """Heavy packages that a module imports at its top."""
    top = [node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {(node.module or "").split(".")[0] for node in top if isinstance(node, ast.ImportFrom)}
    return names & HEAVY


def test_only_the_hooks_import_torch_and_nothing_imports_deepspeed_at_its_top() -> None:
    for path in modules():
        allowed = {"torch"} if place(path) == "overflow" else set()
        allowed |= {"triton"} if path.name == "kernel.py" else set()

        assert heavy_imports(path) <= allowed, path


def test_what_reads_traces_and_judges_imports_no_torch() -> None:
    code = (
        "import sys, dsdoctor.run.__main__, dsdoctor.overflow.verdict.verdict, dsdoctor.overflow.trace.trace_file;"
        "import dsdoctor.overflow.frames.guide_format;"
        "import dsdoctor.cli; from dsdoctor.cli import make_app; make_app();"
        "print(*sorted({'torch', 'deepspeed', 'triton', 'plotly'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
