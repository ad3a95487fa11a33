"""The README and the pages: short enough, no command or option that does not exist, no link into nothing."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import hang_table
from dsdoctor.cli.aliases import RENAMED
from dsdoctor.cli.app import COMMANDS, FIRST, GROUPS, WITHOUT_DOCUMENT, make_app
from dsdoctor.run.__main__ import make_parser
from tests.cli.runner import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```[^\n]*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"(?:^|\$ |\$\(|\| |\"|-m |uvx |exec |, |then )(?:python -m )?dsdoctor ([a-z][a-z-]*(?: [a-z]+)?)?([^\n|;)#]*)",
    re.MULTILINE,
)
OTHERS = {"--help", "--version", "--install-completion", "--json"}

TYPED = {
    "dsdoctor install --ops": "an index and a compiler: tests/wheel/test_install.py compares it with what is printed",
    "comm --hostfile hosts --skip-bad": "four hosts that answer over ssh, or do not",
    "--universal output/global_step2_universal": "DeepSpeed's own converter, and the disk and memory of that day",
    "dsdoctor hang --pid": "a training that hangs while it is asked",
}
"""Outputs that no script makes, by their command, and what making them would take."""


@pytest.fixture(scope="module")
def samples() -> ModuleType:
    """docs/make_samples.py."""
    return loaded("make_samples")


def loaded(name: str) -> ModuleType:
    """A script of docs."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def code(page: Path) -> Iterator[str]:
    """The code blocks and spans of a page."""
    for block, span in CODE.findall(page.read_text(encoding="utf-8")):
        yield block or span


def options_of(command: str) -> set[str]:
    """The names of a command's options."""
    app = make_app()
    for word in command.split():
        app = app[word]
    if app.default_command is None:
        return set()
    return {name for argument in app.assemble_argument_collection() for name in argument.names if name.startswith("-")}


def used() -> list[tuple[str, str, str]]:
    """Page, command, and the words after it, for each command in the pages' code."""
    found = []
    for page in PAGES:
        for text in code(page):
            joined = text.replace("\\\n", " ")
            for first, rest in COMMAND.findall(joined):
                name = next((known for known in (first, first.partition(" ")[0]) if known in COMMANDS), first)
                found.append((page.name, name, (first + rest)[len(name) :]))
    return found


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.slow
def test_every_command_on_a_page_exists_with_its_options() -> None:
    named = used()
    unknown = sorted({(page, name) for page, name, _ in named if name and name not in {*COMMANDS, *WITHOUT_DOCUMENT}})
    known = {name: options_of(name) for name in {name for _, name, _ in named if name in COMMANDS}}
    strange = [
        (page, name, word)
        for page, name, rest in named
        if name in known
        for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)
        if word not in known[name] | OTHERS
    ]

    assert len(named) > 60
    assert (unknown, strange) == ([], [])


@pytest.mark.slow
def test_the_help_of_every_command_has_an_example_that_can_be_typed() -> None:
    app = make_app()
    for name, command in COMMANDS.items():
        if command.place.endswith(":app"):
            continue
        found = app
        for word in name.split():
            found = found[word]
        examples = re.findall(r"^ *Example: (.*)$", found.default_command.__doc__ or "", re.MULTILINE)
        options = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(examples)))

        assert [f"dsdoctor {name}" in line for line in examples] == [True], name
        assert options <= options_of(name) | OTHERS, name


def test_help_shows_the_commands_in_groups_and_breaks_no_line_by_itself() -> None:
    grouped = {name for names in GROUPS.values() for name in names}
    assert grouped == {name for name in {*COMMANDS, *WITHOUT_DOCUMENT} if " " not in name} - {*RENAMED}
    assert grouped > {*FIRST}

    shown = run("check", "--help", COLUMNS="200").stdout

    assert (
        "Ops are grouped: those that can be built in the current environment, required ones that cannot, and optional"
        in shown
    )


def test_every_option_of_run_on_a_page_exists() -> None:
    options = set(make_parser({})._option_string_actions)
    strange = []
    for page in PAGES:
        for text in code(page):
            for words in re.findall(r"dsdoctor\.run ([^\n|]*)", text):
                for word in words.split():
                    if not word.startswith("--"):
                        break
                    if word.partition("=")[0] not in options:
                        strange.append((page.name, word))

    assert strange == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [
        link
        for link in links
        if not re.match(r"https?://", link) and not (page.parent / link).exists() and "rules/" not in link
    ]

    assert missing == []


def test_a_shell_can_read_every_command() -> None:
    for page in PAGES:
        for text in code(page):
            for line in re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE):
                if "<" not in line and not line.endswith("\\"):
                    shlex.split(line)


def test_outputs_of_recorded_machines_are_what_the_commands_print_today(samples: ModuleType) -> None:
    quick = frozenset(name for name, sample in samples.SAMPLES_BY_NAME.items() if sample.quick)

    assert {page.name: samples.stale(page, quick) for page in PAGES if samples.stale(page, quick)} == {}


def test_an_output_that_was_changed_by_hand_is_found_and_mended(samples: ModuleType, tmp_path: Path) -> None:
    page, whole = tmp_path / "page.md", (ROOT / "docs" / "commands" / "check.md").read_text(encoding="utf-8")
    page.write_text(whole.replace("Python 3.11.7", "Python 3.11.6", 1), encoding="utf-8")

    assert samples.stale(page, frozenset({"check"})) == ["check"]
    samples.write(page, frozenset({"check"}))
    assert page.read_text(encoding="utf-8") == whole


def test_in_an_output_of_ranks_a_number_may_change_and_a_word_may_not(samples: ModuleType) -> None:
    said = "dsdoctor: rank 1 (pid 17) waits 4.2 s"

    assert samples.alike("hang", said) == samples.alike("hang", "dsdoctor: rank 0 (pid 9) waits   310 ms")
    assert samples.alike("hang", said) != samples.alike("hang", said.replace("waits", "sleeps"))
    assert samples.alike("config", said) != samples.alike("config", said.replace("17", "18"))


def test_every_output_on_a_page_is_made_by_its_command(samples: ModuleType) -> None:
    named, typed = set(), []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named |= {found["name"] for found in samples.MARKED.finditer(text)}
        for block in re.findall(r"^```\n(\$ .*?)^```", samples.MARKED.sub("", text), re.MULTILINE | re.DOTALL):
            command, *output = block.splitlines()
            if any(line and not line.startswith("$ ") for line in output) and not any(one in command for one in TYPED):
                typed.append((page.name, command))

    assert typed == []
    assert named == set(samples.SAMPLES_BY_NAME)


def test_the_figures_are_those_that_the_benchmarks_wrote() -> None:
    figures = loaded("make_figures")
    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")

    assert figures.page(text) == text, "python docs/make_figures.py makes the table anew"
    assert figures.page(re.sub(r"\d+ pairs", "77 pairs", text)) == text
    assert [row.script for row in figures.ROWS if not (ROOT / "benchmarks" / row.script).is_file()] == []


def test_the_table_of_planted_hangs_is_that_of_its_figures() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "hang-planted-2026-11-22.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "commands" / "hang.md").read_text(encoding="utf-8")

    assert [row for row in hang_table.rows(results) if row not in text] == []


@pytest.mark.launch
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs DeepSpeed and transformers")
def test_outputs_of_deepspeed_and_of_ranks_are_what_the_commands_print_today() -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_samples.py"), "--all", "--check"],
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert (told.stdout, told.returncode) == ("", 0), told.stderr
