"""Files written for real: into folders with planted links, on a full disk, under any umask, and killed on the way."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsdoctor.core import files
from dsdoctor.core.files import PRIVATE, append_text, open_new, replacing, write_bytes, write_text


def stream(path: Path) -> None:
    with open_new(path) as file:
        file.write(b"new")


WRITERS: dict[str, Callable[[Path], None]] = {
    "write_bytes": lambda path: write_bytes(path, b"new"),
    "write_text": lambda path: write_text(path, "new"),
    "open_new": stream,
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@every_writer
def test_a_link_is_replaced_and_what_it_names_stays(write: Callable[[Path], None], tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a.json"
    victim.write_text("precious")
    path.symlink_to(victim)
    for name in (".a.json.tmp", f".a.json.{os.getpid()}.part", f".a.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)

    write(path)

    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("new", False, "precious")
    assert not list(tmp_path.glob(".dsdoctor-*"))


@every_writer
def test_another_name_of_the_old_file_keeps_the_old_content(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a.json").hardlink_to(tmp_path / "victim")

    write(tmp_path / "a.json")

    assert (tmp_path / "victim").read_text() == "precious"


@every_writer
def test_nobody_else_may_write_whatever_the_umask(write: Callable[[Path], None], umask: None, tmp_path: Path) -> None:
    write(tmp_path / "a")

    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_private_file_is_private_from_its_first_moment(umask: None, tmp_path: Path) -> None:
    with replacing(tmp_path / "a", mode=PRIVATE) as file:
        (hidden,) = tmp_path.iterdir()
        file.write(b"token")
        modes = {hidden.stat().st_mode & 0o777}

    assert modes | {(tmp_path / "a").stat().st_mode & 0o777} == {0o600}
    assert len(hidden.name.removeprefix(".dsdoctor-")) >= 16


def test_an_error_on_the_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}


@every_writer
@pytest.mark.parametrize("where", ["no-such-folder/a", "file/a", "folder"])
def test_what_cannot_be_written_is_named(write: Callable[[Path], None], where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    with pytest.raises(OSError, match=r"/(a|folder)'$") as caught:
        write(tmp_path / where)
    assert caught.value.filename == str(tmp_path / where)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_named_with_the_path_and_the_old_file_stays(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dsdoctor.core.files import write_bytes\n"
        "folder = Path(sys.argv[1]); write_bytes(folder / 'a', b'old')\n"
        "try: write_bytes(folder / 'a', bytes(1 << 20))\n"
        "except OSError as error: print(error.errno, error.filename)\n"
        "print(*sorted(path.name for path in folder.iterdir()), (folder / 'a').read_text())\n"
    )
    inside = f'mount -t tmpfs -o size=64k none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(["unshare", "-m", "sh", "-c", inside, script], capture_output=True, text=True, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")

    assert done.stdout.splitlines() == [f"{errno.ENOSPC} {tmp_path / 'a'}", "a old"], done.stderr


def test_a_kill_leaves_the_old_file_and_at_most_a_hidden_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    script = (
        "import sys, time; from pathlib import Path; from dsdoctor.core.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n    file.write(b'half'); print(flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "a")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)

    assert (tmp_path / "a").read_text() == "old"
    assert [path.name.startswith(".dsdoctor-") for path in tmp_path.iterdir() if path.name != "a"] == [True]


def test_a_folder_that_is_exchanged_for_a_link_meanwhile_is_not_followed(tmp_path: Path) -> None:
    folder, theirs = tmp_path / "folder", tmp_path / "theirs"
    folder.mkdir()
    theirs.mkdir()
    with replacing(folder / "a") as file:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(theirs)
        file.write(b"new")

    assert (list(theirs.iterdir()), (tmp_path / "moved" / "a").read_text()) == ([], "new")


def test_a_pipe_and_a_device_are_written_to_and_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "new")
    reader.join(10)
    script = "from pathlib import Path; from dsdoctor.core.files import *; write_text(Path('/dev/stdout'), 'shown')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    write_bytes(Path(os.devnull), b"nothing")

    assert (got, done.stdout, (tmp_path / "pipe").is_fifo()) == (["new"], "shown", True)
    assert Path(os.devnull).is_char_device()


def test_lines_are_added_through_this_users_own_link_only(tmp_path: Path) -> None:
    log, link = tmp_path / "log", tmp_path / "link"
    link.symlink_to(log)
    append_text(link, "one\n")
    append_text(log, "two\n")

    assert (log.read_text(), link.is_symlink(), log.stat().st_mode & 0o777) == ("one\ntwo\n", True, 0o644)
    if os.geteuid() == 0:
        os.chown(link, 4711, 4711, follow_symlinks=False)
        with pytest.raises(OSError, match="link"):
            append_text(link, "three\n")
        assert log.read_text() == "one\ntwo\n"


def test_names_of_the_longest_kind_are_written(tmp_path: Path) -> None:
    write_bytes(tmp_path / ("a" * 255), b"new")

    assert [len(path.name) for path in tmp_path.iterdir()] == [255]
    assert files.PUBLIC == 0o644


def test_folders_made_at_once_in_one_place_do_not_take_each_other_for_left_over(tmp_path: Path) -> None:
    """A folder is there for a moment before its maker holds the lock on it; another process sweeps in that moment."""
    code = """
import os, sys
from pathlib import Path
from dsdoctor.core.files import hidden_folder
for _ in range(150):
    with hidden_folder(Path(sys.argv[1]), "race") as folder:
        (folder / "mine").write_text("x")
        (folder / "mine").read_text()
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=120)[1].decode() for process in running]

    assert errors == ["", "", ""]
    assert list(tmp_path.iterdir()) == []
