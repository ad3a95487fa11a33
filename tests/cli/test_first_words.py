"""No terminal is silent for long: what is said before anything is imported, and what a start may import."""

import os
import pty
import subprocess
import sys

import pytest

from dsdoctor.cli.aliases import RENAMED
from dsdoctor.cli.app import COMMANDS, make_app
from dsdoctor.cli.first_words import WORDS, first_words

AT_ONCE = {"explain", "machine compare", "wheel index"}
"""They read a file of ours or two."""


def test_every_command_that_takes_a_while_says_something_first() -> None:
    commands = {name for name in COMMANDS if " " not in name or name.split()[0] in {"wheel", "machine"}}

    assert set(WORDS) | AT_ONCE | {"wheel", "machine"} == commands


@pytest.mark.parametrize("option", ["--help", "-h", "--json", "--version", "--list"])
def test_nothing_is_said_where_the_answer_comes_at_once_or_a_program_asks(option: str) -> None:
    assert [name for name in WORDS if first_words([*name.split(), option])] == []
    assert first_words([]) == ""


@pytest.mark.slow
def test_the_words_come_first_on_a_terminal_and_never_into_a_pipe() -> None:
    """The command waits for its log: whatever is read came before its answer."""
    argv = [sys.executable, "-m", "dsdoctor", "diagnose", "/dev/stdin"]
    outer, inner = pty.openpty()
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=inner, text=True) as child,
    ):
        os.close(inner)
        with open(outer, "rb", buffering=0, closefd=False) as terminal:
            assert terminal.readline() == b"* reading\r\n"
        out, _ = child.communicate("all is well\n", timeout=60)
    os.close(outer)
    piped = subprocess.run(argv, input="all is well\n", capture_output=True, text=True, timeout=60)

    assert "* reading" not in out + piped.stdout + piped.stderr


IMPORTED = """
import os, sys

def at_first_question(event, _):
    if event == "subprocess.Popen":
        print(*sys.modules, flush=True)
        os._exit(0)

sys.addaudithook(at_first_question)
sys.argv = ["dsdoctor", "check", "--offline"]
import dsdoctor.cli
dsdoctor.cli.main()
"""


@pytest.mark.slow
def test_a_check_asks_its_first_question_before_anything_heavy_is_imported() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=60)

    modules = set(found.stdout.split())
    heavy = {
        "elftools",
        "rich",
        "requests",
        "pypi_simple",
        "filelock",
        "packaging",
        "hashlib",
        "msgspec",
        "cyclopts.completion",
    }
    assert {"dsdoctor.probe", "cyclopts"} <= modules
    assert heavy & modules == set()
    assert {
        name for name in modules if name.startswith(("dsdoctor.builder.", "dsdoctor.checks", "dsdoctor.comm."))
    } == {"dsdoctor.builder.check"}


@pytest.mark.slow
def test_a_page_is_explained_without_importing_any_room() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "dsdoctor", "explain", "torch-missing"]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)

    assert "Why it matters" in told.stdout
    assert "dsdoctor.rules.book" in told.stderr
    rooms = ("checks", "comm", "diagnosis", "hang", "memory", "overflow")
    assert not any(f"dsdoctor.{room}." in told.stderr for room in rooms)


@pytest.mark.slow
def test_the_version_is_told_without_the_command_line_of_any_command() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "dsdoctor", "--version"]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)

    assert "Python" in told.stdout
    assert "cyclopts" not in told.stderr
    assert "rich" not in told.stderr


@pytest.mark.slow
def test_help_names_every_command_and_imports_none() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "dsdoctor", "help", "--all"]
    told = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "COLUMNS": "200"}
    )
    app = make_app()

    for name, entry in COMMANDS.items():
        if entry.place and name not in RENAMED:
            first = (app[name].help or "").splitlines()[0].replace("`", "")
            assert first in told.stdout, name
    assert "Exit status: 0 done" in told.stdout
    assert not any(f"dsdoctor.{part}" in told.stderr for part in ("commands", "builder", "comm", "probe", "report"))
