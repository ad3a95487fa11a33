"""Segments that no process uses, of files that real processes have mapped, have open, or left."""

import itertools
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import (
    FIRST_NAMESPACE,
    STARTING_SECONDS,
    _mapped,
    doubt_about,
    look_shared_memory,
    namespace,
)
from dsdoctor.core.snapshot import RecordedHost, Recorder
from dsdoctor.core.text import encode

ENDED = 4194305
"""More than any process number that Linux gives (PID_MAX_LIMIT)."""
DEEPSPEED = "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of the file system that segments lie on, where a process's maps tell a file's device as it is."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


def write(path: Path, *, age: float = 2 * STARTING_SECONDS) -> Path:
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    return path


def left(folder: Path) -> list[str]:
    found = look_shared_memory(str(folder))
    assert found is not None
    return sorted(Path(each.path).name for each in found.leftovers)


def test_only_old_segments_that_we_know_and_whose_maker_is_gone_are_told(folder: Path) -> None:
    told = [DEEPSPEED, "nccl-aB3xYz", f"torch_{ENDED}_2917_0"]
    for name in told:
        write(folder / name)
    for name in (
        "psm_4f1c",
        "sem.mp-x",
        "nccl",
        "deepspeed_",
        f"torch_{os.getpid()}_2917_0",
        "torch_cache",
        "nccl-a b",
    ):
        write(folder / name)
    write(folder / "nccl-young", age=0)
    (folder / "nccl-link").symlink_to(folder / "gone")

    assert [name for name in left(folder) if name != "nccl-link"] == sorted(told)
    (first, *_) = (each for each in (look_shared_memory(str(folder)) or pytest.fail()).leftovers)
    assert first.size == mmap.PAGESIZE
    assert first.age >= 2 * STARTING_SECONDS


def test_what_a_process_has_mapped_or_open_is_not_told_whatever_it_is_called_there(folder: Path) -> None:
    names = ("nccl-mapped", "nccl-open", "nccl-renamed", "nccl-left")
    for name in names:
        write(folder / name)
    script = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
import os
with open(sys.argv[3], "r+b") as file:
    number = os.dup(file.fileno())
    also = mmap.mmap(number, 0)
os.rename(sys.argv[3], sys.argv[3] + "2")
kept = open(sys.argv[2], "rb")
print(flush=True)
input()
"""
    paths = [str(folder / name) for name in names[:3]]
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        during = left(folder)
        process.kill()
    after = left(folder)

    assert during == ["nccl-left"]
    assert after == ["nccl-left", "nccl-mapped", "nccl-open", "nccl-renamed2"]


def test_no_open_file_elsewhere_is_asked_what_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a server that is dead would never answer."""
    write(folder / "nccl-left")
    real, asked = os.stat, list[str]()

    def stat(path: str | Path, **more: object) -> os.stat_result:
        if "/fd/" in str(path):
            asked.append(str(Path(path).readlink()))
        return real(path, **more)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as elsewhere, open(f"{elsewhere}/far", "w"), (folder / "nccl-open").open("w"):
        os.utime(folder / "nccl-open", (0, 0))
        monkeypatch.setattr(os, "stat", stat)
        told = left(folder)

    assert told == ["nccl-left"]
    assert str(folder / "nccl-open") in asked
    assert f"{elsewhere}/far" not in asked


def test_a_process_with_many_files_mapped_is_read_once_for_all_segments() -> None:
    wanted = {(os.makedev(0, 26), number) for number in range(0, 4000, 2)}
    line = b"7f%010x-7f%010x rw-s 00000000 00:%02x %d           /dev/shm/a b\rc\n"
    maps = b"".join(line % (n, n + 1, 26 + (n % 3 == 2), n) for n in range(3000))

    took = []
    for some in ({min(wanted)}, wanted):
        began = time.perf_counter()
        found = {*_mapped(maps, some)}
        took.append(time.perf_counter() - began)

    assert found == {(os.makedev(0, 26), n) for n in range(0, 3000, 2) if n % 3 != 2}
    assert took[1] < 400 * took[0]
    assert not {*_mapped(b"55d0-55d1 rw-p 00000000 00:00 0 [heap]\n\n", wanted)}


def test_a_folder_that_is_not_there_has_none(folder: Path) -> None:
    assert look_shared_memory(str(folder / "gone")) is None
    assert left(folder) == []


def test_of_what_a_hidden_process_may_have_open_nobody_is_sure(folder: Path) -> None:
    path = write(folder / "nccl-left")
    own, another = os.geteuid(), os.geteuid() + 1
    doubts = {}
    for mode, hidden in itertools.product((0o600, 0o666), (set(), {own}, {another})):
        path.chmod(mode)
        doubts[mode, tuple(hidden)] = doubt_about(path.stat(), hidden)

    may, outside = "not every process that may open it shows what it has mapped", doubts[0o600, ()]
    assert (outside == "") == (namespace() == FIRST_NAMESPACE)
    assert doubts == {
        (0o600, ()): outside, (0o600, (own,)): may, (0o600, (another,)): outside,
        (0o666, ()): outside, (0o666, (own,)): may, (0o666, (another,)): may,
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_does_not_know_who_uses_it(folder: Path) -> None:
    write(folder / "nccl-left").chmod(0o644)
    folder.chmod(0o755)
    script = f"""
import os, sys
sys.path[:] = {sys.path!r}
from dsdoctor.core.processes import look_shared_memory
os.setuid(65534)
print(look_shared_memory({str(folder)!r}).leftovers[0].doubt)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert said == "it is another user's, whose processes do not show what they have mapped\n"


def test_a_snapshot_holds_what_was_found_and_nothing_of_any_process(folder: Path) -> None:
    write(folder / "nccl-left")
    recorder = Recorder(LocalHost(root=folder))
    found = recorder.shared_memory("/")
    text = encode(recorder.snapshot).decode()

    assert found is not None
    assert [each.path.rpartition("/")[2] for each in found.leftovers] == ["nccl-left"]
    assert RecordedHost(recorder.snapshot).shared_memory("/") == found
    assert RecordedHost(recorder.snapshot).shared_memory("/dev/shm") is None
    assert "r-xp" not in text
    assert "[heap]" not in text
