"""Imports run downwards and never in a circle, at any depth; heavy packages are imported only where they are treated."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.import_graph import arrows_into, circles, imports_of, read_graph
from tests.source import PACKAGE as ROOT
from tests.source import trees

HEAVY = {"torch", "deepspeed", "op_builder", "triton", "plotly"}
MAYBE_HEAVY = re.compile(rf"^(import|from)\b.*\b({'|'.join(HEAVY)})\b", re.MULTILINE)
DOORS = {"dsdoctor.__main__ imports dsdoctor.cli"}
"""``python -m dsdoctor`` is the command line's door."""
ROOMS = (
    *(
        "core",
        "child_scripts",
        "rules",
        "ranks",
        "ui",
        "hosts",
        "probe",
        "checks",
        "diagnosis",
        "builder",
        "config",
        "memory",
    ),
    *("checkpoint", "comm", "hang", "overflow", "run", "cli"),
)
"""The rooms from the ground up: one imports only those before it. CONTRIBUTING.md shows the same list from the top down."""


@cache
def graph() -> dict[str, frozenset[str]]:
    return read_graph(ROOT, trees())


def with_sin(module: str, line: str) -> dict[str, frozenset[str]]:
    """The graph of this very house with one line more in a module."""
    path = ROOT.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = f"{file.read_text(encoding='utf-8')}\n{line}\n"
    return {**graph(), module: imports_of(module, ast.parse(text), graph(), is_package=path.is_dir())}


def test_no_imports_go_in_a_circle() -> None:
    assert circles(graph()) == []


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_up(modules: Mapping[str, frozenset[str]]) -> set[tuple[str, str]]:
    """The imports of a room by a lower one."""
    height = {name: number for number, name in enumerate(ROOMS)}
    return {
        (module, other)
        for module, others in modules.items()
        for other in others
        if room(module) in height and height.get(room(other), 0) > height[room(module)]
    }


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room(module) for module in graph()} - {"", "__main__"} == set(ROOMS)


def test_no_import_goes_up_the_order_of_rooms() -> None:
    assert imports_up(graph()) == set()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dsdoctor.core.host", "from dsdoctor.probe import probe"),
        ("dsdoctor.ui.table", "def late():\n    from dsdoctor.hosts.hostfile import read_hostfile"),
        ("dsdoctor.probe.paths", "import dsdoctor.checks.system"),
        ("dsdoctor.checks.system", "from ..builder.plan import plan"),
        ("dsdoctor.config.judge", "from dsdoctor.memory.predict import predict"),
        ("dsdoctor.comm.models", "from dsdoctor.hang import verdict"),
        ("dsdoctor.overflow.frames.frame", "from ...run import script"),
        ("dsdoctor.run.script", "PLACE = 'dsdoctor.cli.check:check_command'"),
    ],
)
def test_an_import_up_the_order_of_rooms_is_seen(module: str, line: str) -> None:
    assert {importer for importer, _ in imports_up(with_sin(module, line))} == {module}


def test_contributing_shows_the_rooms_in_their_order() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")

    assert tuple(re.findall(r"^  (\w+)/ ", text.split("```")[1], re.MULTILINE)) == ROOMS[::-1]


def test_nothing_below_imports_the_command_line() -> None:
    assert set(arrows_into(graph(), "dsdoctor.cli")) == DOORS


def test_nothing_imports_the_face_of_the_package() -> None:
    assert [module for module, others in graph().items() if "dsdoctor" in others] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dsdoctor.core.host", "from dsdoctor import cli"),
        ("dsdoctor.core.host", "import dsdoctor.cli.check"),
        ("dsdoctor.core.host", "PLACE = 'dsdoctor.cli.check:check_command'"),
        ("dsdoctor.builder.build", "from dsdoctor.cli import main"),
        ("dsdoctor.builder.build", "def late():\n    from dsdoctor.cli import ending"),
        ("dsdoctor.ui", "from ..cli import main"),
        ("dsdoctor.comm.mesh.mesh", "if True:\n    import dsdoctor.cli as face"),
    ],
)
def test_an_import_of_the_command_line_is_seen(module: str, line: str) -> None:
    assert set(arrows_into(with_sin(module, line), "dsdoctor.cli")) > DOORS


@pytest.mark.parametrize(
    ("module", "line", "circle"),
    [
        ("dsdoctor.core.processes", "from dsdoctor.core import host", {"processes", "host"}),
        ("dsdoctor.core.host", "from dsdoctor.probe import probe", {"core", "probe"}),
        ("dsdoctor.core.host", "def late():\n    import dsdoctor.ui.terminal", {"core", "ui"}),
        ("dsdoctor.builder.wheel.shared_object", "from ..make import manifest", {"make", "wheel"}),
        ("dsdoctor.comm.models", "from dsdoctor.comm.control.agent import lead", {"models", "control"}),
        ("dsdoctor.overflow.frames.frame", "import dsdoctor.overflow.verdict.verdict as late", {"frames", "verdict"}),
        ("dsdoctor.diagnosis.models", "from . import scan", {"models", "scan"}),
        ("dsdoctor.probe.paths", "from dsdoctor.probe import probe", {"paths", "probe"}),
    ],
)
def test_a_circle_is_seen_at_any_depth(module: str, line: str, circle: set[str]) -> None:
    found = circles(with_sin(module, line))

    assert any(circle <= {name.rpartition(".")[2] for name in names} for names in found), found


def test_an_import_for_type_checkers_alone_is_no_arrow() -> None:
    line = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dsdoctor.cli import main"

    assert with_sin("dsdoctor.core.host", line) == graph()


def test_the_scripts_for_other_interpreters_know_nothing_of_us() -> None:
    scripts = [module for module in graph() if module.startswith("dsdoctor.child_scripts.")]

    assert len(scripts) > 5
    assert {module: graph()[module] for module in scripts} == dict.fromkeys(scripts, frozenset())
    assert arrows_into(graph(), "dsdoctor.child_scripts") == []


def heavy_imports(path: Path) -> set[str]:
    """Heavy packages that a module imports at its top."""
    text = path.read_text(encoding="utf-8")
    if not MAYBE_HEAVY.search(text):  # most files need not be parsed
        return set()
    top = ast.parse(text).body
    names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {(node.module or "").split(".")[0] for node in top if isinstance(node, ast.ImportFrom)}
    return names & HEAVY


def test_only_the_hooks_import_torch_and_nothing_imports_deepspeed_at_its_top() -> None:
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        allowed = {"torch"} if room == "overflow" else set()
        allowed |= {"triton"} if path.name == "triton_kernel.py" else set()

        assert room == "child_scripts" or heavy_imports(path) <= allowed, path


@pytest.mark.slow
def test_what_reads_traces_and_judges_imports_no_torch() -> None:
    code = (
        "import sys, dsdoctor.run.__main__, dsdoctor.overflow.verdict.verdict, dsdoctor.overflow.trace.trace_file;"
        "import dsdoctor.overflow.frames.frame;"
        "from dsdoctor.cli.app import run; run(['--help']);"
        "print(*sorted({'torch', 'deepspeed', 'triton', 'plotly'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.endswith(
        "\n\n"
    )
