"""An exception as a record: its words, its causes, its place, and nothing that it holds."""

import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.ranks.failure import MAX_FRAMES, FailureFrame, read_failure


def ran(file: Path, source: str, **names: Any) -> dict[str, Any]:
    """The names of a file after it has run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    exec(compile(source, str(file), "exec"), names)
    return names


def test_the_place_is_the_innermost_line_of_the_users_own(tmp_path: Path) -> None:
    deep = ran(
        tmp_path / "site-packages" / "deep.py",
        "def step(depth):\n    if depth: step(depth - 1)\n    raise KeyError('label')\n",
    )["step"]
    train = ran(tmp_path / "train.py", "def train(step, depth):\n    step(depth)\n")["train"]

    for depth in (0, MAX_FRAMES + 5):
        with pytest.raises(KeyError) as raised:
            train(deep, depth)
        failure = read_failure(raised.value)

        assert failure.line == "KeyError: 'label'"
        assert failure.place == FailureFrame(str(tmp_path / "train.py"), 2, "train"), depth
        assert len(failure.frames) <= MAX_FRAMES + 1
        assert failure.frames[-1].function == "step"


def test_all_that_a_failure_came_of_is_read_and_none_of_it_is_kept() -> None:
    def failure() -> tuple[Any, weakref.ref[Any]]:
        held = threading.Event()
        try:
            try:
                raise OSError(12, "Cannot allocate memory")
            except OSError as first:
                raise ValueError("a bad batch") from first
        except ValueError as error:
            return read_failure(error), weakref.ref(held)

    record, held = failure()

    assert [(cause.kinds[0], cause.errno) for cause in record.causes] == [("ValueError", None), ("OSError", 12)]
    assert held() is None


def test_words_that_cannot_be_made_are_left_out() -> None:
    class Odd(Exception):
        exceptions = 7

        def __str__(self) -> str:
            raise RuntimeError("no words")

    record = read_failure(Odd())

    assert (record.line, record.causes[0].message, len(record.causes)) == ("Odd", "", 1)


def test_an_exception_that_raises_where_it_is_asked_is_read() -> None:
    class Asked(Exception):
        def __getattr__(self, name: str) -> str:
            return {}[name]

    failed = read_failure(Asked("why"))

    assert (failed.line, failed.causes[0].kinds[0], len(failed.causes)) == ("Asked: why", "Asked", 1)


def test_of_a_long_chain_of_causes_the_nearest_are_read() -> None:
    error = ValueError(0)
    for number in range(1, 300):
        error, before = ValueError(number), error
        error.__cause__ = before

    assert [cause.message for cause in read_failure(error).causes][:2] == ["299", "298"]
    assert len(read_failure(error).causes) == 32


def test_whose_a_file_is_is_said_without_an_import() -> None:
    script = (
        "import sys; from dsdoctor.core.script import is_user_file\n"
        "imported = []; sys.addaudithook(lambda event, given: event == 'import' and imported.append(given[0]))\n"
        "files = '/home/a/train.py', '/usr/lib/python3.11/queue.py', '<string>', sys.modules['os'].__file__\n"
        "print([is_user_file(file) for file in files], imported)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "[True, False, False, False] []\n"
