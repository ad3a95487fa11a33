"""The first screen, ``help``, and the names that commands had in an earlier release."""

import json
from pathlib import Path

import pytest

from dsdoctor.cli.aliases import RENAMED, SEPARATE
from dsdoctor.cli.app import COMMANDS, FIRST, GROUPS
from tests.cli.runner import run
from tests.each import each

MACHINE = str(Path(__file__).parents[1] / "machines" / "one-toolkit.json")
OTHER = str(Path(__file__).parents[1] / "machines" / "wsl.json")


def test_the_first_screen_has_ten_commands_a_line_each_and_names_the_others() -> None:
    shown = run("--help", COLUMNS="80").stdout.splitlines()

    assert len(shown) <= 24
    listed = [line.split()[1] for line in shown if line.startswith("│ ") and not line.startswith("│ -")]
    assert listed == list(FIRST)
    assert len(FIRST) == 10
    others = {name for names in GROUPS.values() for name in names} - {*FIRST}
    (more,) = (line for line in shown if line.startswith("More commands:"))
    assert {*more.removeprefix("More commands: ").strip(" .").split(", ")} == others


def test_help_is_a_command_too() -> None:
    every = run("help", "--all").stdout

    assert run("help").stdout == run("--help").stdout
    assert run("help", "wheel", "pick").stdout == run("wheel", "pick", "--help").stdout
    assert every == run("--help", "--all").stdout
    assert all(f"│ {name} " in every for names in GROUPS.values() for name in names)
    assert not [name for name in RENAMED if f"│ {name} " in every]
    assert run("help", "no-such-command").returncode == 2


@each(
    ("old", "words"),
    [
        ("verify", ("/none.whl", "--machine", MACHINE)),
        ("pick", (str(Path(__file__).parent), "--machine", MACHINE)),
        ("look", ("--machine", MACHINE)),
        ("compare", (MACHINE, OTHER)),
        ("plan", ("--machine", MACHINE, "--offline", "-v")),
        ("plan", ("--machine", MACHINE, "--offline", "--arch", "1.0")),
        ("index merge", ("/none", "/none")),
    ],
)
def test_an_earlier_name_does_the_same_and_names_the_new_one(old: str, words: tuple[str, ...]) -> None:
    by_old, by_new = (run(*name.split(), *words) for name in (old, RENAMED[old]))
    documents = [json.loads(run(*name.split(), *words, "--json").stdout) for name in (old, RENAMED[old])]

    assert (by_old.returncode, by_old.stdout) == (by_new.returncode, by_new.stdout)
    assert by_old.stderr == f"! dsdoctor {old} is now dsdoctor {RENAMED[old]}\n{by_new.stderr}"
    assert [document.pop("command") for document in documents] == [old, RENAMED[old].removesuffix(" --dry-run")]
    if old != "plan" or "plan" in documents[1]:
        assert documents[0] == documents[1]


def test_the_document_of_an_earlier_name_has_its_parts_after_an_error_too(tmp_path: Path) -> None:
    parts = {
        "plan": {"plan"},
        "record": {"file"},
        "verify": {"built", "machine"},
        "pick": {"wheel", "wheels"},
        "look": {"machine"},
        "compare": {"differences"},
        "index merge": {"index", "wheels"},
    }
    for old, names in parts.items():
        document = json.loads(run(*old.split(), "--no-such-option", "--json").stdout)
        assert (document["command"], names <= document.keys()) == (old, True)
    assert {*parts} | {"index"} | SEPARATE == {*RENAMED}


@pytest.mark.parametrize("old", RENAMED)
def test_an_earlier_name_shows_the_help_of_the_new_one(old: str) -> None:
    if old not in SEPARATE:
        new = RENAMED[old].removesuffix(" --dry-run")
        assert new in COMMANDS
        assert run(*old.split(), "--help").stdout == run(*new.split(), "--help").stdout


def test_a_plan_for_another_machine_is_no_build_for_it() -> None:
    for option in (("--machine", MACHINE), ("-v",)):
        done = run("build-wheel", *option)

        assert (done.returncode, done.stdout) == (2, "")
        assert "needs --dry-run" in done.stderr
