"""The folder whose path is the same for everybody: one build at a time, nothing left, nobody else's."""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.core.workspace import FIXED, fixed_folder


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    assert not (FIXED / f"dsdoctor-{name}").exists()


def test_it_is_private_empty_and_goes_away(name: str) -> None:
    with fixed_folder(name, say=print) as folder:
        assert folder == FIXED / f"dsdoctor-{name}"
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "source").mkdir()
    assert not folder.exists()


def test_a_second_build_waits_says_so_and_finds_it_empty(name: str) -> None:
    lines: list[str] = []
    waiting, seen = threading.Event(), []

    def say(line: str) -> None:
        lines.append(line)
        waiting.set()

    def second() -> None:
        with fixed_folder(name, say=say) as folder:
            assert folder is not None
            seen.extend(path.name for path in folder.iterdir() if not path.name.startswith("."))

    with fixed_folder(name, say=print) as folder:
        assert folder is not None
        (folder / "source").mkdir()
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
    thread.join(10)

    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert seen == []


def test_what_a_killed_build_left_is_gone_for_the_next(name: str) -> None:
    killed = (
        "import os, signal; from dsdoctor.core.workspace import fixed_folder\n"
        f"with fixed_folder({name!r}, say=print) as folder:\n"
        "    (folder / 'left').mkdir(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert (FIXED / f"dsdoctor-{name}" / "left").is_dir()

    with fixed_folder(name, say=print) as folder:
        assert folder is not None
        assert not (folder / "left").exists()


@pytest.mark.parametrize("kind", ["link", "open to others", "a file", "another user's"])
def test_one_that_is_not_this_users_alone_is_not_taken(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    path = FIXED / f"dsdoctor-{name}"
    if kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "a file":
        path.touch()
    else:
        path.mkdir(mode=0o700)
        path.chmod(0o755 if kind == "open to others" else 0o700)
        os.chown(path, 65534 if kind == "another user's" else -1, -1)
    try:
        with fixed_folder(name, say=print) as folder:
            assert folder is None
        assert path.is_symlink() or path.exists()
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
