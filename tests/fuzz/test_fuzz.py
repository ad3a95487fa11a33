"""No input of any reader ends in a traceback, a defect or a hang; each is made of its number. See readers.py."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.checks import examine
from dsdoctor.core.errors import NotWritten
from dsdoctor.core.files import append_text
from tests.checks.sick import H100, healthy
from tests.cli.runner import run
from tests.each import each
from tests.fuzz.readers import READERS, SHARES, SNAPSHOTS, Place, Words
from tests.fuzz.run import failures, tried
from tests.source import PACKAGE

SEED = "a seed"


@pytest.mark.slow
@each("reader", list(READERS))
def test_a_few_inputs_of_each_reader_end_in_a_verdict_or_a_sentence(reader: str) -> None:
    assert list(failures(reader, range(3), seed=SEED)) == []


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_some_inputs_of_each_reader_end_in_a_verdict_or_a_sentence(reader: str) -> None:
    assert list(failures(reader, range(3, 103), seed=SEED)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("reader", READERS)
def test_all_inputs_of_each_reader_end_in_a_verdict_or_a_sentence(reader: str) -> None:
    assert list(failures(reader, range(103, 103 + SHARES[reader]), seed=SEED)) == []


def test_all_together_are_200_000() -> None:
    assert sum(SHARES.values()) == 200_000


def test_a_traceback_is_found_where_there_is_one(tmp_path: Path) -> None:
    class Broken(Place):
        def ask(self, words: Words, stdin: bytes = b"") -> tuple[int, str, str]:
            raise KeyError("broken")

    assert "KeyError: 'broken'" in tried("machines", 0, SEED, Broken(tmp_path))[2]


@each("status, out", [(5, ""), (0, "a\x1b[2Jb"), (0, "Traceback (most recent call last):")])
def test_an_end_that_is_none_is_found(status: int, out: str, tmp_path: Path) -> None:
    class Odd(Place):
        def ask(self, words: Words, stdin: bytes = b"") -> tuple[int, str, str]:
            return status, out, ""

    folder = tmp_path / f"{status}{len(out)}"
    folder.mkdir()
    assert tried("machines", 0, SEED, Odd(folder))[2]


def test_what_is_not_read_by_any_reader_is_ours() -> None:
    """TOML has no reader here: the only files of it are the book of rules."""
    users = {path.name for path in PACKAGE.rglob("*.py") if "tomllib" in path.read_text()}

    assert users == {"store.py"}


@each(
    "command",
    [
        ("trace", "show"),
        ("trace", "show", "--headroom", "float16"),
        ("diagnose",),
        ("checkpoint",),
        ("machine", "compare", "."),
        (
            "wheel",
            "verify",
        ),
        ("wheel", "pick", "--machine", str(SNAPSHOTS[0])),
    ],
)
def test_a_link_that_leads_to_itself_is_a_sentence(command: tuple[str, ...], tmp_path: Path) -> None:
    loop = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    loop.symlink_to(loop.name)

    done = run(*command, str(loop))

    assert done.returncode in {0, 2}
    assert done.stdout or done.stderr.startswith("✗ ")


def test_nothing_is_added_to_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(NotWritten):
        append_text(tmp_path / "loop", "x")


LONG = "9" * 5000
"""More digits than int() takes: packaging raises a plain ValueError for it, which is no InvalidVersion."""


def test_no_reader_catches_less_than_packaging_raises() -> None:
    narrow = [
        f"{path.name}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"(?:except|suppress).*Invalid(?:Version|Specifier|Requirement)", line)
    ]

    assert narrow == []


@pytest.mark.slow
@each("name", ["setuptools", "pip", "torch", "deepspeed"])
def test_a_version_of_too_many_digits_breaks_no_check_and_no_plan(name: str, tmp_path: Path) -> None:
    for machine in SNAPSHOTS[:2]:
        text = machine.read_text()
        file = tmp_path / f"{name}-{machine.name}"
        file.write_text(re.sub(rf'(\\?"{name}\\?": ?\\?")[\d.]+', lambda found: found[1] + LONG, text))
        for command in ("check", "plan"):
            done = run(command, "--machine", str(file), "--offline", "--json")
            assert done.returncode in {0, 1, 3}
            assert "check-broken" not in done.stdout


@each("capability", ["", "8", "x", "8.x", LONG, "8.6.1"])
def test_a_capability_that_is_none_breaks_no_check(capability: str) -> None:
    machine = healthy(gpus=(replace(H100, capability=capability),))

    assert "check-broken" not in [finding.rule for topic in examine(machine) for finding in topic.findings]
