"""One file, two readings: what torch would take for another file than dsdoctor judges is an error, and no converter gets it."""

import contextlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import Plan
from tests.checkpoint.test_universal import adam, convert, converter, universal
from tests.checkpoint.written import Called, Kind, model_states, save
from tests.core.test_zip_file import made, two_faced

LOAD = "import sys, torch; print(sorted(torch.load(sys.argv[1], map_location='cpu', weights_only=False)))"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A tag whose model states show harmless names to one reader, and hand torch's own another pickle, which makes a folder."""
    tag = adam(tmp_path / "saved", Kind(stage=1))
    file, evil = tag / "mp_rank_00_model_states.pt", tmp_path / "evil.pt"
    content = {**model_states(Kind(stage=1), 2, 1), "args": Called("posix", "mkdir", (str(tmp_path / "ran"),))}
    save(evil, content, root="mp_rank_00_model_states")
    file.write_bytes(two_faced(file.read_bytes(), evil.read_bytes()))
    return file


def test_a_file_with_two_directories_is_an_error_and_is_not_converted(planted: Path, tmp_path: Path) -> None:
    program = converter(tmp_path / "python", universal(tmp_path / "prepared", Kind(stage=1)))

    judged = judge(look(tmp_path / "saved"), None, Plan())

    assert [each.rule for each in judged.findings] == ["checkpoint-file-ambiguous"]
    assert planted.name in judged.findings[0].evidence[0]
    assert judged.outcome is None
    assert convert(tmp_path / "saved", tmp_path / "saved/new", program) is None
    assert not (tmp_path / "saved/new").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_planted_file_is_two_files_to_pythons_reader_and_to_torchs(planted: Path, tmp_path: Path) -> None:
    # a Python that compares the locator too refuses it
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(planted) as archive:
        assert b"mkdir" not in archive.read("mp_rank_00_model_states/data.pkl")
    loaded = subprocess.run([sys.executable, "-c", LOAD, str(planted)], capture_output=True, text=True)

    assert "args" in loaded.stdout, loaded.stderr
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize(
    "names",
    [("a/data.pkl", "a/DATA.PKL"), ("b/x", "a/data.pkl"), ("data.pkl",)],
    ids=["which torch takes for one", "in two folders", "in no folder"],
)
def test_names_that_torch_looks_for_in_another_way_are_an_error(names: tuple[str, ...], tmp_path: Path) -> None:
    tag = adam(tmp_path, Kind(stage=1))
    (tag / "mp_rank_00_model_states.pt").write_bytes(made(dict.fromkeys(names, b"\x80\x02}.")))

    assert "checkpoint-file-ambiguous" in [each.rule for each in judge(look(tmp_path), None, Plan()).findings]
