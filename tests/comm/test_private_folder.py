"""The folder of a run's own files: made where nobody can exchange it, and gone at the next start where its run was killed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from dsdoctor.comm.launch.start import PREFIX, RUNNING, private_folder
from tests.each import each

STRANGER = 55555
HOLD = """
import sys
from dsdoctor.comm.launch.start import private_folder
with private_folder() as (folder, keep):
    (folder / "rank-00000.log").write_text("a line")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for temporary files that is this user's alone."""
    made = Path(tempfile.mkdtemp(prefix="dsdoctor-test-"))
    yield made
    shutil.rmtree(made)


def holder(place: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process with a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(place)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def made_in(place: Path) -> Path:
    """Where a run makes its folder, by then gone."""
    with patch.object(tempfile, "tempdir", str(place)), private_folder() as (folder, _):
        return folder


@pytest.mark.slow
def test_what_a_killed_run_left_goes_at_the_next_start_and_nothing_else(place: Path) -> None:
    killed, left = holder(place)
    running, held = holder(place)
    killed.kill()
    killed.communicate()
    empty, kept, strangers = (place / f"{PREFIX}{name}" for name in ("empty", "kept", "strangers"))
    for folder in (empty, kept, strangers):
        folder.mkdir(mode=0o700)
    (kept / "rank-00000.log").write_text("evidence")
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    if os.geteuid() == 0:
        os.chown(strangers, STRANGER, STRANGER)
    else:
        strangers.rmdir()
    assert (left / RUNNING).exists()

    made = made_in(place)

    there = {path.name for path in place.iterdir()}
    running.communicate()
    assert made.parent == place
    assert there == {
        held.name,
        kept.name,
        "elsewhere",
        f"{PREFIX}link",
        *([strangers.name] if os.geteuid() == 0 else []),
    }
    assert {path.name for path in place.iterdir()} == there - {held.name}


def test_what_a_run_keeps_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with private_folder() as (folder, keep):
        (folder / "rank-00000.log").write_text("evidence")
        keep()

    made_in(place)

    assert [path.name for path in folder.iterdir()] == ["rank-00000.log"]


@each("mode, is_used", [(0o700, True), (0o1777, True), (0o777, False)])
def test_a_folder_for_temporary_files_in_which_others_may_rename_is_not_used(
    mode: int, is_used: bool, tmp_path: Path
) -> None:
    place = Path(tempfile.mkdtemp(prefix="dsdoctor-test-"))
    place.chmod(mode)

    made = made_in(place)

    assert (made.parent == place) is is_used
    assert list(place.iterdir()) == []
    place.rmdir()
