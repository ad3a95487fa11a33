"""Everything that writes a file which a user names, in a folder where another user has planted links to a victim."""

import os
import signal
import socket
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dsdoctor.builder.make.manifest import EARLIEST, Manifest, write_into
from dsdoctor.builder.wheel.index import list_wheels, publish
from dsdoctor.comm.command import evidence_folder
from dsdoctor.comm.control.data_process import exchange
from dsdoctor.comm.control.messages import ExchangeMessage, Join, Task
from dsdoctor.comm.models import CommSettings
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import fork
from dsdoctor.core.snapshot import Recorder, save
from dsdoctor.overflow.trace.trace_file import TraceWriter
from dsdoctor.overflow.watch.findings import Announcer
from dsdoctor.ui import page
from tests.builder import test_make
from tests.builder.test_wheel import INFO, NAME, contents, wheel
from tests.overflow.on_disk import header


def packed(folder: Path) -> Path:
    (folder.parent / "made").mkdir()
    return wheel(folder.parent / "made", contents(b"no library", **{f"{INFO}/METADATA": b"Name: deepspeed\n"}))


def write_wheel(folder: Path) -> None:
    plan = replace(BuildPlan(**dict.fromkeys(BuildPlan.__dataclass_fields__, ())), python="", toolkit=None)
    manifest = Manifest(**{**dict.fromkeys(Manifest.__dataclass_fields__, ""), "plan": plan})
    made = write_into(packed(folder), manifest, folder, {}, epoch=EARLIEST)
    assert zipfile.is_zipfile(made)


def announce(folder: Path) -> None:
    Announcer(report_file=str(folder / "report.jsonl")).announce((Finding.note("x", "x"),), [])


INDEX = ("deepspeed/index.html", "index.html", f"deepspeed/{NAME}", f"deepspeed/{NAME}.metadata")
WRITERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "record": (
        lambda folder: save(Recorder(LocalHost()).snapshot, folder / "a.json", home="/root"),
        ("a.json", ".a.json.tmp"),
    ),
    "page": (
        lambda folder: page.write_page(page.Page(title="", run=(), verdict=""), folder / "a.html"),
        ("a.html", f".a.html.{os.getpid()}.part"),
    ),  # type: ignore[arg-type]
    "index": (lambda folder: publish(packed(folder), folder), INDEX),
    "pages-of-an-index": (list_wheels, INDEX[:2]),
    "wheel": (write_wheel, (NAME, f"{NAME}.json")),
    "trace": (lambda folder: TraceWriter(folder / "t.jsonl", header()).close(), ("t.jsonl",)),
}


@pytest.mark.parametrize("what", WRITERS)
def test_nothing_is_written_through_a_planted_link(what: str, tmp_path: Path) -> None:
    write, names = WRITERS[what]
    folder, victim = tmp_path / "shared", tmp_path / "victim"
    (folder / "deepspeed").mkdir(parents=True)
    victim.write_text("precious")
    for name in names:
        (folder / name).symlink_to(victim)

    write(folder)

    assert victim.read_text() == "precious"
    written = [folder / name for name in names if not name.startswith(".")]
    assert [path for path in written if path.is_symlink() or not path.is_file()] == []
    assert not list(folder.rglob(".dsdoctor-*"))


@pytest.mark.slow
def test_a_build_writes_through_no_link_of_a_tree_or_of_a_log_folder(tmp_path: Path) -> None:
    workdir, victim = test_make.workdir_in(tmp_path), tmp_path / "victim"
    victim.write_text("[metadata]\n")
    places = [workdir.folder / "source" / name for name in ("setup.cfg", "build.txt")]
    places += [workdir.logs / name for name in ("wheel.log", "build.log")]
    for place in places:
        place.symlink_to(victim)

    result = test_make.run(test_make.plan("one"), workdir)

    assert result.wheel, result.findings
    assert victim.read_text() == "[metadata]\n"
    written = [workdir.folder / "packing" / name for name in ("setup.cfg", "build.txt")] + places[2:]
    assert [place for place in written if place.is_symlink() or not place.is_file()] == []
    assert written[0].read_text().startswith("[metadata]\n\n[build]\nbuild_lib = ")
    assert {path.name: path.stat().st_mode & 0o777 for path in workdir.logs.iterdir()} == dict.fromkeys(
        ("one.log", "wheel.log", "build.log"), 0o600
    )


def test_the_lock_of_a_folder_that_is_named_is_no_link(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)

    with pytest.raises(OSError, match=r"\.lock"), evidence_folder(CommSettings(out=str(folder))):
        pass
    assert victim.read_text() == "precious"


@pytest.mark.slow
def test_a_data_process_writes_its_stacks_and_its_flight_recorder_through_no_link(tmp_path: Path) -> None:
    victim, (ours, theirs) = tmp_path / "victim", socket.socketpair()
    victim.write_text("precious")
    words = {"backend": "gloo", "device": "cpu", "master": "127.0.0.1", "prefix": "x", "folder": str(tmp_path)}
    join = Join(rank=0, world=2, port=9, hosts=(), seconds=1.0, variables={}, **words)

    def work() -> None:
        for name in (f"stack-{os.getpid()}.txt", f"flight-{os.getpid()}.json"):
            (tmp_path / name).symlink_to(victim)
        ours.close()
        exchange(join, theirs)

    child = fork(work)
    try:
        with theirs, ours, ours.makefile("rb") as said:
            heard = iter(lambda: msgspec.json.decode(said.readline(), type=ExchangeMessage), None)
            assert any(message.error for message in heard), "nobody listens there"
            ours.sendall(msgspec.json.encode(Task()) + b"\n")
            os.kill(child, signal.SIGUSR1)
            stacks, flight = tmp_path / f"stack-{child}.txt", tmp_path / f"flight-{child}.json"
            until = time.monotonic() + 10
            while not (stacks.stat().st_size and flight.stat().st_mode & 0o077 == 0) and time.monotonic() < until:
                time.sleep(0.05)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    assert victim.read_text() == "precious"
    assert "most recent call first" in stacks.read_text()
    assert (flight.is_symlink(), stacks.is_symlink()) == (False, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_report_is_not_appended_through_the_link_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "report.jsonl").symlink_to(victim)
    os.chown(tmp_path / "report.jsonl", 4711, 4711, follow_symlinks=False)

    announce(tmp_path)

    assert victim.read_text() == "precious"
    assert "report.jsonl cannot be written" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a pipe to another user")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_report_is_not_appended_to_the_pipe_of_another(
    is_read: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its opening would wait for a reader, and the training with it."""
    os.mkfifo(tmp_path / "report.jsonl")
    os.chown(tmp_path / "report.jsonl", 4711, 4711)
    reader = os.open(tmp_path / "report.jsonl", os.O_RDONLY | os.O_NONBLOCK) if is_read else None

    announce(tmp_path)

    assert "report.jsonl cannot be written" in capsys.readouterr().err
    if reader is not None:
        assert os.read(reader, 100) == b""
        os.close(reader)


def test_a_report_is_not_appended_to_a_file_that_has_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.link(victim, tmp_path / "report.jsonl")

    announce(tmp_path)

    assert victim.read_text() == "precious"
    assert "report.jsonl cannot be written" in capsys.readouterr().err
