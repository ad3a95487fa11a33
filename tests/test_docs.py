"""The README and the pages: short enough, no command or option that does not exist, no link into nothing."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.cli.app import COMMANDS, make_app
from dsdoctor.run.__main__ import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```[^\n]*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"(?:^|\$ |\$\(|\| |\"|-m |uvx |exec |, |then )(?:python -m )?dsdoctor ([a-z][a-z-]*(?: [a-z]+)?)?([^\n|;)#]*)",
    re.MULTILINE,
)
OTHERS = {"--help", "--version", "--install-completion", "--json"}


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
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow
def test_every_command_on_a_page_exists_with_its_options() -> None:
    named = used()
    unknown = sorted({(page, name) for page, name, _ in named if name and name not in COMMANDS})
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
