"""dsdoctor's own distributions: what is in them, and that the version stands in one place."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from inspect import Parameter
from pathlib import Path

import pytest

from dsdoctor.cli.aliases import RENAMED
from dsdoctor.cli.app import COMMANDS, make_app
from dsdoctor.core.release import ADDRESS, __version__
from dsdoctor.rules.store import INDEX, TABLE, make_index, make_table, order

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"
PAGES = "https://pages.example.org/dsdoctor/"
ROOMS = sorted(path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "dsdoctor").rglob("__init__.py"))


def test_the_version_stands_in_one_place_and_the_changelog_begins_with_it() -> None:
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == __version__
    written = [
        path
        for path in (ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "README.md", *(ROOT / "dsdoctor").rglob("*.py"))
        if re.search(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])", path.read_text(encoding="utf-8"))
    ]
    assert written == [ROOT / "dsdoctor" / "core" / "release.py"]


KEYWORD_ONLY = Parameter.KEYWORD_ONLY
HIDDEN = {"--ops-because", "--local-rank", "--local_rank"}
"""Given by dsdoctor to itself, and by DeepSpeed's launcher."""
COMPLETIONS = {
    "bash-completion/completions/dsdoctor",
    "zsh/site-functions/_dsdoctor",
    "fish/vendor_completions.d/dsdoctor.fish",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dsdoctor", "_dsdoctor", "dsdoctor.fish"])
def test_what_a_shell_completes_is_what_the_commands_take(name: str) -> None:
    """Where this fails: python ci/write_completions.py."""
    offered = set(re.findall(r"[\w-]+", (ROOT / "completions" / name).read_text(encoding="utf-8")))

    commands = {word for command in {*COMMANDS} - {*RENAMED} for word in command.split()}
    assert commands - offered == set()
    # fish writes an option without its hyphens, and of an option's several names one is enough
    missing = [
        names
        for names in option_names()
        if not {word for name in names for word in (name, name[2:])} & offered and not {*names} & HIDDEN
    ]
    assert missing == []


def option_names() -> list[tuple[str, ...]]:
    """The names of each option of each command."""
    found = []
    for command in {*COMMANDS} - {*RENAMED}:
        app = make_app()
        for word in command.split():
            app = app[word]
        if app.default_command is not None:
            arguments = app.assemble_argument_collection()
            options = [each for each in arguments if each.field_info.kind is KEYWORD_ONLY and each.show]
            found += [tuple(each.names) for each in options if each.names[0].startswith("--")]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built of a copy of this tree."""
    tree, out = tmp_path_factory.mktemp("tree") / "dsdoctor", tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(".git", "*.so", "__pycache__", "*.json", "build", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=tree,
        env={**os.environ, "DSDOCTOR_PAGES": PAGES},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.slow
def test_a_wheel_knows_the_address_that_it_was_built_with_and_a_checkout_knows_none(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    told: dict[str, str] = {}
    exec(zipfile.ZipFile(wheel).read("dsdoctor/core/release.py"), told)

    assert (told["ADDRESS"], ADDRESS) == (PAGES, "")
    assert told["page_address"]("a-rule") == f"{PAGES}rules/a-rule/"  # type: ignore[operator]


@pytest.mark.slow
def test_what_is_no_address_of_pages_is_refused() -> None:
    env = {**os.environ, "DSDOCTOR_PAGES": "example.org/pages"}
    told = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )

    assert told.returncode == 1
    assert told.stderr.strip().endswith("begins with https:// and ends with /")


@pytest.mark.slow
def test_the_wheel_holds_the_rooms_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    info = f"dsdoctor-{__version__}.dist-info"

    data = f"dsdoctor-{__version__}.data"
    assert {name.split("/")[0] for name in names} == {"dsdoctor", info, data}
    assert {name.removeprefix(f"{data}/data/share/") for name in names if name.startswith(data)} == COMPLETIONS
    assert "dsdoctor/ui/page.html.jinja" in names
    assert {room for room in ROOMS if f"{room}/__init__.py" not in names} == set()
    assert {"dsdoctor/py.typed", "dsdoctor/overflow/measure/scan.c", f"{info}/licenses/LICENSE"} <= set(names)
    assert sum(name.startswith("dsdoctor/rules/logs/") for name in names) > 60
    assert sum(name.startswith("dsdoctor/rules/forms/") for name in names) == len(order()["forms"])
    assert {"dsdoctor/rules/order.toml", "dsdoctor/rules/checks.toml"} <= set(names)
    kept = {name: json.loads(zipfile.ZipFile(wheel).read(f"dsdoctor/rules/{name}")) for name in (TABLE, INDEX)}
    assert kept == {TABLE: make_table(), INDEX: make_index()}
    metadata = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert not {"torch", "deepspeed", "mkdocs-material"} & set(needed)


@pytest.mark.slow
def test_the_source_distribution_can_be_built_again_and_holds_no_pages_or_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert "dsdoctor/overflow/measure/scan.c" in names
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"dsdoctor", "dsdoctor.egg-info", "completions"}
