"""No machine file and no command line ends in a traceback; each input is made of its number."""

from pathlib import Path

import pytest

from dsdoctor.core.errors import NotWritten
from dsdoctor.core.files import append_text
from tests.cli.fuzz import KINDS, SNAPSHOTS, Place, failures, wrong_with
from tests.cli.runner import run
from tests.each import each


@each("kind", list(KINDS))
def test_a_few_of_them_end_in_a_verdict_or_a_sentence(kind: str) -> None:
    assert list(failures(kind, range(4))) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_some_of_them_end_in_a_verdict_or_a_sentence(kind: str) -> None:
    assert list(failures(kind, range(4, 500))) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(KINDS))
def test_all_of_them_end_in_a_verdict_or_a_sentence(kind: str) -> None:
    assert list(failures(kind, range(500, 20_000))) == []


def test_a_traceback_is_found_where_there_is_one(tmp_path: Path) -> None:
    class Broken(Place):
        def ask(self, words: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
            raise KeyError(words[0])

    assert "KeyError: 'check'" in wrong_with(["check"], Broken(tmp_path))


@each(
    "command",
    [
        ("trace", "show"),
        ("trace", "show", "--headroom", "float16"),
        ("diagnose",),
        ("checkpoint",),
        ("compare", "."),
        ("verify",),
        ("pick", "--machine", str(SNAPSHOTS[0])),
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
