"""Everything that writes a file which a user names, in a folder where another user has planted links to a victim."""

import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.builder.make.manifest import EARLIEST, Manifest, write_into
from dsdoctor.builder.wheel.index import list_wheels, publish
from dsdoctor.comm.speed import baseline
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.snapshot import Recorder, save
from dsdoctor.overflow.trace.trace_file import TraceWriter
from dsdoctor.overflow.watch.announce import Announcer
from dsdoctor.report import page
from tests.builder.test_wheel import INFO, NAME, contents, wheel
from tests.comm.reports import healthy_4
from tests.overflow.on_disk import header


class Shown:
    """Stands for plotly's figure: a real one takes half a second."""

    def to_html(self, **_: Any) -> str:
        return "<div></div>"


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
        lambda folder: page.write(Shown(), folder / "a.html", title=""),
        ("a.html", f".a.html.{os.getpid()}.part"),
    ),  # type: ignore[arg-type]
    "baseline": (
        lambda folder: baseline.save(healthy_4(), folder / "b.json"),
        ("b.json", f".b.json.{os.getpid()}.part"),
    ),
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
